"""The environments of `env_workers.py`, in a separate module because worker processes cannot import `__main__`."""

from __future__ import annotations

import asyncio
import time

from agent_r1.envs.base import AgentEnv
from agent_r1.types import Action, Observation, TaskRow, Transition

CPU_SECONDS = 0.002
BLOCKED_SECONDS = 0.005
SHOWN = Observation(messages=[{"role": "user", "content": "You are in a room. " * 50}])  # 950 characters


class Trivial(AgentEnv):
    """Does nothing, so that only the call is measured."""

    async def reset(self, row: TaskRow) -> Observation:
        return SHOWN

    async def step(self, action: Action) -> Transition:
        self.work()
        return Transition(observation=SHOWN)

    def work(self) -> None:
        pass


class Computing(Trivial):
    """Computes in Python for 2 ms of CPU time."""

    def work(self) -> None:
        end = time.thread_time() + CPU_SECONDS
        while time.thread_time() < end:
            pass


class Blocking(Trivial):
    """Blocks the event loop for 5 ms."""

    def work(self) -> None:
        time.sleep(BLOCKED_SECONDS)


class InThread(AgentEnv):
    """Runs `work` in a thread, as is usual."""

    def __init__(self, inner: Trivial) -> None:
        self.inner = inner

    async def reset(self, row: TaskRow) -> Observation:
        return SHOWN

    async def step(self, action: Action) -> Transition:
        await asyncio.to_thread(self.inner.work)
        return Transition(observation=SHOWN)
