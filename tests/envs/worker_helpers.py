"""Helpers for tests of worker processes. Not in `worker_envs.py`, which the workers import without pytest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.hosts import WorkerEnv
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.types import Observation, Transition
from tests.envs.worker_envs import action, row

STARTED: list[WorkerEnv] = []
RUNNER = asyncio.Runner()
T = TypeVar("T")


def pool_of(processes: int) -> Any:
    """Return a fixture for all tests of a file. With one process, all episodes share it."""

    @pytest.fixture(scope="module")
    def pool() -> Iterator[EnvPool]:
        made = EnvPool(processes=processes, step_seconds=60)
        yield made
        made.close()

    return pool


async def play(env: AgentEnv, texts: Sequence[str], *, row_id: str = "r") -> list[Observation | Transition]:
    """Return everything that is shown, until the texts run out."""
    try:
        return [await env.reset(row(row_id)), *[await env.step(action(text)) for text in texts]]
    finally:
        await env.close()


def without_info(shown: Sequence[Observation | Transition]) -> list[object]:
    """Return what can be compared: `info` names the process."""
    return [
        (item.observation, item.reward, item.terminated) if isinstance(item, Transition) else item for item in shown
    ]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run in the event loop that all tests share, as a pool belongs to one, and close the envs of `started`."""

    async def closing() -> T:
        try:
            return await work
        finally:
            while STARTED:
                await STARTED.pop().close()

    return RUNNER.run(closing())


async def started(pool: EnvPool, cls: type[AgentEnv], row_id: str, *numbers: int) -> WorkerEnv:
    """Return an env in the middle of an episode."""
    env = pool.env(cls, cls.__name__, {})
    STARTED.append(env)
    await env.reset(row(row_id))
    for number in numbers:
        await env.step(action(str(number)))
    return env


async def outcome(work: Coroutine[Any, Any, Transition]) -> Transition | Exception:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 (looked at by the test)
        return error


async def pid_of(env: AgentEnv) -> int:
    return int((await env.step(action("0"))).info["pid"])
