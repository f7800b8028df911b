"""The training loop, strictly on-policy: nothing samples while weights change.

This is the one place where the flow of the whole system is read:

    collect (rows played and scored) -> credit -> update -> weights to the engine -> (evaluate, save)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from agent_r1.runs.metrics import Metrics
from agent_r1.types import CreditedTrajectory, Group


class Parts(Protocol):
    """What the loop is made of. `Trainer` is it for a run; tests make it of fakes."""

    async def collect(self, step: int) -> list[Group]: ...
    def assign_credit(self, groups: list[Group]) -> list[CreditedTrajectory]: ...
    def update(self, credited: Sequence[CreditedTrajectory]) -> Metrics: ...
    async def sync_weights(self, version: int) -> None: ...
    async def evaluate(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...
    def report(
        self, step: int, groups: list[Group], credited: Sequence[CreditedTrajectory], metrics: Metrics
    ) -> None: ...


async def train(
    parts: Parts, *, start: int, steps: int, eval_every: int, save_every: int, max_minutes: float | None = None
) -> int:
    """Run optimizer steps start+1 .. steps, or until the time is up; returns the last, which is evaluated and saved.

    Cancelling it saves the last finished step before it returns.
    """
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
            finished, updating = step, False  # only now: a step whose numbers were not written is made again
            last = step == steps or time.monotonic() >= end
            if step % eval_every == 0 or last:
                await parts.evaluate(step)
                last = last or time.monotonic() >= end  # this step has been judged: no need for another one
            if step % save_every == 0 or last:
                parts.save(step)
            if last:
                break
    except BaseException:
        # Ctrl-C, SIGTERM or a failed batch: the weights are those of the last finished step, so keep them.
        if finished > start and not updating:
            parts.save(finished)
        raise
    return finished
