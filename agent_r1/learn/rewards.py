"""Rewards on tokens: every reward of a trajectory is put on the response token that earned it.

    process reward of a tool call    on the last token of that call
    the rest of a step's reward      on the last token of the step
    outcome reward                   on the last token of the trajectory
    overlong penalty                 on the last token of the longest response, once per episode
    KL to the reference (optional)   on every token, its own share

Then process rewards are scaled against outcome rewards. Knows trajectories; knows no models, algorithms or torch. Two
pieces of state are saved with the run: the running scale of process rewards and the adaptive KL coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal

from agent_r1.types import ByRole, Group, PerToken, Step, Trajectory, of_role

ProcessScaling = Literal["raw", "ignored", "largest_return", "running_std"]
TINY = 1e-6
ROUNDING = 1e-12  # sums of rewards of size 1 in a different order differ by far less


def differ_by_rounding(low: float, high: float) -> bool:
    """Return True if two returns are equal up to rounding: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))


def zeros(trajectory: Trajectory) -> PerToken:
    return [[0.0] * len(step.response_ids) for step in trajectory.steps]


def total(placed: PerToken) -> float:
    return sum(chain.from_iterable(placed))


def process_rewards(trajectory: Trajectory) -> PerToken:
    """Return the rewards that the environment and tools gave during the episode."""
    placed = zeros(trajectory)
    for index, step in enumerate(trajectory.steps):
        for call in step.calls:
            if call.reward:
                _put(placed, index, call.reward, at=_last_token(call.token_span, step))
        rest = step.reward - sum(call.reward for call in step.calls)
        if rest:
            _put(placed, index, rest)
    return placed


def outcome_rewards(trajectory: Trajectory) -> PerToken:
    placed = zeros(trajectory)
    _put(placed, len(placed) - 1, trajectory.outcome_reward)
    return placed


def overlong_penalties(trajectory: Trajectory, *, limit: ByRole, buffer: float, penalty: float) -> PerToken:
    """DAPO's soft punishment (arXiv:2503.14476, section 3.4). A response of up to `limit * (1 - buffer)` tokens costs
    nothing; above that, the cost grows linearly to `penalty` at the limit. A response that was cut off costs the full
    penalty, even if the context cut it before the limit. Only the longest response of an episode pays, so that episodes
    with many steps do not lose more. Summaries have their own limit and cost nothing."""
    placed = zeros(trajectory)

    def share(step: Step) -> float:
        length, own = len(step.response_ids), of_role(limit, step.role)
        allowed = own * (1 - buffer)
        if step.is_summary or not length:
            return 0.0
        if step.is_cut or length >= own:
            return 1.0
        return (length - allowed) / (own - allowed) if length > allowed else 0.0

    shares = list(map(share, trajectory.steps))
    if penalty and any(shares):
        _put(placed, shares.index(max(shares)), -penalty * max(shares))
    return placed


