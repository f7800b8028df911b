"""Advantage estimators: the `credit` column of the algorithm table.

Each takes the inputs of its formula (`advantages.py`) from a whole batch of scored groups and spreads the result over
response tokens. Keyword arguments are settings. Nothing here knows models, losses or which algorithm runs.

Shape suffixes: G = trajectories of a group, K = decisions of a trajectory, N = any set of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from agent_r1.learn.advantages import (
    discounted_return,
    gae,
    group_centered,
    leave_one_out,
    match_states,
    per_std,
    standardize,
)
from agent_r1.learn.credit import Credit, Scored, ScoredGroups
from agent_r1.learn.losses import Share
from agent_r1.learn.rewards import differ_by_rounding
from agent_r1.types import Trajectory
from agent_r1.vision.pictures import Picture, added_pictures

Scale = Literal["group", "batch", "none"]  # the standard deviation that differences are divided by
Level = Literal["step", "token"]  # what counts as one decision
Spread = Literal["trajectory", "step", "token"]  # what has one number


# Trajectory level: one number for all tokens.


def group_return(groups: ScoredGroups, *, scale: Scale) -> list[list[Credit]]:
    """Compare the returns inside each group."""
    return _credits(groups, torch.cat(_group_advantages(groups, scale)), "trajectory")


def leave_one_out_return(groups: ScoredGroups) -> list[list[Credit]]:
    """Compare each return with the mean of the others in its group."""
    return _credits(groups, torch.cat([leave_one_out(_returns(group)) for group in groups]), "trajectory")


def whitened_group_return(groups: ScoredGroups) -> list[list[Credit]]:
    """REINFORCE++ with baseline: returns minus their group's mean, then whitened over the tokens of the batch."""

    def center(group: Sequence[Scored]) -> Tensor:
        sizes_G = torch.tensor([item.trajectory.num_response_tokens for item in group])
        return group_centered(_returns(group), divide_by_std=False).repeat_interleave(sizes_G)

    sizes = [item.trajectory.num_response_tokens for item in _flatten(groups)]
    whitened = torch.cat(_whiten(list(map(center, groups)), [center(_without_kl(group)) for group in groups]))
    return _credits(groups, whitened.split(sizes), "token")


def greedy_difference(groups: ScoredGroups) -> list[list[Credit]]:
    """ReMax: the return minus the greedy attempt's return; 0 if the greedy attempt failed."""

    def difference(item: Scored) -> float:
        if item.baseline is None or differ_by_rounding(*sorted([item.total, item.baseline])):
            return 0.0
        return item.total - item.baseline

    differences_N = torch.tensor([difference(item) for item in _flatten(groups)], dtype=torch.float64)
    return _credits(groups, differences_N, "trajectory")


# Step level: one number for all tokens of a step. Token level: one number per token.


def step_return(groups: ScoredGroups, *, gamma: Share, whiten_batch: bool) -> list[list[Credit]]:
    """REINFORCE on the step-level MDP: the discounted return from each step on, whitened over all steps."""
    return _decision_credits(groups, "step", gamma, whiten_batch)


def token_return(groups: ScoredGroups, *, gamma: Share) -> list[list[Credit]]:
    """REINFORCE++: the discounted return from each token on, across steps, whitened over the tokens of the batch."""
    return _decision_credits(groups, "token", gamma, True)


def step_gae(
    groups: ScoredGroups, *, gamma: Share, lam: Share, whiten_batch: bool, bootstrap_truncated: bool
) -> list[list[Credit]]:
    """StepPO: GAE whose decisions are whole responses. V is read, and trained, at the last prompt token of a step."""
    return _decision_credits(groups, "step", gamma, whiten_batch, lam=lam, bootstrap_truncated=bootstrap_truncated)


def token_gae(
    groups: ScoredGroups, *, gamma: Share, lam: Share, whiten_batch: bool, bootstrap_truncated: bool
) -> list[list[Credit]]:
    """PPO: GAE over all tokens of the policy in order; the recursion runs on across steps and skips tool text."""
    return _decision_credits(groups, "token", gamma, whiten_batch, lam=lam, bootstrap_truncated=bootstrap_truncated)


