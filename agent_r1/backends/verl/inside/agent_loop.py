"""The processes that play episodes, and the collector in the driver that hands rows to them.

An agent loop is a Ray actor with the task of the recipe: it plays a row with our flow, scores it with our reward, and
returns the trajectories in compact form. Rows go to whichever loop has the fewest, so a slow episode delays no other
row. A loop that dies raises at once in the driver, which awaits every row itself; nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agent_r1.backends.verl.inside.sampler import VerlSampler
from agent_r1.backends.verl.reader import load_reader
from agent_r1.backends.verl.rows import PackedTrajectory, pack_group, unpack_group
from agent_r1.build.collectors import eval_collector, greedy_collector, train_collector
from agent_r1.build.task import build_task
from agent_r1.config import parse_config
from agent_r1.places import StartedHere
from agent_r1.resources import opened
from agent_r1.rollout.collect import OnEpisode, RowQueue
from agent_r1.types import Group, TaskRow

Purpose = Literal["train", "greedy", "eval"]
COLLECTORS = {"train": train_collector, "greedy": greedy_collector, "eval": eval_collector}


class AgentLoop:
    """Plays rows of one recipe. `start` must be called first."""

    def __init__(self, settings: dict[str, Any], *, folder: str, log: str, loops: int) -> None:
        os.chdir(folder)  # relative paths of the recipe mean the same as in the driver
        self._stack, self._loops = AsyncExitStack(), loops
        self._stack.enter_context(StartedHere())
        self._config = parse_config(settings)
        self._task = build_task(self._config)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("agent_r1").addHandler(handler)

    async def start(self, client: Any, engine: str, model: str) -> int:
        """Open the resources of the task; return the id of this process."""
        sampler, renderer = VerlSampler(client, engine=engine), load_reader(self._config, model).renderer
        self._collectors = {
            name: make(self._config, self._task, renderer, sampler) for name, make in COLLECTORS.items()
        }
        # All loops together play `max_concurrent` episodes at once.
        self._gate = asyncio.Semaphore(max(1, self._config.rollout.max_concurrent // self._loops))
        self._scoring = self._task.scorer.gate()
        await self._stack.enter_async_context(opened(self._task.resources))
        return os.getpid()

    async def play(self, purpose: Purpose, row: TaskRow, ticket: int, seed: int) -> list[PackedTrajectory]:
        queue = RowQueue([row], first=ticket)
        groups = await self._collectors[purpose].claimed(queue, seed=seed, gate=self._gate)
        [scored] = await self._task.scorer([groups[ticket]], self._scoring)
        return pack_group(scored)

    async def ping(self) -> None:
        """Answers if the event loop is not blocked."""

    async def stop(self) -> None:
        await self._stack.aclose()


def start_loops(count: int, settings: dict[str, Any], *, folder: Path, logs: Path) -> list[Any]:
    """Start the processes, spread over the nodes."""
    import ray  # the rest of this module needs none

    remote = ray.remote(AgentLoop).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy="SPREAD")
    return [
        remote.remote(settings, folder=str(folder), log=str(logs / f"agent_loop_{number}.log"), loops=count)
        for number in range(count)
    ]


@dataclass(kw_only=True)
class RemoteCollector:
    """Plays rows on agent loops, as `Collector` does in this process. The groups it returns are already scored."""

    loops: Sequence[Any]
    purpose: Purpose
    group_size: int
    max_concurrent: int
    _load: list[int] = field(init=False)  # rows that each loop plays

    def __post_init__(self) -> None:
        self._load = [0] * len(self.loops)

    async def claimed(
        self, queue: RowQueue, *, seed: int, on_episode: OnEpisode | None = None, gate: asyncio.Semaphore | None = None
    ) -> dict[int, Group]:
        return {ticket: group async for ticket, group in self.stream(queue, seed=seed, on_episode=on_episode)}

    async def stream(
        self, rows: RowQueue, *, seed: int, on_episode: OnEpisode | None = None
    ) -> AsyncGenerator[tuple[int, Group], None]:
        """Yield (ticket, group) as soon as a row has been played and scored."""
        running: set[asyncio.Task[tuple[int, Group]]] = set()
        # Surplus rows wait here, where they cost nothing, and go to the first loop that is free.
        room = max(len(self.loops), 2 * self.max_concurrent // self.group_size)
        try:
            while True:
                while len(running) < room and (claimed := rows.claim()) is not None:
                    running.add(asyncio.create_task(self._play(*claimed, seed)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ticket, group in await asyncio.gather(*done):
                    if on_episode is not None:
                        for trajectory in group.trajectories:
                            on_episode(trajectory)
                    yield ticket, group
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # if a loop died, all of its rows failed

    async def _play(self, ticket: int, row: TaskRow, seed: int) -> tuple[int, Group]:
        number = self._load.index(min(self._load))
        self._load[number] += 1
        try:
            packed = await self.loops[number].play.remote(self.purpose, row, ticket, seed)
        finally:
            self._load[number] -= 1
        return ticket, unpack_group(row, packed)


class ScoredAlready:
    """Stands for the scorer: agent loops score what they play."""

    def gate(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(1)

    async def __call__(self, groups: Sequence[Group], gate: asyncio.Semaphore | None = None) -> list[Group]:
        return list(groups)
