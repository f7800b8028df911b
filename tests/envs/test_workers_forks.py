"""Forks of a worker process by its env, and of the program that owns the pool."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.processes.protocol import EnvCrashed
from agent_r1.types import Transition
from tests.envs.worker_envs import Sure, action
from tests.envs.worker_helpers import is_alive, outcome, pool_of, run, started, wait_until

ROOT = Path(__file__).parents[2]


pool = pool_of(processes=1)


def sums(shown: list[Transition | Exception]) -> list[object]:
    found = [item.observation.messages if isinstance(item, Transition) and item.observation else item for item in shown]
    return [messages[0]["content"] if isinstance(messages, list) else messages for messages in found]


@pytest.mark.parametrize("trick", ["fork", "fork in c", "fork and leave"])
def test_a_fork_of_a_worker_does_not_answer(pool: EnvPool, trick: str) -> None:
    async def forked() -> None:
        envs = [await started(pool, Sure, name) for name in "abc"]
        asked = zip(envs, (trick, "10", "100"), strict=True)
        shown = await asyncio.gather(*(outcome(env.step(action(text))) for env, text in asked))
        assert sums(shown) == ["a: 0", "b: 10", "c: 100"]
        for turn in (1, 2, 3):
            shown = await asyncio.gather(*(outcome(env.step(action("1"))) for env in envs))
            assert sums(shown) == [f"a: {turn}", f"b: {10 + turn}", f"c: {100 + turn}"]

    run(forked())


def test_the_death_of_a_process_is_noticed_although_a_fork_keeps_its_channel_open(pool: EnvPool) -> None:
    async def forked() -> None:
        bomb, calm = await started(pool, Sure, "bomb"), await started(pool, Sure, "calm", 1)
        failed, added = await asyncio.gather(
            outcome(bomb.step(action("fork and die"))), outcome(calm.step(action("2")))
        )
        assert isinstance(failed, EnvCrashed)
        assert sums([added]) == ["calm: 3"]

    run(forked())


def test_a_death_between_calls_is_not_blamed_on_the_next_call(pool: EnvPool) -> None:
    async def forked() -> None:
        envs = [await started(pool, Sure, name) for name in "ab"]
        info = (await envs[0].step(action("fork and stay"))).info
        os.kill(info["pid"], signal.SIGKILL)
        assert wait_until(lambda: not is_alive(info["pid"]))
        assert is_alive(info["child"])
        # Replayed, "a" forks again.
        shown = await asyncio.gather(*(outcome(env.step(action("1"))) for env in envs))
        assert sums(shown) == ["a: 1", "b: 1"]
        assert wait_until(lambda: not is_alive(info["child"]))  # it goes with the process it came from

    run(forked())


PARENT = """
import asyncio, os, time
from agent_r1.envs.processes.pool import EnvPool
from tests.envs.worker_envs import Counting, action, row

pool = EnvPool(processes=1, step_seconds=600)

async def main():
    env = pool.env(Counting, "counting", {})
    await env.reset(row())
    pid = (await env.step(action("0"))).info["pid"]
    heard, said = os.pipe()
    fork = os.fork()
    if fork == 0:  # outlives us, as a data loader may
        try:
            await env.step(action("1"))
        except RuntimeError as error:
            os.write(said, str(error).encode())
        pool.close()
        time.sleep(3600)
    error = os.read(heard, 1000).decode()
    print((await env.step(action("0"))).info["pid"] == pid, pid, fork, error, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_fork_of_the_program_does_not_keep_workers_alive() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    is_untouched, pid, fork, error = parent.stdout.readline().split(maxsplit=3)
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    try:
        assert is_untouched == "True"
        assert "event loop" in error
        assert wait_until(lambda: not is_alive(int(pid)))
        assert is_alive(int(fork))
    finally:
        os.kill(int(fork), signal.SIGKILL)
