# mypy: ignore-errors
# verifiers is not installed where types are checked
"""A taskset of verifiers with single-turn and with tool tasks, written as its documentation says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    size: int = 20


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(self.config.size):
            data = SumData(prompt=f"{number} + 1", answer=str(number + 1), system_prompt="Add.")
            yield SumTask(data, self.config.task)


class Drawer(vf.State):
    opened: int = 0


class DrawerTools(vf.Toolset[vf.ToolsetConfig, Drawer]):
    TOOL_PREFIX = None

    async def setup_task(self, task: Any) -> None:
        self.answer = task.answer

    @vf.tool
    async def open_drawer(self, number: int) -> str:
        """Open a drawer and read the note in it."""
        self.state.opened += 1
        return self.answer if number == 3 else "empty"


class DrawerTask(vf.Task[SumData, Drawer]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [DrawerTools(vf.ToolsetConfig())]

    @vf.reward
    async def found(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def opened(self, trace: Any) -> float:
        return float(trace.state.opened)


class Drawers(vf.Taskset[DrawerTask, SumsConfig]):
    def load(self) -> Iterator[DrawerTask]:
        for number in range(self.config.size):
            yield DrawerTask(SumData(prompt=f"Find note {number}.", answer=f"note {number}"), self.config.task)


class BoxedTask(vf.Task[SumData]):
    async def setup(self, trace: Any, runtime: Any) -> None:
        await runtime.write("/x", b"")


class Boxed(vf.Taskset[BoxedTask, SumsConfig]):
    def load(self) -> Iterator[BoxedTask]:
        yield BoxedTask(SumData(prompt="?", answer=""), self.config.task)
