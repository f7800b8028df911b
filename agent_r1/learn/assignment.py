"""Credit assignment: groups of scored trajectories in, credited trajectories out.

The critic's values and the KL to the reference come in as data: select the trajectories with `trainable`, ask the
learner about them, then call `assign_credit`. Nothing here knows models or losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.algorithms import Algorithm, function_name
from agent_r1.learn.credit import Scored, Values
from agent_r1.learn.rewards import RewardShaper, is_uniform, is_valid, total, zeros
from agent_r1.types import CreditedTrajectory, Group, PerToken, Trajectory


def trainable(
    groups: Iterable[Group], algorithm: Algorithm | None = None, shaper: RewardShaper | None = None
) -> list[Group]:
    """The groups with only those trajectories that can be trained on.

    Left out: trajectories whose machinery failed (their reward says nothing about the policy), those in which nothing
    was sampled, and for algorithms with several sampling rounds groups whose attempts all earned the same.
    """
    kept = [replace(group, trajectories=list(filter(_is_trainable, group.trajectories))) for group in groups]
    drops_uniform = algorithm is not None and algorithm.sampling_rounds > 1
    return [group for group in kept if group.trajectories and not (drops_uniform and is_uniform(group, shaper))]


def attempts_of(groups: Iterable[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def assign_credit(
    groups: Iterable[Group],
    algorithm: Algorithm,
    *,
    shaper: RewardShaper | None = None,
    values: Sequence[Values] | None = None,
    kl: Sequence[PerToken] | None = None,
) -> list[CreditedTrajectory]:
    """Compute advantages for every trajectory that can be trained on; the others enter no statistic either.

    `shaper` puts rewards on tokens (default: as paid). `values` of the critic and `kl`, the log-ratio to the reference,
    have one entry for each of `attempts_of(trainable(groups, algorithm, shaper))`.
    """
    if algorithm.needs_critic != (values is not None):
        raise ConfigError(
            f"algorithm {algorithm.name!r} {'needs' if algorithm.needs_critic else 'does not use'} a critic, "
            f"but values are {'given' if values is not None else 'missing'}"
        )
    shaper = shaper or RewardShaper()
    kept = trainable(groups, algorithm, shaper)
    attempts = attempts_of(kept)
    greedy = _greedy_attempts(kept) if algorithm.needs_greedy else [None] * len(kept)
    compared = [trajectory for trajectory in greedy if trajectory is not None]
    # Greedy attempts share the scale of the rewards. They were not sampled, so a KL of theirs would estimate nothing.
    before_kl = shaper.place([*attempts, *compared])
    rewards = shaper.penalize(before_kl, None if kl is None else [*kl, *[None] * len(compared)])
    totals = map(total, rewards[len(attempts) :])
    baselines = [None if trajectory is None else next(totals) for trajectory in greedy]
    scored = iter(
        Scored(
            trajectory=trajectory,
            rewards=placed,
            before_kl=None if kl is None else unpenalized,
            values=known,
            baseline=baseline,
        )
        for trajectory, placed, unpenalized, known, baseline in zip(
            attempts,
            rewards[: len(attempts)],
            before_kl[: len(attempts)],
            [None] * len(attempts) if values is None else values,
            [baseline for group, baseline in zip(kept, baselines, strict=True) for _ in group.trajectories],
            strict=True,
        )
    )
    return _credit([[next(scored) for _ in group.trajectories] for group in kept], algorithm)


def _credit(groups: list[list[Scored]], algorithm: Algorithm) -> list[CreditedTrajectory]:
    """Run the credit function. An error of count, its likely mistake, names it; other errors are raised as they are."""
    if not groups:
        return []
    who = f"credit function {function_name(algorithm.credit)!r}"
    try:
        credits = algorithm.credit(groups)
    except DataError as error:
        raise DataError(f"{who}: {error}") from error
    try:
        return [
            CreditedTrajectory(
                trajectory=item.trajectory,
                advantages=credit.advantages,
                values=None if item.values is None else item.values.per_token,
                value_targets=credit.value_targets,
            )
            for items, each in zip(groups, credits, strict=True)
            for item, credit in zip(items, each, strict=True)
        ]
    except ValueError as error:
        raise DataError(f"{who} must return one credit for each trajectory of each group: {error}") from error


def _greedy_attempts(groups: Sequence[Group]) -> list[Trajectory | None]:
    """The greedy attempt of each group; None if it failed."""
    missing = sum(group.greedy is None for group in groups)
    if missing:
        raise ConfigError(
            f"{missing} of {len(groups)} groups have no greedy attempt to compare with. "
            "Play one per row and set Group.greedy."
        )
    return [g.greedy if g.greedy is not None and _is_trainable(g.greedy) else None for g in groups]


def as_demonstrations(trajectories: Iterable[Trajectory]) -> list[CreditedTrajectory]:
    """Credit for imitation: advantage 1 on every response token.

    How they were sampled (temperature, top-p, top-k) is dropped: imitation trains the plain distribution.
    """
    return [
        CreditedTrajectory(
            trajectory=replace(trajectory, steps=[step.without_sampling() for step in trajectory.steps]),
            advantages=[[1.0 for _ in step] for step in zeros(trajectory)],
        )
        for trajectory in trajectories
        if _is_trainable(trajectory)
    ]


def _is_trainable(trajectory: Trajectory) -> bool:
    if is_valid(trajectory) and not math.isfinite(trajectory.total_reward):
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r} of row {trajectory.row_id!r} has reward "
            f"{trajectory.total_reward}, which would poison its whole group. Scoring must fail such a trajectory."
        )
    return is_valid(trajectory)
