"""Evaluation: the same flow as training, greedy or k samples, on a panel of rows."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.data.panels import panel_hash
from agent_r1.rollout.collect import Collector, OnEpisode, check_failures
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.metrics import rollout_metrics, success_estimate
from agent_r1.runs.run_dir import Evaluation
from agent_r1.types import TaskRow


async def evaluate(
    rows: Sequence[TaskRow],
    *,
    collector: Collector,
    scorer: Scorer,
    success_reward: float,
    seed: int,
    max_error_fraction: float,
    on_episode: OnEpisode | None = None,
) -> Evaluation:
    panel = panel_hash(rows)  # first: rows that cannot be part of one are found before they are played
    groups = await scorer(await collector(rows, seed=seed, on_episode=on_episode))
    check_failures(groups, max_error_fraction)
    metrics = rollout_metrics(groups, success_reward=success_reward)
    metrics |= success_estimate(groups, success_reward=success_reward)
    return Evaluation(metrics=metrics, groups=groups, panel=panel)
