"""Evaluation: the same flow as training, greedy or k samples, on a fixed set of rows (a panel)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from operator import itemgetter
from statistics import fmean

from agent_r1.data.panels import panel_hash
from agent_r1.learn.rewards import is_uniform
from agent_r1.ranks.crew import Crew
from agent_r1.rollout.collect import Collector, RowQueue, check_failures
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.metrics import Metrics, rollout_metrics, success_estimate
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.run_dir import Evaluation
from agent_r1.types import Group, TaskRow

OnProgress = Callable[[int, int, float], None]  # episodes scored, episodes in all, success so far


async def evaluate(  # noqa: PLR0913 (what is played, how it is scored, and by whom)
    rows: Sequence[TaskRow],
    *,
    collector: Collector,
    scorer: Scorer,
    success_reward: float,
    seed: int,
    max_error_fraction: float,
    on_progress: OnProgress,
    crew: Crew | None = None,
) -> Evaluation:
    """Play and score all rows, over all ranks. Groups are scored as they finish, so that success is known early."""
    panel = panel_hash(rows)  # first: finds rows that cannot be part of a panel before they are played
    gate, total, crew = scorer.gate(), len(rows) * collector.group_size, crew or Crew()
    played, won = crew.counter(), crew.counter()
    queue = shared_queue(rows, crew)
    on_progress(0, total, 0.0)

    async def score(group: Group) -> Group:
        [scored] = await scorer([group], gate)
        successes = won(sum(is_success(trajectory, success_reward) for trajectory in scored.trajectories))
        done = played(collector.group_size)
        on_progress(done, total, successes / done)
        return scored

    async def play() -> dict[int, Group]:
        scoring: dict[int, asyncio.Task[Group]] = {}
        try:
            async with aclosing(collector.stream(queue, seed=seed)) as finished:
                async for position, group in finished:
                    scoring[position] = asyncio.create_task(score(group))
            return dict(zip(scoring, await asyncio.gather(*scoring.values()), strict=True))
        finally:
            for task in scoring.values():
                task.cancel()

    groups = in_order(await crew.all(play()))
    check_failures(groups, max_error_fraction)
    metrics = episode_metrics(groups, success_reward=success_reward)
    metrics |= success_estimate(groups, success_reward=success_reward)
    return Evaluation(metrics=metrics, groups=groups, panel=panel)


def shared_queue(rows: Sequence[TaskRow], crew: Crew) -> RowQueue:
    """Return a queue of the rows from which all ranks claim."""
    claimed = crew.counter()
    return RowQueue(rows, lambda: claimed(1) - 1, crew.share(len(rows)))


def in_order(parts: Iterable[dict[int, Group]]) -> list[Group]:
    """Return the groups that the ranks have played, by position."""
    return [group for _, group in sorted((item for part in parts for item in part.items()), key=itemgetter(0))]


def episode_metrics(groups: Sequence[Group], *, success_reward: float) -> Metrics:
    """Describe finished episodes, including the share of groups whose attempts all earned the same."""
    metrics = rollout_metrics(groups, success_reward=success_reward)
    metrics["group/zero_variance"] = fmean(float(is_uniform(group)) for group in groups) if groups else 0.0
    return metrics
