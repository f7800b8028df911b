"""The algorithms, as rows of one table: how rewards become advantages, and which loss trains on them.

Learner, trainer and rollout never ask which one runs. To add one: a pure function in `advantages.py` or `losses.py`,
a small reader here that feeds it from trajectories or packs, a row, a test. Nothing here knows models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.learn.advantages import group_centered
from agent_r1.learn.losses import LossInputs, LossOutput, clipped_surrogate, supervised
from agent_r1.types import CreditedTrajectory, Group, Trajectory

PerToken = list[list[float]]  # one trajectory: [step][response token]

# All groups of the batch in, the same nesting out: some algorithms normalise over the whole batch. One with a critic
# takes, as its second argument, the critic's values by trajectory id.
CreditFunction = Callable[..., list[list[PerToken]]]
LossFunction = Callable[..., LossOutput]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row. The keyword-only arguments of the two functions that have a default are the algorithm's settings."""

    name: str
    paper: str
    credit: CreditFunction  # (groups of trainable trajectories[, values]) -> advantages
    loss: LossFunction  # (LossInputs) -> LossOutput
    needs_critic: bool = False
    min_group_size: int = 1  # below it there is nothing to learn from

    @property
    def settings(self) -> dict[str, object]:
        """Every setting with its value."""
        return _settings_of(self.credit) | _settings_of(self.loss)

    def with_settings(self, **settings: object) -> Algorithm:
        unknown = sorted(settings.keys() - self.settings.keys())
        if unknown:
            raise ConfigError(
                f"algorithm {self.name!r} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], self.settings)}"
            )
        return replace(self, credit=_bind(self.credit, settings), loss=_bind(self.loss, settings))

    def require_group_size(self, group_size: int) -> None:
        """Called with the configured size, before anything is sampled."""
        if group_size < self.min_group_size:
            raise ConfigError(
                f"{self.name} needs at least {self.min_group_size} trajectories per row, got {group_size}. "
                f"Set group_size >= {self.min_group_size}."
            )


def _settings_of(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _bind(function: Callable[..., Result], settings: Mapping[str, object]) -> Callable[..., Result]:
    own = {name: value for name, value in settings.items() if name in _settings_of(function)}
    return partial(function, **own) if own else function


# Credit: trajectories in, one advantage per response token out.


def group_return(groups: Sequence[Sequence[Trajectory]], *, divide_by_std: bool) -> list[list[PerToken]]:
    """Compare the returns inside each group; every token of a trajectory gets the same advantage."""
    result = []
    for group in groups:
        returns_G = torch.tensor([trajectory.total_reward for trajectory in group], dtype=torch.float64)
        advantages = group_centered(returns_G, divide_by_std=divide_by_std).tolist()
        result.append([_spread(trajectory, value) for trajectory, value in zip(group, advantages, strict=True)])
    return result


def _spread(trajectory: Trajectory, value: float) -> PerToken:
    return [[value] * len(step.response_ids) for step in trajectory.steps]


# Losses: which of a pack's tensors and of the step's counts each one reads.


def token_clip(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    return clipped_surrogate(
        inputs.logprobs_T,
        inputs.old_logprobs_T,
        inputs.advantages_T,
        num_tokens=inputs.counts.tokens,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """For supervised fine-tuning; the trajectories come from `as_demonstrations`."""
    return supervised(inputs.logprobs_T, inputs.advantages_T, num_tokens=inputs.counts.tokens)


_ROWS = [
    Algorithm(
        name="grpo",
        paper="arXiv:2402.03300",
        credit=partial(group_return, divide_by_std=True),
        loss=partial(token_clip, clip_low=0.2, clip_high=0.2),
        min_group_size=2,
    ),
]
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def get_algorithm(name: str, **settings: object) -> Algorithm:
    """A name alone is the vetted algorithm; settings change its row and must be ones it has."""
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}.{did_you_mean(name, ALGORITHMS)}")
    return ALGORITHMS[name].with_settings(**settings)


def assign_credit(
    groups: Iterable[Group], algorithm: Algorithm, *, values: Mapping[str, PerToken] | None = None
) -> list[CreditedTrajectory]:
    """Advantages for every trajectory that can be trained on.

    Left out, of the result and of every statistic: trajectories whose machinery failed (their reward says nothing
    about the policy) and those in which nothing was sampled. `values` is the critic's output by trajectory id.
    """
    if algorithm.needs_critic != (values is not None):
        raise ConfigError(
            f"algorithm {algorithm.name!r} {'needs' if algorithm.needs_critic else 'does not use'} a critic, "
            f"but values are {'given' if values is not None else 'missing'}"
        )
    kept = [[t for t in group.trajectories if _is_trainable(t)] for group in groups]
    kept = [group for group in kept if group]
    advantages = algorithm.credit(kept) if values is None else algorithm.credit(kept, values)
    return [
        CreditedTrajectory(trajectory=trajectory, advantages=per_token)
        for group, group_advantages in zip(kept, advantages, strict=True)
        for trajectory, per_token in zip(group, group_advantages, strict=True)
    ]


def as_demonstrations(trajectories: Iterable[Trajectory]) -> list[CreditedTrajectory]:
    """Advantage 1 on every response token: trajectories to imitate."""
    return [
        CreditedTrajectory(trajectory=trajectory, advantages=_spread(trajectory, 1.0))
        for trajectory in trajectories
        if _is_trainable(trajectory)
    ]


def _is_trainable(trajectory: Trajectory) -> bool:
    if trajectory.stop.is_failure or trajectory.num_response_tokens == 0:
        return False
    if not math.isfinite(trajectory.total_reward):
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r} of row {trajectory.row_id!r} has reward "
            f"{trajectory.total_reward}, which would poison its whole group. Scoring must fail such a trajectory."
        )
    return True
