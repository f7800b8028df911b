"""Latency and throughput of `agent-r1 serve` under load, beside the engine's own speed.

    python -m benchmarks.serve                       # writes results/serve.json
    python -m benchmarks.serve --run RUN --tokens 128

The server runs in a process of its own, with the untrained model of the recipe quickstart unless --run names another. N
clients ask one question after another; each answer is streamed and has up to --tokens tokens. `engine` is the same
requests given to the engine without a server, N at a time. Clients and server share the cores of the machine, so
wall-clock times depend on what else runs; CPU seconds of the server process are reported beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from agent_r1.build.resolve import resolve
from agent_r1.config import load_config
from agent_r1.engines.base import Engine
from agent_r1.runs.run_dir import RunDir
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.open_model import choose, open_server
from agent_r1.serve.api.served_model import ServedModel
from agent_r1.wire.chat_request import SamplingOptions
from benchmarks.machine import RESULTS, machine

LEVELS = (1, 16, 64, 200)
ROUNDS = 3  # questions per client, and at least MIN_REQUESTS in all
MIN_REQUESTS = 100
FIRST_TEXT = re.compile(rb'"content":"[^"]')
USED = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer as its client saw it."""

    seconds: float
    first_seconds: float  # until the first text
    tokens: int


Ask = Callable[[int], Awaitable[Answered]]


def question(index: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"How many coins do Ann and Bob have together? {index}"}]


def make_run(folder: Path) -> Path:
    """A run whose checkpoint is the untrained model of the recipe quickstart."""
    config = load_config("quickstart")
    run = folder / "tiny"
    RunDir.create(run, config)
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    resolve(str(config.model.make), recipe=config.recipe)(directory=checkpoint, seed=0)
    return run


@contextmanager
def serving(run: Path, settings: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the address and the process id of a server."""
    command = [sys.executable, "-m", "agent_r1.cli", "serve", str(run), *settings, "--port", "0", "--name", "model"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving" in line)
        yield line.split(" at ")[1].split("/v1")[0], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def under_load(ask: Ask, clients: int) -> dict[str, float]:
    """`clients` at a time ask one question after another."""
    total = max(MIN_REQUESTS, ROUNDS * clients)
    left = iter(range(total))
    answers: list[Answered] = []

    async def client() -> None:
        for index in left:
            answers.append(await ask(index))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    latencies = [1000 * answer.seconds for answer in answers]
    firsts = [1000 * answer.first_seconds for answer in answers]
    return {
        "requests": total,
        "seconds": round(seconds, 2),
        "requests_per_second": round(total / seconds, 1),
        "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds),
        "p50_ms": round(float(np.percentile(latencies, 50)), 1),
        "p99_ms": round(float(np.percentile(latencies, 99)), 1),
        "first_text_p50_ms": round(float(np.percentile(firsts, 50)), 1),
        "first_text_p99_ms": round(float(np.percentile(firsts, 99)), 1),
    }


class Client:
    """One connection that asks one question after another. Reads only what is measured: a complete client would use
    more of the machine than the server."""

    def __init__(self, url: str, tokens: int) -> None:
        self._place, self._tokens = urlsplit(url), tokens
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, index: int) -> Answered:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._place.hostname, self._place.port)
        reader, writer = self._streams
        asked = {
            "model": "model", "messages": question(index), "max_tokens": self._tokens, "temperature": 1, "seed": index,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began, first, answer = time.perf_counter(), 0.0, b""
        writer.write(head.encode() + body)
        while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await reader.read(65536)
            answer += part
            if not part or not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"request {index} was not answered: {answer[:2000]!r}")
            if not first and FIRST_TEXT.search(answer):
                first = time.perf_counter() - began
        seconds = time.perf_counter() - began
        used = USED.search(answer)
        if used is None:
            raise RuntimeError(f"the answer to request {index} is incomplete: {answer[-2000:]!r}")
        return Answered(seconds, first or seconds, int(used[1]))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def server_load(url: str, pid: int, clients: int, tokens: int) -> dict[str, float]:
    free = [Client(url, tokens) for _ in range(clients)]
    everyone = list(free)

    async def ask(index: int) -> Answered:
        client = free.pop()
        try:
            return await client.ask(index)
        finally:
            free.append(client)

    await ask(0)
    before = cpu_seconds(pid)
    measured = await under_load(ask, clients)
    used = cpu_seconds(pid) - before
    for client in everyone:
        client.close()
    return measured | {"server_cpu_seconds": round(used, 2)}


async def engine_load(model: ServedModel, engine: Engine, clients: int, tokens: int) -> dict[str, float]:
    async def ask(index: int) -> Answered:
        began = time.perf_counter()
        prompt = await model.prompt(question(index), ())
        sampling = model.sampling_for(SamplingOptions(temperature=1, max_tokens=tokens, seed=index), prompt)
        completion = await engine.generate(prompt, sampling, session=f"{clients}-{index}")
        seconds = time.perf_counter() - began
        return Answered(seconds, seconds, len(completion.token_ids))

    await ask(0)
    before = time.process_time()
    measured = await under_load(ask, clients)
    own = {key: value for key, value in measured.items() if not key.startswith("first_text")}
    return own | {"cpu_seconds": round(time.process_time() - before, 2)}


def measure(run: Path, levels: tuple[int, ...], tokens: int, settings: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with serving(run, settings) as (url, pid):
        for clients in levels:
            result[str(clients)] = {"server": asyncio.run(server_load(url, pid, clients, tokens))}

    async def engine_alone() -> None:
        model = open_server(choose(str(run), settings, name="model"), agent=False, limits=ServeLimits()).model
        for clients in levels:
            result[str(clients)]["engine"] = await engine_load(model, model.engine, clients, tokens)
        await model.engine.close()

    asyncio.run(engine_alone())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run or a model to serve")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--quick", action="store_true", help="16 and 200 clients only")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve.json")
    parser.add_argument("settings", nargs="*", help="settings of the server, as section.key=value")
    given = parser.parse_args()
    levels = (16, 200) if given.quick else LEVELS
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or make_run(Path(folder))
        clients = measure(run, levels, given.tokens, given.settings)
    about = {"command": " ".join(["python -m benchmarks.serve", *sys.argv[1:]]), "machine": machine()}
    shown = str(given.run) if given.run else "quickstart, untrained"
    result = {**about, "model": shown, "max_tokens": given.tokens, "clients": clients}
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(clients, indent=2))


if __name__ == "__main__":
    main()