def anchored_return(
    groups: ScoredGroups,
    *,
    scale: Scale,
    step_weight: NonNegativeFloat,
    gamma: Share,
    anchor: Literal["prompt", "observation"],
    similarity: Share | None,
) -> list[list[Credit]]:
    """GiGPO: the group's return advantage, plus a comparison of what followed from equal states of its attempts.

    `anchor` says what a state is: the exact prompt, or only the latest observation, for environments in which different
    histories lead to the same place. For the latter an environment can name the state in which an action was taken, as
    `info["anchor"]` of its transition. Without a name or an observation (the first step, an environment without
    feedback), and for summaries, the state is the prompt. The same holds in episodes with roles, where the latest
    observation may be another role's. Steps are compared only with steps of the same role, and summaries only with
    summaries.
    """
    items = _flatten(groups)
    returns_N = torch.cat([_discounted_return(item, "step", gamma) for item in items])
    before_kl_N = torch.cat([_discounted_return(item.without_kl, "step", gamma) for item in items])
    sets = list(_equal_states(groups, anchor, similarity))
    steps_N = torch.zeros_like(returns_N)
    compared = _compare([(returns_N[same], before_kl_N[same]) for same in sets], scale)
    for same, advantages in zip(sets, compared, strict=True):
        steps_N[same] = advantages
    whole_G = torch.cat(_group_advantages(groups, scale))
    steps = steps_N.split([len(item.decisions) for item in items])
    return _credits(groups, [one + step_weight * each_K for one, each_K in zip(whole_G, steps, strict=True)], "step")


def _equal_states(groups: ScoredGroups, anchor: str, similarity: float | None) -> Iterator[list[int]]:
    """Yield the sets of decisions of one group that were taken in equal states, as indices into the batch."""
    start = 0
    for group in groups:
        decisions = [(item, k) for item in group for k in item.decisions]
        kinds = [(step.role, step.is_summary) for step in (item.trajectory.steps[k] for item, k in decisions)]
        for kind in dict.fromkeys(kinds):  # roles, summaries and actions are never compared, even in similar states
            ours = [n for n, own in enumerate(kinds) if own == kind]
            numbers = match_states([_state(*decisions[n], anchor) for n in ours], similarity=similarity)
            for number in set(numbers):
                yield [start + n for n, own in zip(ours, numbers, strict=True) if own == number]
        start += len(decisions)


def _state(item: Scored, k: int, anchor: str) -> Hashable:
    steps = item.trajectory.steps
    observation = ""
    if anchor == "observation" and not steps[k].is_summary:
        by_roles = item.others_acted or any(step.role for step in steps)
        seen = "" if by_roles else _answer_to_last_action(item.trajectory, k)
        observation = str(steps[k].info.get("anchor", seen))
    return observation or tuple(steps[k].prompt_ids)


def _answer_to_last_action(trajectory: Trajectory, k: int) -> str:
    """The answer to the action before step k: its text, and the names of its pictures."""
    before = next((step for step in reversed(trajectory.steps[:k]) if not step.is_summary), None)
    if before is None:
        return ""
    pictures: list[Picture] = [picture for call in before.calls for picture in call.pictures]
    if not pictures:
        now = trajectory.steps[k]
        pictures = added_pictures(before.prompt_ids + before.response_ids, now.prompt_ids, now.pictures)
    return "\n".join([before.feedback, *(picture.name for picture in pictures)])


def _decision_credits(
    groups: ScoredGroups,
    level: Level,
    gamma: float,
    whiten_batch: bool,
    *,
    lam: float | None = None,
    bootstrap_truncated: bool = False,
) -> list[list[Credit]]:
    """GAE for each decision; without a critic (`lam` is None), the discounted return.

    The critic's targets are never whitened, because that would change their unit.
    """

    def estimate(item: Scored) -> Tensor:
        if lam is None:
            return _discounted_return(item, level, gamma)
        return gae(
            _rewards(item, level),
            _values(item, level),
            bootstrap=_value_after(item) if bootstrap_truncated else 0.0,
            gamma=_discounts(item, level, gamma),
            lam=lam,
        )

    def as_return(item: Scored, advantages_K: Tensor) -> Tensor:
        """Advantage plus value is the return that GAE estimates; with lam below 1 it depends on the critic."""
        return advantages_K if lam is None else advantages_K + _values(item, level)

    items = _flatten(groups)
    advantages = list(map(estimate, items))
    targets = list(map(as_return, items, advantages))
    if whiten_batch:
        returns = [
            target_K if item.before_kl is None else as_return(item, estimate(item.without_kl))
            for item, target_K in zip(items, targets, strict=True)
        ]
        advantages = _whiten(advantages, returns)
    return _credits(groups, advantages, level, None if lam is None else targets)


