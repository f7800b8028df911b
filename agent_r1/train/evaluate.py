"""Evaluation: the same flow as training, greedy or k samples, on a fixed set of rows (a panel)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from statistics import fmean

from agent_r1.data.panels import panel_hash
from agent_r1.learn.rewards import is_uniform
from agent_r1.rollout.collect import Collector, check_failures
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.metrics import Metrics, rollout_metrics, success_estimate
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.run_dir import Evaluation
from agent_r1.types import Group, TaskRow

OnProgress = Callable[[int, int, float], None]  # episodes scored, episodes in all, success so far


async def evaluate(
    rows: Sequence[TaskRow],
    *,
    collector: Collector,
    scorer: Scorer,
    success_reward: float,
    seed: int,
    max_error_fraction: float,
    on_progress: OnProgress,
) -> Evaluation:
    """Play and score all rows. Groups are scored as they finish, so that success is known along the way."""
    panel = panel_hash(rows)  # first: finds rows that cannot be part of a panel before they are played
    scored: dict[int, Group] = {}
    gate, total, successes = scorer.gate(), len(rows) * collector.group_size, 0
    on_progress(0, total, 0.0)

    async def score(position: int, group: Group) -> None:
        nonlocal successes
        [scored[position]] = await scorer([group], gate)
        successes += sum(is_success(trajectory, success_reward) for trajectory in scored[position].trajectories)
        played = len(scored) * collector.group_size
        on_progress(played, total, successes / played)

    scoring: list[asyncio.Task[None]] = []
    try:
        async with aclosing(collector.stream(rows, seed=seed)) as finished:
            async for position, group in finished:
                scoring.append(asyncio.create_task(score(position, group)))
        await asyncio.gather(*scoring)
    finally:
        for task in scoring:
            task.cancel()
    groups = [scored[position] for position in range(len(rows))]
    check_failures(groups, max_error_fraction)
    metrics = episode_metrics(groups, success_reward=success_reward)
    metrics |= success_estimate(groups, success_reward=success_reward)
    return Evaluation(metrics=metrics, groups=groups, panel=panel)


def episode_metrics(groups: Sequence[Group], *, success_reward: float) -> Metrics:
    """Describe finished episodes, including the share of groups whose attempts all earned the same."""
    metrics = rollout_metrics(groups, success_reward=success_reward)
    metrics["group/zero_variance"] = fmean(float(is_uniform(group)) for group in groups) if groups else 0.0
    return metrics
