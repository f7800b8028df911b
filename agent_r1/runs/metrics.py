"""Metrics of a batch of finished episodes. Pure functions of groups; docs/metrics.md explains the names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from agent_r1.runs.outcomes import is_success
from agent_r1.runs.statistics import standard_error
from agent_r1.types import CreditedTrajectory, Group, StopReason, Trajectory

Metrics = dict[str, float]


def rollout_metrics(groups: Sequence[Group], *, success_reward: float) -> Metrics:
    """Return metrics over all episodes. Failed ones count as no success and reward 0, so they cannot flatter a run."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    metrics: Metrics = {
        "reward/mean": _mean(episodes, lambda t: 0.0 if t.stop.is_failure else t.total_reward),
        "success": _success(episodes, success_reward),
        "episode/steps": _mean(episodes, lambda t: sum(not step.is_summary for step in t.steps)),
        "episode/tool_calls": _mean(episodes, lambda t: sum(len(step.calls) for step in t.steps)),
        "episode/bad_calls": _mean(
            episodes, lambda t: sum(call.error is not None for s in t.steps for call in s.calls)
        ),
        "episode/response_tokens": _mean(episodes, lambda t: t.num_response_tokens),
        "episode/prompt_tokens": _mean(episodes, lambda t: sum(len(step.prompt_ids) for step in t.steps)),
        "group/count": float(len(groups)),
        "group/no_baseline": float(sum(g.greedy is not None and g.greedy.stop.is_failure for g in groups)),
    }
    metrics |= _role_metrics(episodes)
    if any(step.hidden_messages is not None for t in episodes for step in t.steps):
        metrics |= _context_metrics(episodes)
    total = max(1, len(episodes))
    for reason in StopReason:
        metrics[f"stop/{reason.value}"] = sum(t.stop is reason for t in episodes) / total
    for name in sorted({name for t in episodes for name in t.counts}):
        metrics[name] = sum(t.counts.get(name, 0.0) for t in episodes) / total
    for name in sorted({name for t in episodes for name in t.reward_components} - {"reward"}):
        metrics[f"reward_part/{name}"] = sum(t.reward_components.get(name, 0.0) for t in episodes) / total
    return metrics | _success_by_source(groups, success_reward)


def _role_metrics(episodes: Sequence[Trajectory]) -> Metrics:
    """Return metrics of each role: means over episodes, and over the tokens of the role."""
    metrics: Metrics = {}
    for role in sorted({step.role for t in episodes for step in t.steps} - {""}):
        own = [[step for step in t.steps if step.role == role] for t in episodes]
        logprobs = [value for steps in own for step in steps if step.temperature for value in step.response_logprobs]
        earned = [
            [step.reward for step in steps if not t.stop.is_failure] for t, steps in zip(episodes, own, strict=True)
        ]
        metrics |= {
            f"role/{role}/steps": fmean(map(len, own)),
            f"role/{role}/response_tokens": fmean(sum(len(step.response_ids) for step in steps) for steps in own),
            f"role/{role}/reward": fmean(map(sum, earned)),
            f"role/{role}/cut": fmean(any(step.is_cut for step in steps) for steps in own),
        }
        if logprobs:  # greedy episodes have none
            metrics[f"role/{role}/entropy"] = -fmean(logprobs)
    return metrics


def role_advantages(credited: Sequence[CreditedTrajectory]) -> Metrics:
    """Return the mean advantage of each role's tokens, and the mean of its absolute value."""
    metrics: Metrics = {}
    for role in sorted({step.role for item in credited for step in item.trajectory.steps} - {""}):
        own = [
            value
            for item in credited
            for step, values in zip(item.trajectory.steps, item.advantages, strict=True)
            if step.role == role
            for value in values
        ]
        if own:
            metrics |= {f"role/{role}/advantage": fmean(own), f"role/{role}/advantage_size": fmean(map(abs, own))}
    return metrics


def _success_by_source(groups: Sequence[Group], success_reward: float) -> Metrics:
    """Return the success on each data source, if there are several."""
    sources = sorted({group.row.data_source for group in groups})
    if len(sources) < 2:
        return {}
    played = {source: [t for g in groups if g.row.data_source == source for t in g.trajectories] for source in sources}
    return {f"success/{source}": _success(episodes, success_reward) for source, episodes in played.items()}


def _context_metrics(episodes: Sequence[Trajectory]) -> Metrics:
    """Return metrics of a context policy."""
    hidden = [step.hidden_messages for t in episodes for step in t.steps if step.hidden_messages is not None]
    return {
        "context/hidden_messages": fmean(hidden),
        "context/summaries": _mean(episodes, lambda t: sum(step.is_summary for step in t.steps)),
        "context/bad_summaries": _mean(episodes, lambda t: sum(step.summary in ("cut", "empty") for step in t.steps)),
    }


def success_estimate(groups: Sequence[Group], *, success_reward: float) -> Metrics:
    """Return success with its standard error over rows (attempts at one row are not independent), and pass@k."""
    per_row = [fmean(float(is_success(t, success_reward)) for t in group.trajectories) for group in groups]
    solved = [float(any(is_success(t, success_reward) for t in group.trajectories)) for group in groups]
    result: Metrics = {"success": fmean(per_row), "success_stderr": standard_error(per_row), "rows": float(len(groups))}
    attempts = max(len(group.trajectories) for group in groups)
    if attempts > 1:
        result |= {f"pass@{attempts}": fmean(solved), "samples": float(attempts)}
    return result


def nonfinite(credited: Iterable[CreditedTrajectory]) -> list[CreditedTrajectory]:
    """Return the trajectories whose advantages are not finite."""
    return [item for item in credited if not all(map(math.isfinite, chain.from_iterable(item.advantages)))]


def count_tokens(groups: Iterable[Group]) -> int:
    return sum(trajectory.num_response_tokens for group in groups for trajectory in group.trajectories)


def _mean(episodes: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> float:
    return fmean(value(trajectory) for trajectory in episodes) if episodes else 0.0


def _success(episodes: Sequence[Trajectory], success_reward: float) -> float:
    return _mean(episodes, lambda t: float(is_success(t, success_reward)))


def failed_share(metrics: Mapping[str, float]) -> float:
    """Return the share of episodes that failed through no fault of the policy."""
    return sum(metrics.get(f"stop/{reason.value}", 0.0) for reason in StopReason if reason.is_failure)
