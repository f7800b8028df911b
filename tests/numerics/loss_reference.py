"""The loss of every algorithm and its derivative by each log-prob, written out token by token with plain floats.

Nothing of the package is used, nothing is vectorised and nothing is differentiated automatically: derivatives are
written down case by case. Slow, and meant to be read beside the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    logprob: float
    old: float
    advantage: float
    importance: float = 1.0


Episodes = Sequence[Sequence[Sequence[Token]]]  # [trajectory][step][token]
Slopes = list[list[list[float]]]  # the same nesting: d loss / d logprob
Reference = Callable[..., tuple[float, Slopes]]


def weight(episodes: Episodes, i: int, k: int, aggregation: str, horizon: int) -> float:
    """Of each token of step k of trajectory i, before importance."""
    trajectory_sizes = [sum(len(step) for step in steps) for steps in episodes]
    num_trajectories = sum(1 for size in trajectory_sizes if size > 0)
    num_steps = sum(1 for steps in episodes for step in steps if len(step) > 0)
    if aggregation == "token":  # mean over all tokens
        return 1 / sum(trajectory_sizes)
    if aggregation == "step":  # mean over steps of the mean over the step's tokens
        return 1 / num_steps / len(episodes[i][k])
    if aggregation == "trajectory":  # mean over trajectories of the mean over the trajectory's tokens
        return 1 / num_trajectories / trajectory_sizes[i]
    assert aggregation == "constant"
    return 1 / num_trajectories / horizon


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """min(ratio * A, clip(ratio) * A), not below dual * A for A < 0; and its derivative by the ratio."""
    if advantage >= 0:
        return (ratio * advantage, advantage) if ratio <= 1 + high else ((1 + high) * advantage, 0.0)
    if ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return dual * advantage, 0.0
    return ratio * advantage, advantage


def token_clip(
    episodes: Episodes,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    aggregation: str = "token",
    horizon: int = 256,
) -> tuple[float, Slopes]:
    loss = 0.0
    slopes: Slopes = [[[] for _ in steps] for steps in episodes]
    for i, steps in enumerate(episodes):
        for k, step in enumerate(steps):
            for token in step:
                ratio = exp(token.logprob - token.old)
                objective, by_ratio = clipped(ratio, token.advantage, low, high, dual)
                share = weight(episodes, i, k, aggregation, horizon) * token.importance
                loss -= share * objective
                slopes[i][k].append(-share * by_ratio * ratio)  # d ratio / d logprob = ratio
    return loss, slopes


def step_clip(
    episodes: Episodes, *, low: float = 0.03, high: float = 0.04, aggregation: str = "step", horizon: int = 256
) -> tuple[float, Slopes]:
    """All tokens of a step have its ratio, exp(mean log-ratio). Each token carries the gradient of its own term
    (GSPO-token, arXiv:2507.18071, eq. 14), so d ratio / d logprob = ratio at that token and 0 at the others."""
    loss = 0.0
    slopes: Slopes = [[[] for _ in steps] for steps in episodes]
    for i, steps in enumerate(episodes):
        for k, step in enumerate(steps):
            if not step:
                continue
            ratio = exp(sum(token.logprob - token.old for token in step) / len(step))
            for token in step:
                objective, by_ratio = clipped(ratio, token.advantage, low, high, None)
                share = weight(episodes, i, k, aggregation, horizon) * token.importance
                loss -= share * objective
                slopes[i][k].append(-share * by_ratio * ratio)
    return loss, slopes


def capped_weight(
    episodes: Episodes, *, cap: float = 5.0, aggregation: str = "token", horizon: int = 256
) -> tuple[float, Slopes]:
    """min(ratio, cap) is a number, not a function of the policy."""
    loss = 0.0
    slopes: Slopes = [[[] for _ in steps] for steps in episodes]
    for i, steps in enumerate(episodes):
        for k, step in enumerate(steps):
            for token in step:
                factor = min(exp(token.logprob - token.old), cap) * token.advantage * token.importance
                share = weight(episodes, i, k, aggregation, horizon)
                loss -= share * factor * token.logprob
                slopes[i][k].append(-share * factor)
    return loss, slopes


def likelihood(episodes: Episodes, *, aggregation: str = "token", horizon: int = 256) -> tuple[float, Slopes]:
    loss = 0.0
    slopes: Slopes = [[[] for _ in steps] for steps in episodes]
    for i, steps in enumerate(episodes):
        for k, step in enumerate(steps):
            for token in step:
                share = weight(episodes, i, k, aggregation, horizon) * token.importance
                loss -= share * token.advantage * token.logprob
                slopes[i][k].append(-share * token.advantage)
    return loss, slopes


def value_loss(
    values: Sequence[float], old: Sequence[float], targets: Sequence[float | None], *, clip: float | None = 0.5
) -> tuple[float, list[float]]:
    """Half the mean squared error where there is a target, or the larger of it and that of the clipped value."""
    asked = sum(1 for target in targets if target is not None)
    loss, slopes = 0.0, []
    for value, before, target in zip(values, old, targets, strict=True):
        if target is None:
            slopes.append(0.0)
            continue
        error, slope = (value - target) ** 2, 2 * (value - target)
        if clip is not None and abs(value - before) > clip:
            near = before + clip if value > before else before - clip
            if (near - target) ** 2 > error:
                error, slope = (near - target) ** 2, 0.0
        loss += 0.5 * error / asked
        slopes.append(0.5 * slope / asked)
    return loss, slopes


def _with(reference: Reference, **defaults: object) -> Reference:
    return lambda episodes, **settings: reference(episodes, **(defaults | settings))


# What a name alone stands for.
REFERENCES: dict[str, Reference] = {
    "grpo": token_clip,
    "dr_grpo": _with(token_clip, aggregation="constant"),
    "dapo": _with(token_clip, high=0.28),
    "gspo": step_clip,
    "cispo": capped_weight,
    "rloo": token_clip,
    "remax": likelihood,
    "reinforce": likelihood,
    "reinforce++": token_clip,
    "reinforce++_baseline": token_clip,
    "ppo": token_clip,
    "steppo": step_clip,
    "gigpo": token_clip,
}