@dataclass(slots=True)
class RunningMoments:
    """Mean and standard deviation of all values so far (Welford), so that one odd batch cannot change a scale much."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.count += 1
            delta = value - self.mean
            self.mean += delta / self.count
            self.squares += delta * (value - self.mean)

    def std(self, *, correction: int) -> float:
        """Divided by the count minus `correction`, as in torch; 1 while all values are equal up to rounding."""
        std = math.sqrt(self.squares / max(1, self.count - correction))
        return std if std > TINY else 1.0


@dataclass(slots=True, kw_only=True)
class KLInReward:
    """The coefficient of a KL penalty on the rewards; with a target it adapts (arXiv:1909.08593, section 2.2)."""

    coef: float
    target: float | None  # KL per token to aim at; None: a constant coefficient
    horizon: int  # trajectories over which the coefficient adapts

    def adapt(self, kl: float, trajectories: int) -> None:
        if self.target is not None:
            error = min(0.2, max(-0.2, kl / self.target - 1))
            # A batch beyond the horizon counts as one horizon, so that the coefficient never turns negative.
            self.coef *= 1 + error * min(1.0, trajectories / self.horizon)


@dataclass(kw_only=True)
class RewardShaper:
    """Applies all of the above in order, to one batch at a time."""

    process: ProcessScaling = "raw"
    process_weight: float = 1.0
    by_role: bool = False  # each role earns the outcome and its own process rewards, and is compared with itself
    overlong_limit: ByRole = 1  # tokens at which a response is cut off
    overlong_buffer: float = 0.0  # share of the limit in which the penalty grows
    overlong_penalty: float = 0.0
    kl: KLInReward | None = None
    running: RunningMoments = field(default_factory=RunningMoments)
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last batch

    def __call__(self, batch: Sequence[Trajectory], kl: Sequence[PerToken | None] | None = None) -> list[PerToken]:
        """Place the rewards, then subtract the KL penalty, if any."""
        return self.penalize(self.place(batch), kl)

    def place(self, batch: Sequence[Trajectory]) -> list[PerToken]:
        """Put all rewards on their tokens, before a KL penalty."""
        process = [process_rewards(trajectory) for trajectory in batch]
        scale = self.process_weight * process_scale(self.process, process, self.running)
        is_paid = any(value for placed in process for step in placed for value in step)
        self.metrics = {"process_scale": scale} if is_paid else {}
        overlong = partial(
            overlong_penalties, limit=self.overlong_limit, buffer=self.overlong_buffer, penalty=self.overlong_penalty
        )
        return [
            _add(_times(placed, scale), outcome_rewards(trajectory), overlong(trajectory))
            for trajectory, placed in zip(batch, process, strict=True)
        ]

    def penalize(
        self, rewards: list[PerToken], kl: Sequence[PerToken | None] | None, *, num_attempts: int | None = None
    ) -> list[PerToken]:
        """Subtract the KL penalty and adapt its coefficient; without a penalty, return the rewards unchanged.

        `kl` is log pi - log reference of every response token, or None for a trajectory that was not sampled from pi (a
        greedy one). `num_attempts` is the number of attempts, if each trajectory is one role's part of an attempt.
        """
        if (kl is None) != (self.kl is None):
            raise ValueError("pass `kl` if and only if the KL is in the reward")
        if kl is None or self.kl is None:
            return rewards
        penalized = [
            one if ratios is None else _add(one, _times(ratios, -self.kl.coef))
            for one, ratios in zip(rewards, kl, strict=True)
        ]
        sampled = [ratios for ratios in kl if ratios is not None]
        flat = [value for ratios in sampled for step in ratios for value in step]
        mean = sum(flat) / max(1, len(flat))
        self.metrics |= {"reward_kl": mean, "reward_kl_coef": self.kl.coef}
        self.kl.adapt(mean, len(sampled) if num_attempts is None else num_attempts)
        return penalized

    def earned(self, trajectory: Trajectory) -> tuple[float, ...]:
        """The return by which attempts at a row are compared. It has no penalties: they alone must not make equal
        answers differ. If the scale of process rewards depends on the batch, process and outcome are separate.
        """
        process, outcome = total(process_rewards(trajectory)), total(outcome_rewards(trajectory))
        if self.process not in FIXED_SCALES:
            return process, outcome
        return (self.process_weight * FIXED_SCALES[self.process] * process + outcome,)

    def state_dict(self) -> dict[str, Any]:
        return {"running": asdict(self.running), "kl_coef": None if self.kl is None else self.kl.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.running = RunningMoments(**state["running"])
        if self.kl is not None and state["kl_coef"] is not None:
            self.kl.coef = state["kl_coef"]


def is_uniform(group: Group, shaper: RewardShaper | None = None) -> bool:
    """Return True if all valid attempts earned the same return, so that comparing them teaches nothing.

    `shaper` computes returns; the default takes rewards as paid.
    """
    shaper = shaper or RewardShaper()
    valid = [trajectory for trajectory in group.trajectories if is_valid(trajectory)]
    compared = [valid]
    if shaper.by_role:
        roles = {role for trajectory in valid for role in trajectory.roles}
        parts = [[part_of(each, role) for each in valid] for role in roles]
        compared = [[part for part in own if part.num_response_tokens] for own in parts]  # without idle roles
    return all(
        differ_by_rounding(min(part), max(part))
        for attempts in compared
        for part in zip(*map(shaper.earned, attempts), strict=True)
    )


def part_of(trajectory: Trajectory, role: str) -> Trajectory:
    """Reduce a trajectory to the steps of one role, with the shared outcome."""
    return replace(trajectory, steps=[step for step in trajectory.steps if step.role == role])


def is_valid(trajectory: Trajectory) -> bool:
    """Return True if the episode did not fail and the policy sampled something."""
    return not trajectory.stop.is_failure and trajectory.num_response_tokens > 0


FIXED_SCALES: dict[ProcessScaling, float] = {"raw": 1.0, "ignored": 0.0}


def process_scale(kind: ProcessScaling, process: Sequence[PerToken], running: RunningMoments) -> float:
    """The factor of process rewards. Two kinds depend on the sums of process rewards from any token to the end of its
    episode: one over the largest absolute sum of the batch, as published, or over the deviation of all sums so far."""
    if kind in FIXED_SCALES:
        return FIXED_SCALES[kind]
    sums = [value for placed in process for value in _sums_to_end(placed)]
    if kind == "largest_return":
        return 1.0 / (max(map(abs, sums), default=0.0) + TINY)
    running.add(sums)
    return 1.0 / running.std(correction=1)


def _put(placed: PerToken, index: int, amount: float, at: int = -1) -> None:
    """Add a reward to token `at` of step `index`. If nothing was sampled there, it goes to the last decision before, or
    is dropped if there is none."""
    while index >= 0 and not placed[index]:
        index -= 1
    if index >= 0:
        placed[index][at] += amount


def _last_token(span: tuple[int, int] | None, step: Step) -> int:
    if span is None or not 0 < span[1] <= len(step.response_ids):
        return -1
    return span[1] - 1


def _sums_to_end(placed: PerToken) -> list[float]:
    return list(accumulate(reversed(list(chain.from_iterable(placed))), initial=0.0))[1:]


def _times(placed: PerToken, factor: float) -> PerToken:
    return placed if factor == 1 else [[factor * value for value in step] for step in placed]


def _add(*parts: PerToken) -> PerToken:
    return [list(map(sum, zip(*steps, strict=True))) for steps in zip(*parts, strict=True)]
