"""The training loop, strictly on-policy: nothing samples while weights change.

collect (rows played and scored) -> credit -> update -> weights to the engine -> (evaluate, save)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent_r1.ranks.crew import Crew, OneProcess
from agent_r1.runs.metrics import Metrics
from agent_r1.types import CreditedTrajectory, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Optimizer steps start+1 .. steps, or until the time is up. The last step is always evaluated and saved."""

    start: int = 0
    steps: int
    eval_every: int
    save_every: int
    max_minutes: float | None = None

    def start_clock(self, ranks: OneProcess) -> Callable[[], bool]:
        """Start the clock; return a function that tells all ranks whether the time is up on rank 0."""
        end = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        return lambda: ranks.broadcast(time.monotonic() >= end)


class Parts(Protocol):
    """What the loop needs. `Trainer` implements it for a run."""

    async def collect(self, step: int) -> list[Group]: ...
    def assign_credit(self, groups: list[Group]) -> list[CreditedTrajectory]: ...
    def update(self, credited: list[CreditedTrajectory]) -> Metrics: ...
    async def sync_weights(self, version: int) -> None: ...
    def report(self, step: int, groups: list[Group], batch: list[CreditedTrajectory], metrics: Metrics) -> None: ...
    def tell(self, step: int, groups: list[Group], metrics: Metrics) -> None: ...
    async def evaluate(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...


async def train(parts: Parts, schedule: Schedule, crew: Crew) -> int:
    """Run the steps of the schedule, until the time is up; return the last one, evaluated and saved."""
    finished, updating, time_is_up = schedule.start, False, schedule.start_clock(crew.ranks)
    try:
        for step in range(schedule.start + 1, schedule.steps + 1):
            began = time.perf_counter()
            groups = await parts.collect(step)
            collected = time.perf_counter()
            credited, updating = parts.assign_credit(groups), True
            metrics = parts.update(credited)
            await parts.sync_weights(step)
            metrics |= {"time/collect": collected - began, "time/update": time.perf_counter() - collected}
            parts.report(step, groups, credited, metrics)
            finished, updating = step, False  # only now: a step whose metrics were not written is repeated
            parts.tell(step, groups, metrics)
            last = step == schedule.steps or time_is_up()
            if step % schedule.eval_every == 0 or last:
                await parts.evaluate(step)
                last = last or time_is_up()  # the evaluation may have used up the time
            if step % schedule.save_every == 0 or last:
                parts.save(step)
            if last:
                break
    except BaseException as error:  # save the last finished step, unless its weights have changed since
        if finished > schedule.start and not updating and crew.is_common(error):
            parts.save(finished)
        raise
    return finished