# Reading and spreading.


def _flatten(groups: ScoredGroups) -> list[Scored]:
    return list(chain.from_iterable(groups))


def _without_kl(group: Sequence[Scored]) -> list[Scored]:
    return [item.without_kl for item in group]


def _returns(group: Sequence[Scored]) -> Tensor:
    return torch.tensor([item.total for item in group], dtype=torch.float64)


def _group_advantages(groups: ScoredGroups, scale: Scale) -> list[Tensor]:
    return _compare([(_returns(group), _returns(_without_kl(group))) for group in groups], scale)


def _compare(sets: Sequence[tuple[Tensor, Tensor]], scale: Scale) -> list[Tensor]:
    """Center each set of returns, given with and without their KL penalty, and divide by the standard deviation that
    `scale` selects: of the set, or of all sets of the batch together."""
    if scale != "batch":
        return [group_centered(own, divide_by_std=scale == "group", before_kl_G=pure) for own, pure in sets]
    returns_N, before_kl_N = (torch.cat(each) for each in zip(*sets, strict=True))
    return [per_std(group_centered(own, divide_by_std=False), returns_N, before_kl_N) for own, _ in sets]


def _whiten(parts: Sequence[Tensor], returns: Sequence[Tensor]) -> list[Tensor]:
    """Standardize all numbers of the batch together. For `returns`, see `standardize`."""
    whole_N = standardize(torch.cat(list(parts)), torch.cat(list(returns)))
    return list(whole_N.split([len(part) for part in parts]))


def _discounted_return(item: Scored, level: Level, gamma: float) -> Tensor:
    return discounted_return(_rewards(item, level), gamma=_discounts(item, level, gamma))


def _rewards(item: Scored, level: Level) -> Tensor:
    per_step = [item.rewards[k] for k in item.decisions]
    rewards = [sum(step) for step in per_step] if level == "step" else list(chain.from_iterable(per_step))
    return torch.tensor(rewards, dtype=torch.float64)


def _values(item: Scored, level: Level) -> Tensor:
    """The critic's value before each decision. The last prompt token of a step predicts its first response token."""
    assert item.values is not None  # `assign_credit` checks it
    per_step = [item.values.per_token[k] for k in item.decisions]
    return torch.tensor([v for step in per_step for v in (step[:1] if level == "step" else step)], dtype=torch.float64)


def _discounts(item: Scored, level: Level, gamma: float) -> list[float]:
    """The discount after each decision.

    Time passes when the environment answers, not while the policy speaks: only the last token of a step is discounted.
    So gamma means the same for long and short responses, and at both levels. The environment does not answer a summary,
    so there is no discount between it and the next action. The value after a truncated episode is always discounted.
    """
    steps = [item.trajectory.steps[k] for k in item.decisions]
    after = [1.0 if step.is_summary else gamma for step in steps[:-1]] + [gamma]
    if level == "step":
        return after
    return [d for step, end in zip(steps, after, strict=True) for d in [*[1.0] * (len(step.response_ids) - 1), end]]


def _value_after(item: Scored) -> float:
    """The critic's value of a prompt that a budget left unanswered, else 0.

    A response that was cut off is not an action, and a prompt that outgrew the context is not a state. Any stand-in,
    such as the value at the last decision, would make endless responses the best action in every state that the critic
    overestimates.
    """
    assert item.values is not None
    known = item.values.bootstrap
    return known if item.trajectory.stop.is_truncated and known is not None else 0.0


def _credits(
    groups: ScoredGroups, advantages: Iterable[Tensor], level: Spread, targets: Iterable[Tensor] | None = None
) -> list[list[Credit]]:
    """Spread one number per trajectory, step or token over tokens, for each trajectory of the batch in order."""
    own, wanted = iter(advantages), iter(targets if targets is not None else [])

    def credit(item: Scored) -> Credit:
        spread = item.unflatten if level == "token" else item.spread
        numbers: Any = next(own).tolist()
        per_token = spread([numbers] * len(item.decisions) if level == "trajectory" else numbers)
        if targets is None:
            return Credit(advantages=per_token)
        rows = spread(next(wanted).tolist())
        # At step level the critic is trained only at the first token of a step.
        trained = [[None if n and level == "step" else value for n, value in enumerate(row)] for row in rows]
        return Credit(advantages=per_token, value_targets=trained)

    return [[credit(item) for item in group] for group in groups]
