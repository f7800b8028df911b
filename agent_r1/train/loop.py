"""The training loop, strictly on-policy: nothing samples while weights change.

collect (rows played and scored) -> credit -> update -> weights to the engine -> (evaluate, save)
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from agent_r1.ranks.crew import Crew
from agent_r1.runs.metrics import Metrics
from agent_r1.types import CreditedTrajectory, Group


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


async def train(
    parts: Parts,
    *,
    start: int,
    steps: int,
    eval_every: int,
    save_every: int,
    max_minutes: float | None = None,
    crew: Crew | None = None,
) -> int:
    """Run optimizer steps start+1 .. steps, or until the time is up; return the last one, evaluated and saved.

    Of several ranks, rank 0 has the clock.
    """
    crew = crew or Crew()
    finished, updating = start, False
    end = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    try:
        for step in range(start + 1, steps + 1):
            began = time.perf_counter()
            groups = await parts.collect(step)
            collected = time.perf_counter()
            credited = parts.assign_credit(groups)
            updating = True
            metrics = parts.update(credited)
            await parts.sync_weights(step)
            metrics |= {"time/collect": collected - began, "time/update": time.perf_counter() - collected}
            parts.report(step, groups, credited, metrics)
            finished, updating = step, False  # only now: a step whose metrics were not written is repeated
            parts.tell(step, groups, metrics)
            last = step == steps or crew.ranks.broadcast(time.monotonic() >= end)
            if step % eval_every == 0 or last:
                await parts.evaluate(step)
                last = last or crew.ranks.broadcast(time.monotonic() >= end)  # the evaluation may have used up the time
            if step % save_every == 0 or last:
                parts.save(step)
            if last:
                break
    except BaseException as error:  # save the last finished step, unless its weights have changed since
        if finished > start and not updating and crew.is_common(error):
            parts.save(finished)
        raise
    return finished
