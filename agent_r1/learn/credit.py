"""Credit: scored trajectories in, one advantage per response token out.

Each function reads what its formula (`advantages.py`) needs off a whole batch of groups and spreads the result over
tokens. Nothing here knows models, losses or which algorithm runs; the table in `algorithms.py` names them.

Only what the policy sampled takes part: rewards, values and advantages exist for response tokens alone, so text of
tools can enter no return, no recursion and no statistic. A step in which nothing was sampled took no decision; what it
earned was already handed to the decision before it (`rewards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.errors import DataError
from agent_r1.learn.advantages import (
    all_equal,
    discounted_return,
    gae,
    group_centered,
    leave_one_out,
    match_states,
    per_std,
    standardize,
)
from agent_r1.learn.rewards import total
from agent_r1.types import PerToken, Trajectory

Scale = Literal["group", "batch", "none"]  # the standard deviation that differences are divided by
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a critic says about one trajectory."""

    per_token: PerToken  # of the state before each response token
    bootstrap: float | None = None  # of the state a truncated episode would have gone on from; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trajectory with all that credit may be computed from."""

    trajectory: Trajectory
    rewards: PerToken  # each on the token that earned it; their sum is the return
    before_kl: PerToken | None = None  # the rewards without the KL penalty; None: there is no penalty
    values: Values | None = None  # of the critic
    baseline: float | None = None  # return of the greedy attempt at the same row

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
        """One number per decision, at each of its tokens."""
        _expect("Scored.spread got", len(per_decision), "numbers", len(self.decisions), "decisions", self)
        numbers = iter(per_decision)
        return [[next(numbers)] * len(s.response_ids) if s.response_ids else [] for s in self.trajectory.steps]

    def unflatten(self, per_token: Sequence[float]) -> PerToken:
        tokens = self.trajectory.num_response_tokens
        _expect("Scored.unflatten got", len(per_token), "numbers", tokens, "response tokens", self)
        numbers = iter(per_token)
        return [[next(numbers) for _ in step.response_ids] for step in self.trajectory.steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    advantages: PerToken
    value_targets: list[list[float | None]] | None = None  # None where the critic is not asked


ScoredGroups = Sequence[Sequence[Scored]]
# All groups of the batch in, the same nesting out: some algorithms normalise over the whole batch.
CreditFunction = Callable[..., list[list[Credit]]]
Estimate = tuple[Tensor, Tensor]  # of one trajectory: an advantage per decision, and the critic's value of its state


def credit_of(function: CreditFunction, groups: ScoredGroups) -> list[Credit]:
    """Credit each trajectory, in order. Raises DataError if the function returns a wrong number of values."""
    try:
        made = function(groups)
        _expect("it returned", len(made), "groups", len(groups), "groups")
        for number, (credits, group) in enumerate(zip(made, groups, strict=True)):
            _expect(f"for group {number} it returned", len(credits), "credits", len(group), "trajectories")
            for each, item in zip(credits, group, strict=True):
                for name, given in (("advantages", each.advantages), ("value_targets", each.value_targets)):
                    _expect_per_token(name, given, item)
    except _Miscounted as error:
        raise DataError(f"credit function {function_name(function)!r}: {error}") from error
    return list(chain.from_iterable(made))


def function_name(function: Callable[..., object]) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


class _Miscounted(DataError):
    """A credit function returned the wrong number of values."""


def _expect(who: str, got: int, what: str, wanted: int, of: str, item: Scored | None = None) -> None:
    if got != wanted:
        whose = "" if item is None else f" of trajectory {item.trajectory.trajectory_id!r}"
        raise _Miscounted(f"{who} {got} {what} for {wanted} {of}{whose}")


def _expect_per_token(name: str, given: Sequence[Sequence[object]] | None, item: Scored) -> None:
    sizes = [len(step.response_ids) for step in item.trajectory.steps]
    if given is not None and [len(row) for row in given] != sizes:
        raise _Miscounted(
            f"it returned {name} for {[len(row) for row in given]} response tokens of each step of trajectory "
            f"{item.trajectory.trajectory_id!r}, which has {sizes}"
        )


# Trajectory level: one number for all tokens.


def group_return(groups: ScoredGroups, *, scale: Scale) -> list[list[Credit]]:
    """Compare the returns inside each group."""
    return list(map(_broadcast, groups, _group_advantages(groups, scale)))


def leave_one_out_return(groups: ScoredGroups) -> list[list[Credit]]:
    """Compare each return with the mean of the others in its group."""
    return [_broadcast(group, leave_one_out(_returns(group))) for group in groups]


def whitened_group_return(groups: ScoredGroups) -> list[list[Credit]]:
    """REINFORCE++ with baseline: returns minus their group's mean, then whitened over the tokens of the batch."""

    def centered(groups: ScoredGroups) -> list[Tensor]:
        return [
            value.expand(item.trajectory.num_response_tokens)
            for group in groups
            for item, value in zip(group, group_centered(_returns(group), divide_by_std=False), strict=True)
        ]

    found = centered(groups)
    return _per_token(groups, _whitened(found, _before_kl(groups, found, centered)))


def greedy_difference(groups: ScoredGroups) -> list[list[Credit]]:
    """ReMax: the return minus that of the greedy attempt. Without one (it failed) there is nothing to compare with."""

    def difference(item: Scored) -> float:
        if item.baseline is None or all_equal(torch.tensor([item.total, item.baseline], dtype=torch.float64)):
            return 0.0
        return item.total - item.baseline

    return [[_constant(item, difference(item)) for item in group] for group in groups]


# Step level: one number for all tokens of a step.


def step_return(groups: ScoredGroups, *, gamma: Share, whiten_batch: bool) -> list[list[Credit]]:
    """REINFORCE on the step-level MDP: the discounted return from each step on, whitened over all steps."""

    def returns(groups: ScoredGroups) -> list[Tensor]:
        return [
            discounted_return(_step_rewards(item), gamma=_step_discounts(item, gamma))
            for item in chain.from_iterable(groups)
        ]

    found = returns(groups)
    whitened = _whitened(found, _before_kl(groups, found, returns)) if whiten_batch else None
    numbers = whitened or (each.tolist() for each in found)
    return [[Credit(advantages=item.spread(next(numbers))) for item in group] for group in groups]


def step_gae(
    groups: ScoredGroups, *, gamma: Share, lam: Share, whiten_batch: bool, bootstrap_truncated: bool
) -> list[list[Credit]]:
    """StepPO: GAE whose decisions are whole responses. V is read, and trained, at the last prompt token of a step."""

    def estimate(item: Scored) -> Estimate:
        values_K = torch.tensor([_values(item).per_token[k][0] for k in item.decisions], dtype=torch.float64)
        after = _value_after(item) if bootstrap_truncated else 0.0
        discounts = _step_discounts(item, gamma)
        return gae(_step_rewards(item), values_K, bootstrap=after, gamma=discounts, lam=lam), values_K

    return _with_targets(groups, estimate, whiten_batch, Scored.spread, _at_step_starts)


def anchored_return(
    groups: ScoredGroups,
    *,
    scale: Scale,
    step_weight: NotNegative,
    gamma: Share,
    anchor: Literal["prompt", "observation"],
    similarity: Share | None,
) -> list[list[Credit]]:
    """GiGPO: the group's return advantage, plus a comparison of what followed from equal states of its attempts.

    `anchor` says what a state is: the exact prompt, or only what the env showed last, for worlds in which different
    histories lead to the same place. For the latter an env can name the state that an action was taken in, as
    `info["anchor"]` of its transition. Where nothing was named or shown (the first step, an env without feedback) a
    state is its prompt; so it is where a summary was asked for, which is compared with other summaries alone.
    """
    attempts = _group_advantages(groups, scale)
    steps = iter(_anchored_steps(groups, gamma, scale, anchor, similarity))
    return [
        [
            Credit(advantages=item.spread([whole + step_weight * part for part in next(steps)]))
            for item, whole in zip(group, advantages_G.tolist(), strict=True)
        ]
        for group, advantages_G in zip(groups, attempts, strict=True)
    ]


def _anchored_steps(
    groups: ScoredGroups, gamma: float, scale: Scale, anchor: str, similarity: float | None
) -> list[list[float]]:
    """[attempt][decision]: the return from each decision, compared with returns from equal states in its group."""

    def returns(items: Sequence[Scored]) -> Tensor:
        return torch.cat([discounted_return(_step_rewards(i), gamma=_step_discounts(i, gamma)) for i in items])

    items = list(chain.from_iterable(groups))
    if not items:
        return []
    returns_N, before_kl_N = returns(items), returns([item.without_kl for item in items])
    sets = list(_equal_states(groups, anchor, similarity))
    advantages_N = torch.zeros_like(returns_N)
    compared = _compare([(returns_N[same], before_kl_N[same]) for same in sets], scale)
    for same, advantages in zip(sets, compared, strict=True):
        advantages_N[same] = advantages
    flat = iter(advantages_N.tolist())
    return [[next(flat) for _ in item.decisions] for item in items]


def _equal_states(groups: ScoredGroups, anchor: str, similarity: float | None) -> Iterator[list[int]]:
    """Yield the sets of decisions of one group that were taken in equal states, as indices into the batch."""
    start = 0
    for group in groups:
        decisions = [(item, k) for item in group for k in item.decisions]
        for is_summary in (False, True):  # summaries and actions are never compared, even in similar states
            ours = [n for n, (item, k) in enumerate(decisions) if item.trajectory.steps[k].is_summary is is_summary]
            numbers = match_states([_state(*decisions[n], anchor) for n in ours], similarity=similarity)
            for number in set(numbers):
                yield [start + n for n, own in zip(ours, numbers, strict=True) if own == number]
        start += len(decisions)


def _state(item: Scored, k: int, anchor: str) -> Hashable:
    steps = item.trajectory.steps
    shown = ""
    if anchor == "observation" and not steps[k].is_summary:
        before = next((step.feedback for step in reversed(steps[:k]) if not step.is_summary), "")
        shown = str(steps[k].info.get("anchor", before))
    return shown or tuple(steps[k].prompt_ids)


# Token level.


def token_return(groups: ScoredGroups, *, gamma: Share) -> list[list[Credit]]:
    """REINFORCE++: the discounted return from each token on, across steps, whitened over the tokens of the batch."""

    def returns(groups: ScoredGroups) -> list[Tensor]:
        return [
            discounted_return(_token_rewards(item), gamma=_token_discounts(item, gamma))
            for item in chain.from_iterable(groups)
        ]

    found = returns(groups)
    return _per_token(groups, _whitened(found, _before_kl(groups, found, returns)))


def token_gae(
    groups: ScoredGroups, *, gamma: Share, lam: Share, whiten_batch: bool, bootstrap_truncated: bool
) -> list[list[Credit]]:
    """PPO: GAE over all tokens of the policy in order; the recursion runs on across steps and skips tool text."""

    def estimate(item: Scored) -> Estimate:
        values_K = torch.tensor(list(chain.from_iterable(_values(item).per_token)), dtype=torch.float64)
        after = _value_after(item) if bootstrap_truncated else 0.0
        discounts = _token_discounts(item, gamma)
        return gae(_token_rewards(item), values_K, bootstrap=after, gamma=discounts, lam=lam), values_K

    return _with_targets(groups, estimate, whiten_batch, Scored.unflatten, _at_every_token)


# Reading and spreading.


def _returns(group: Sequence[Scored]) -> Tensor:
    return torch.tensor([item.total for item in group], dtype=torch.float64)


def _group_advantages(groups: ScoredGroups, scale: Scale) -> list[Tensor]:
    return _compare([(_returns(group), _returns([item.without_kl for item in group])) for group in groups], scale)


def _compare(sets: Sequence[tuple[Tensor, Tensor]], scale: Scale) -> list[Tensor]:
    """Center each set of returns, given with and without their KL penalty, and divide by the standard deviation that
    `scale` selects: of the set, or of all sets of the batch together."""
    if scale != "batch" or not sets:
        return [group_centered(own, divide_by_std=scale == "group", before_kl_G=pure) for own, pure in sets]
    returns_N, before_kl_N = (torch.cat(each) for each in zip(*sets, strict=True))
    return [per_std(group_centered(own, divide_by_std=False), returns_N, before_kl_N) for own, _ in sets]


def _before_kl(
    groups: ScoredGroups, found: list[Tensor], compute: Callable[[ScoredGroups], list[Tensor]]
) -> list[Tensor]:
    """What `compute` gives without the KL penalty: `found` itself, unless the rewards hold one."""
    penalized = any(item.before_kl is not None for group in groups for item in group)
    return compute(_without_kl(groups)) if penalized else found


def _without_kl(groups: ScoredGroups) -> ScoredGroups:
    return [[item.without_kl for item in group] for group in groups]


def _step_rewards(item: Scored) -> Tensor:
    return torch.tensor([sum(item.rewards[k]) for k in item.decisions], dtype=torch.float64)


def _token_rewards(item: Scored) -> Tensor:
    return torch.tensor(list(chain.from_iterable(item.rewards)), dtype=torch.float64)


def _token_discounts(item: Scored, gamma: float) -> list[float]:
    """Time passes when the env answers, not while the policy speaks: only the last token of a step is discounted. So
    gamma means the same for long and short responses, and for algorithms with credit per token and per step."""
    sizes = [len(item.trajectory.steps[k].response_ids) for k in item.decisions]
    ends = zip(sizes, _step_discounts(item, gamma), strict=True)
    return [discount for size, last in ends for discount in [*[1.0] * (size - 1), last]]


def _step_discounts(item: Scored, gamma: float) -> list[float]:
    """The env does not answer a summary, so none between it and the action after it. What would have followed an
    episode that was cut off is discounted always, lest it come at no cost."""
    decisions = item.decisions
    return [1.0 if item.trajectory.steps[k].is_summary and k != decisions[-1] else gamma for k in decisions]


def _values(item: Scored) -> Values:
    assert item.values is not None  # `assign_credit` sees to it
    return item.values


def _value_after(item: Scored) -> float:
    """Of the state after the last decision: the critic's value of a prompt that a budget left unanswered, else 0.

    A response cut in half is no action, and a prompt that outgrew the context no state: there is nothing to value. Any
    stand-in, such as the value at the last decision, makes running over the cheapest way out of every state of which
    the critic hopes too much."""
    known = _values(item).bootstrap
    return known if item.trajectory.stop.is_truncated and known is not None else 0.0


def _constant(item: Scored, value: float) -> Credit:
    return Credit(advantages=item.spread([value] * len(item.decisions)))


def _broadcast(group: Sequence[Scored], values_G: Tensor) -> list[Credit]:
    return [_constant(item, value) for item, value in zip(group, values_G.tolist(), strict=True)]


def _whitened(per_trajectory: Sequence[Tensor], returns: Sequence[Tensor]) -> Iterator[list[float]]:
    """Standardize all numbers of the batch together; one list per trajectory. For `returns`, see `standardize`."""
    if not per_trajectory:
        return iter(())
    whole_N = standardize(torch.cat(list(per_trajectory)), torch.cat(list(returns)))
    return (part.tolist() for part in whole_N.split([len(numbers) for numbers in per_trajectory]))


def _per_token(groups: ScoredGroups, per_trajectory: Iterator[list[float]]) -> list[list[Credit]]:
    return [[Credit(advantages=item.unflatten(next(per_trajectory))) for item in group] for group in groups]


def _with_targets(
    groups: ScoredGroups,
    estimate: Callable[[Scored], Estimate],
    whiten_batch: bool,
    spread: Callable[[Scored, Sequence[float]], PerToken],
    targets: Callable[[Scored, Tensor], list[list[float | None]]],
) -> list[list[Credit]]:
    """Whiten advantages if asked, but never the critic's targets, because that would change their unit."""
    items = list(chain.from_iterable(groups))
    estimates = [estimate(item) for item in items]
    found = [advantages_K for advantages_K, _ in estimates]
    before_kl = [
        known if item.before_kl is None else estimate(item.without_kl)
        for item, known in zip(items, estimates, strict=True)
    ]
    # Advantage plus value is the return that GAE estimates; with lam below 1 it depends on the critic.
    returns = [advantages_K + values_K for advantages_K, values_K in before_kl]
    numbers = _whitened(found, returns) if whiten_batch else (each.tolist() for each in found)
    raw = iter(found)
    return [
        [Credit(advantages=spread(item, next(numbers)), value_targets=targets(item, next(raw))) for item in group]
        for group in groups
    ]


def _at_every_token(item: Scored, advantages_K: Tensor) -> list[list[float | None]]:
    advantages = item.unflatten(advantages_K.tolist())
    values = _values(item).per_token
    return [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)]


def _at_step_starts(item: Scored, advantages_K: Tensor) -> list[list[float | None]]:
    """The first response token of a step is predicted from the last prompt token: there the critic is asked."""
    targets: list[list[float | None]] = [[None] * len(step.response_ids) for step in item.trajectory.steps]
    for k, advantage in zip(item.decisions, advantages_K.tolist(), strict=True):
        targets[k][0] = advantage + _values(item).per_token[k][0]
    return targets
