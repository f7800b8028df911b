"""Credit assignment: groups of scored trajectories in, one advantage per response token out.

`assign_credit` selects the trajectories to train on, places their rewards on tokens (`rewards.py`) and calls the
algorithm's estimator (`estimators.py`). The critic's values and the KL to the reference come in as data: select
trajectories with `trainable`, query the learner, then call `assign_credit`. Nothing here knows models or losses.

Only what the policy sampled takes part: rewards, values and advantages exist for response tokens alone, so tool text
cannot enter a return, a recursion or a statistic. A step in which nothing was sampled is not a decision; its reward was
already given to the decision before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.rewards import RewardShaper, is_uniform, is_valid, part_of, total
from agent_r1.types import CreditedTrajectory, Group, PerToken, Trajectory

if TYPE_CHECKING:
    from agent_r1.learn.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A critic's values for one trajectory."""

    per_token: PerToken  # value of the state before each response token
    bootstrap: float | None = None  # value of the state from which a truncated episode would have continued, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trajectory with everything that credit may be computed from."""

    trajectory: Trajectory
    rewards: PerToken  # each on the token that earned it; their sum is the return
    before_kl: PerToken | None = None  # the rewards without the KL penalty; None: there is no penalty
    values: Values | None = None
    baseline: float | None = None  # return of the greedy attempt at the same row
    others_acted: bool = False  # the trajectory is the part of one role in an episode of several

    @property
    def total(self) -> float:
        return total(self.rewards)

    @property
    def without_kl(self) -> Scored:
        """This trajectory without its KL penalty, to decide whether a batch has any signal."""
        return self if self.before_kl is None else replace(self, rewards=self.before_kl, before_kl=None)

    @property
    def decisions(self) -> list[int]:
        """The steps in which something was sampled."""
        return [k for k, step in enumerate(self.trajectory.steps) if step.response_ids]

    def spread(self, per_decision: Sequence[float]) -> PerToken:
        """Repeat one number per decision at each of its tokens."""
        sizes = [len(self.trajectory.steps[k].response_ids) for k in self.decisions]
        if len(per_decision) != len(sizes):
            raise self._miscount(len(per_decision), f"{len(sizes)} decisions")
        return self.unflatten([value for value, size in zip(per_decision, sizes, strict=True) for _ in range(size)])

    def unflatten(self, per_token: Sequence[float]) -> PerToken:
        """Nest one number per response token by step."""
        count = self.trajectory.num_response_tokens
        if len(per_token) != count:
            raise self._miscount(len(per_token), f"{count} response tokens")
        numbers = iter(per_token)
        return [[next(numbers) for _ in step.response_ids] for step in self.trajectory.steps]

    def _miscount(self, got: int, wanted: str) -> DataError:
        return DataError(f"got {got} numbers for {wanted} of trajectory {self.trajectory.trajectory_id!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What one trajectory is trained on: an advantage, and for critics a target, per response token."""

    advantages: PerToken
    value_targets: list[list[float | None]] | None = None  # None where the critic is not trained


ScoredGroups = Sequence[Sequence[Scored]]
# All groups of the batch in, the same nesting out: some algorithms normalise over the whole batch.
CreditFunction = Callable[..., list[list[Credit]]]


def trainable(
    groups: Iterable[Group], algorithm: Algorithm | None = None, shaper: RewardShaper | None = None
) -> list[Group]:
    """Keep only the trajectories that can be trained on.

    Drops failed trajectories (their reward says nothing about the policy), those in which nothing was sampled, and, for
    algorithms with several sampling rounds, groups whose attempts all earned the same.
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
        raise ConfigError(f"algorithm {algorithm.name!r}: pass values if and only if it has a critic")
    shaper = shaper or RewardShaper()
    kept = trainable(groups, algorithm, shaper)
    attempts = attempts_of(kept)
    for given in (values, kl):
        if given is not None and len(given) != len(attempts):
            raise ValueError(f"pass one entry for each of {len(attempts)} trajectories, not {len(given)}")
    if shaper.by_role:
        algorithm.require_credit_by_role()
    batches = _batches(kept, by_role=shaper.by_role)
    parts = [part for batch in batches for group in batch for part in group]
    greedy = _greedy_attempts(kept) if algorithm.needs_greedy else {}
    # Greedy attempts share the scale of the rewards, but get no KL penalty: they were not sampled.
    before_kl = shaper.place([*(part.trajectory for part in parts), *greedy.values()])
    own_kl: list[PerToken | None] | None = None
    if kl is not None:
        own_kl = [*([kl[part.attempt][k] for k in part.steps] for part in parts), *[None] * len(greedy)]
    rewards = shaper.penalize(before_kl, own_kl, num_attempts=len(attempts))
    baselines = dict(zip(greedy, map(total, rewards[len(parts) :]), strict=True))
    scored = iter(
        Scored(
            trajectory=part.trajectory,
            rewards=own,
            before_kl=None if kl is None else unpenalized,
            values=None if values is None else part.select(values[part.attempt]),
            baseline=baselines.get(part.group),
            others_acted=len(attempts[part.attempt].roles) > 1,
        )
        for part, own, unpenalized in zip(parts, rewards, before_kl, strict=False)
    )
    nested = [[[next(scored) for _ in group] for group in batch] for batch in batches]
    credited = [each for batch in nested if batch for each in _credit(batch, algorithm.credit)]
    return _join(attempts, parts, credited) if shaper.by_role else credited


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one batch credits of an attempt: all of it, or the steps of one role."""

    group: int  # position of its group
    attempt: int  # position among the attempts of all groups
    steps: list[int]
    trajectory: Trajectory  # reduced to these steps

    def select(self, values: Values) -> Values:
        return replace(values, per_token=[values.per_token[k] for k in self.steps])


def _batches(groups: Sequence[Group], *, by_role: bool) -> list[list[list[_Part]]]:
    """Return the parts of each group in each batch: one batch of whole attempts, or one per role. A part in which
    nothing was sampled is left out."""
    roles: list[str | None] = [*dict.fromkeys(role for each in attempts_of(groups) for role in each.roles)]
    batches = []
    for role in roles if by_role else [None]:
        numbers, batch = count(), []
        for index, group in enumerate(groups):
            parts = [
                _Part(
                    group=index,
                    attempt=next(numbers),
                    steps=[k for k, step in enumerate(each.steps) if role is None or step.role == role],
                    trajectory=each if role is None else part_of(each, role),
                )
                for each in group.trajectories
            ]
            batch.append([part for part in parts if part.trajectory.num_response_tokens])
        batches.append(list(filter(None, batch)))
    return batches


def _credit(groups: list[list[Scored]], credit: CreditFunction) -> list[CreditedTrajectory]:
    try:
        return [
            CreditedTrajectory(
                trajectory=item.trajectory,
                advantages=own.advantages,
                values=None if item.values is None else item.values.per_token,
                value_targets=own.value_targets,
            )
            for items, credits in zip(groups, credit(groups), strict=True)
            for item, own in zip(items, credits, strict=True)
        ]
    except ValueError as error:  # most likely it returned too many or too few numbers
        name = getattr(getattr(credit, "func", credit), "__name__", repr(credit))
        raise DataError(f"credit function {name!r}: {error}") from error


def _join(
    attempts: Sequence[Trajectory], parts: Sequence[_Part], credited: Sequence[CreditedTrajectory]
) -> list[CreditedTrajectory]:
    """Merge the credit of the roles, step by step."""
    joined: dict[str, list[list[Any]]] = {
        name: [[[] for _ in attempt.steps] for attempt in attempts]
        for name in ("advantages", "values", "value_targets")
        if all(getattr(each, name) is not None for each in credited)
    }
    for name, into in joined.items():
        for part, own in zip(parts, credited, strict=True):
            for k, numbers in zip(part.steps, getattr(own, name), strict=True):
                into[part.attempt][k] = numbers
    return [
        CreditedTrajectory(trajectory=attempt, **{name: into[number] for name, into in joined.items()})
        for number, attempt in enumerate(attempts)
    ]


def _greedy_attempts(groups: Sequence[Group]) -> dict[int, Trajectory]:
    """The greedy attempt of each group, by the group's position; those that failed are left out."""
    found = {number: group.greedy for number, group in enumerate(groups) if group.greedy is not None}
    if len(found) < len(groups):
        raise ConfigError(f"{len(groups) - len(found)} of {len(groups)} groups lack a greedy attempt: set Group.greedy")
    return {number: greedy for number, greedy in found.items() if _is_trainable(greedy)}


def as_demonstrations(trajectories: Iterable[Trajectory]) -> list[CreditedTrajectory]:
    """Credit for imitation: advantage 1 on every response token.

    How they were sampled (temperature, top-p, top-k) is dropped: imitation trains the plain distribution.
    """
    return [
        CreditedTrajectory(
            trajectory=replace(trajectory, steps=[step.without_sampling() for step in trajectory.steps]),
            advantages=[[1.0] * len(step.response_ids) for step in trajectory.steps],
        )
        for trajectory in trajectories
        if _is_trainable(trajectory)
    ]


def _is_trainable(trajectory: Trajectory) -> bool:
    if is_valid(trajectory) and not math.isfinite(trajectory.total_reward):
        raise DataError(
            f"trajectory {trajectory.trajectory_id!r} of row {trajectory.row_id!r} has reward "
            f"{trajectory.total_reward}; scoring must mark it as failed"
        )
    return is_valid(trajectory)
