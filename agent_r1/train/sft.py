"""Supervised fine-tuning: imitate demonstrations or a run's own good trajectories, with the learner that RL uses."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agent_r1.data.downloads import Report
from agent_r1.learn.learner import Learner
from agent_r1.runs.metrics import Metrics
from agent_r1.types import CreditedTrajectory, Trajectory

LOSS_WINDOW = 20  # updates over which a loss is averaged
OnUpdate = Callable[[int, int, Metrics], None]  # update, number of updates, metrics


async def imitate(
    learner: Learner,
    batches: Sequence[Sequence[CreditedTrajectory]],
    *,
    target_loss: float | None,
    on_update: OnUpdate,
    report: Report,
) -> None:
    """Train on the batches in order, until the mean loss of the last updates reaches `target_loss`."""
    total = len(batches)
    recent: deque[float] = deque(maxlen=LOSS_WINDOW)
    for update, batch in enumerate(batches, start=1):
        metrics = learner.update(batch)
        recent.append(metrics["loss"])
        reached = target_loss is not None and len(recent) == LOSS_WINDOW and fmean(recent) <= target_loss
        on_update(update, update if reached else total, metrics)
        if reached:
            if update < total:
                report(f"stopped after {update} of at most {total} updates: loss below sft.target_loss={target_loss:g}")
            return
        await asyncio.sleep(0)  # lets Ctrl-C through


def shuffled_batches(
    examples: Sequence[CreditedTrajectory], *, epochs: int, batch_size: int, seed: int
) -> list[list[CreditedTrajectory]]:
    batches = []
    for epoch in range(epochs):
        order = list(examples)
        random.Random(f"sft:{seed}:{epoch}").shuffle(order)
        batches += [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The result of rejection sampling, with counts that explain it."""

    trajectories: list[Trajectory]
    read: int
    good: int  # earned enough
    distinct: int  # good ones without duplicates


def select(trajectories: Iterable[Trajectory], *, min_reward: float, max_per_row: int | None) -> Selection:
    """Keep distinct trajectories that earned `min_reward`, at most the best `max_per_row` of each row, in input order.

    Among equals, the latest are kept: they are closest to the present policy.
    """
    read, good, seen = 0, 0, set()
    rows: dict[str, list[tuple[float, int, Trajectory]]] = {}
    for position, trajectory in enumerate(trajectories):
        read += 1
        if trajectory.stop.is_failure or trajectory.total_reward < min_reward:
            continue
        good += 1
        tokens = tuple((tuple(step.prompt_ids), tuple(step.response_ids)) for step in trajectory.steps)
        if tokens not in seen:
            seen.add(tokens)
            rows.setdefault(trajectory.row_id, []).append((trajectory.total_reward, position, trajectory))
    best = [
        item for row in rows.values() for item in sorted(row, key=lambda item: item[:2])[-(max_per_row or len(row)) :]
    ]
    kept = [trajectory for _, _, trajectory in sorted(best, key=lambda item: item[1])]
    return Selection(trajectories=kept, read=read, good=good, distinct=len(seen))
