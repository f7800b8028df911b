"""Environments that take memory, for tests of worker processes with a limit."""

from __future__ import annotations

import os

from agent_r1.types import Action, Observation, TaskRow, Transition
from tests.envs.worker_envs import MIB, Counting

KEPT: list[object] = []


class Hungry(Counting):
    """`keep 50` leaks 50 MiB, `use 50` takes them for one call, `claim 50` leaks them without writing to them, `fill`
    takes all memory in small parts."""

    async def step(self, action: Action) -> Transition:
        verb, _, size = action.text.partition(" ")
        if verb == "keep":
            KEPT.append(bytearray(b"x") * (int(size) * MIB))
        elif verb == "use":
            bytearray(b"x") * (int(size) * MIB)
        elif verb == "claim":
            KEPT.append(bytes(int(size) * MIB))
        elif verb == "fill":
            while True:
                KEPT.append([float(len(KEPT))])
        elif verb == "refuse":
            raise MemoryError("no more")
        else:
            return await super().step(action)
        return Transition(observation=self.shown(), info={"pid": os.getpid()})


class SureHungry(Hungry):
    deterministic = True


class Growing(SureHungry):
    """Needs 300 MiB to add 7 once a certain file exists."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    async def step(self, action: Action) -> Transition:
        if action.text == "7" and os.path.exists(self.flag):
            bytearray(300 * MIB)
        return await super().step(action)


class Loading(SureHungry):
    """Loads 100 MiB that all episodes of a process share."""

    async def reset(self, row: TaskRow) -> Observation:
        if not KEPT:
            KEPT.append(bytearray(b"x") * (100 * MIB))
        return await super().reset(row)
