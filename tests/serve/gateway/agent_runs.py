"""Play agents through a real gateway, with a scripted policy and a tokenizer of a known family."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from openai import AsyncOpenAI

from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import Script, ScriptedEngine
from agent_r1.flows.budgets import Limits
from agent_r1.resources import opened
from agent_r1.rollout.collect import Collector
from agent_r1.serve.gateway.agents import Agent, FunctionAgent
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.serve.gateway.flow import gateway_flow
from agent_r1.serve.gateway.server import GatewayServer
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import TaskRow, Trajectory
from tests.tokens.small_tokenizers import renderer_of, tokenizer_of

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "top": {"type": "integer"}}},
    },
}
ASK = {"role": "user", "content": "Who?"}

Play = Callable[[TaskRow, ClientSettings], Any]


def search(query: str, top: int = 3) -> str:
    """A call as the policy writes it."""
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}", "top": {top}}}}}\n</tool_call>'


@cache
def renderer() -> Renderer:
    return renderer_of("qwen2_5")


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer_of("qwen2_5").encode(text, add_special_tokens=False)
    return ids


def play(agent: Play | Agent, script: Script, *, rows: Sequence[TaskRow] = (), **settings: Any) -> list[Trajectory]:
    """Play one attempt per row and return their trajectories."""
    return asyncio.run(play_async(agent, script, rows=rows, **settings))


async def play_async(  # noqa: PLR0913 (what the tests vary)
    agent: Play | Agent,
    script: Script,
    *,
    rows: Sequence[TaskRow] = (),
    server: GatewayServer | None = None,
    delay: float = 0.0,
    group_size: int = 1,
    on_failure: Any = "fail",
    model: Renderer | None = None,
    engine: Any = None,
    **limits: Any,
) -> list[Trajectory]:
    server = server or GatewayServer(episode_seconds=20)
    known = renderer() if model is None else model
    flow = gateway_flow(
        server=server,
        agent=FunctionAgent(function=agent, name="task.agent") if callable(agent) else agent,
        tool_format="auto",
        tool_role=None,
        on_failure=on_failure,
        shows_ground_truth=False,
    )
    budget = {"max_steps": 8, "max_response_tokens": 200, "max_context_tokens": 2000, "episode_seconds": 20.0}
    collector = Collector(
        make_flow=lambda row: flow(_no_env),
        sampler=engine or ScriptedEngine(script, tokenizer=tokenizer_of("qwen2_5"), delay=delay),
        renderer=known,
        sampling=Sampling(max_tokens=200, stop_ids=tuple(known.stop_ids)),
        limits=Limits(**(budget | limits)),
        group_size=group_size,
    )
    async with opened([server]):
        groups = await collector(rows or [TaskRow(prompt=[ASK], row_id="r")], seed=0)
    return [trajectory for group in groups for trajectory in group.trajectories]


def _no_env(row: TaskRow) -> Any:
    raise AssertionError("the gateway needs no env")


def openai_client(client: ClientSettings, **settings: Any) -> Any:
    return AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, **({"max_retries": 0} | settings))


async def chat(client: ClientSettings, messages: Sequence[Any], **options: Any) -> Any:
    """One call of the official client; returns the message."""
    async with openai_client(client) as api:
        made = await api.chat.completions.create(model="any", messages=list(messages), **options)
    return made.choices[0].message


def echo(message: Any) -> dict[str, Any]:
    """An answer as the official client sends it back."""
    sent: dict[str, Any] = message.model_dump(exclude_none=True)
    return sent


def result(call: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


Attack = Callable[[ClientSettings], Awaitable[Any]]
