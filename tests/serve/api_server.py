"""Real servers for the tests of `agent-r1 serve`: uvicorn on a free loopback port, with a scripted or a tiny model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agent_r1 import ToolEnv, tool
from agent_r1.build.resolve import resolve
from agent_r1.config import load_config
from agent_r1.engines.base import Engine, Sampling
from agent_r1.engines.scripted import Script, ScriptedEngine
from agent_r1.runs.run_dir import RunDir
from agent_r1.serve.api.agent_mode import AgentMode
from agent_r1.serve.api.app import Server, make_config
from agent_r1.serve.api.bare_mode import BareMode
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.open_model import choose, open_server
from agent_r1.serve.api.served_model import ServedModel
from agent_r1.serve.listening import bind
from agent_r1.tokens.formats.table import get_format
from agent_r1.types import TaskRow
from tests.chatml import collector, renderer, row, tokenizer

MINI = str(Path(__file__).parents[1] / "mini")
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "echo", "arguments": {"text": "%s"}}</tool_call>'
ECHO = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "The same text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


@tool
async def echo(text: str) -> str:
    """The same text, three times; fails on the word fail."""
    if text == "fail":
        raise RuntimeError("broken")
    return text * 3


def scripted_model(engine: Engine, *, max_context_tokens: int = 1000) -> ServedModel:
    return ServedModel(
        name="scripted",
        engine=engine,
        renderer=renderer(),
        tool_format=get_format("hermes"),
        shows_calls=False,
        sampling=Sampling(max_tokens=100, stop_ids=tuple(renderer().stop_ids)),
        max_context_tokens=max_context_tokens,
    )


@contextmanager
def serving(
    server: Server, *, limits: ServeLimits | None = None, key: str | None = None, send_buffer: int | None = None
) -> Iterator[str]:
    """Yield the address of a running server, and stop it as SIGTERM does. `send_buffer`: bytes that the kernel keeps
    for clients that do not read."""
    config = make_config(server, key=key, limits=limits or ServeLimits())
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.listen(config.backlog)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    wait = threading.Event()
    while not running.started and thread.is_alive():
        wait.wait(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(timeout=20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serving_script(
    script: Script, *, limits: ServeLimits | None = None, key: str | None = None, delay: float = 0.0, **model: Any
) -> Iterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(script, tokenizer=tokenizer(), delay=delay)
    limits = limits or ServeLimits()
    served = scripted_model(engine, **model)
    with serving(Server(BareMode(served, limits), served, limits=limits), limits=limits, key=key) as url:
        yield url, engine


@contextmanager
def serving_agent(
    script: Script, *, rows: Sequence[TaskRow] = (), **limits: Any
) -> Iterator[tuple[str, ScriptedEngine]]:
    """An agent with the tool `echo`."""
    engine = ScriptedEngine(script, tokenizer=tokenizer())
    served = scripted_model(engine)
    play = collector(engine, make_env=lambda _: ToolEnv(tools=[echo]), **({"max_response_tokens": 100} | limits))
    mode = AgentMode(served, play, rows or [row()])
    with serving(Server(mode, served, limits=ServeLimits())) as url:
        yield url, engine


def make_run(folder: Path, name: str = "mini") -> Path:
    """A run with an untrained model for its checkpoint."""
    config = load_config(MINI)
    path = folder / name
    RunDir.create(path, config)
    checkpoint = path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    resolve("task.make_model", recipe=config.recipe)(directory=checkpoint, seed=0)
    return path


def mini_server(run: Path, *overrides: str, agent: bool = False, limits: ServeLimits | None = None) -> Server:
    return open_server(choose(str(run), overrides, name="mini"), agent=agent, limits=limits or ServeLimits())


def ask(url: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "scripted", **({} if "prompt" in fields else {"messages": HI}), **fields}
    return httpx.post(f"{url}{path}", json=body, timeout=30)
