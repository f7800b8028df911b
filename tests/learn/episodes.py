"""Rewarded episodes for the tests of credit: small ones to build by hand, ragged batches for hypothesis."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from agent_r1.learn.algorithms import ALGORITHMS, Algorithm
from agent_r1.learn.credit import Values, assign_credit, attempts_of, trainable
from agent_r1.learn.rewards import RewardShaper
from agent_r1.types import CreditedTrajectory, Group, PerToken, Step, StopReason, ToolCallRecord, Trajectory
from tests.learn.builders import group, step, trajectory


def call(reward: float, span: tuple[int, int] | None) -> ToolCallRecord:
    return ToolCallRecord(name="f", arguments={}, result="", reward=reward, text_span=(0, 1), token_span=span)


def episode(
    sizes: Sequence[int],
    outcome: float = 0.0,
    *,
    rewards: Sequence[float] | None = None,
    stop: StopReason = StopReason.ANSWERED,
    name: str = "t",
) -> Trajectory:
    """Steps of these many response tokens, each paid its reward; every prompt is the step's number."""
    paid = [0.0] * len(sizes) if rewards is None else rewards
    steps = [
        replace(step([1, k], range(size)), reward=reward)
        for k, (size, reward) in enumerate(zip(sizes, paid, strict=True))
    ]
    return trajectory(*steps, reward=outcome, name=name, stop=stop)


def critic(*per_token: PerToken, bootstrap: Sequence[float] | None = None) -> list[Values]:
    """These values, one trajectory after the other."""
    after = [0.0] * len(per_token) if bootstrap is None else bootstrap
    return [Values(per_token=v, bootstrap=b) for v, b in zip(per_token, after, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups, what a critic says about each trajectory by name, and its log-ratios to a reference."""

    groups: list[Group]
    values: Mapping[str, Values]
    kl: Mapping[str, PerToken]

    def credit(
        self,
        algorithm: Algorithm | str,
        groups: Sequence[Group] | None = None,
        *,
        shaper: RewardShaper | None = None,
        kl: Mapping[str, PerToken] | None = None,
    ) -> list[CreditedTrajectory]:
        row = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
        groups = self.groups if groups is None else groups
        asked = attempts_of(trainable(groups, row, shaper))
        return assign_credit(
            groups,
            row,
            shaper=shaper,
            values=[self.values[one.trajectory_id] for one in asked] if row.needs_critic else None,
            kl=None if kl is None else [kl[one.trajectory_id] for one in asked],
        )


class Dice:
    """Draws the numbers of a batch. Hypothesis chooses (and shrinks) the shape; for every number it would be slow."""

    def __init__(self, seed: int, *, sparse: bool) -> None:
        self.rng = random.Random(seed)
        self.sparse = sparse  # outcomes of 0 and 1 and little else, as tasks pay: many returns are equal

    def amount(self) -> float:
        """A multiple of 1/64: sums of them are exact, so two returns are either equal or clearly different."""
        return self.rng.randint(-128, 128) / 64

    def reward(self, usual: float = 0.0) -> float:
        return usual if self.sparse or self.rng.random() < 0.3 else self.amount()

    def call(self, size: int) -> ToolCallRecord:
        end = self.rng.randint(0, size + 1)  # 0 and size + 1 are no place in the response
        return call(self.reward(), self.rng.choice([None, (0, end)]))

    def step(self, max_tokens: int) -> Step:
        # Few prompts and few replies, so that states meet.
        size = self.rng.randint(0, max_tokens)
        made = tuple(self.call(size) for _ in range(self.rng.randint(0, 2)))
        return replace(
            step(self.rng.choice([[1], [2], [1, 2], [1, 2, 3, 4], [1, 2, 3, 5]]), range(size)),
            reward=sum(c.reward for c in made) + self.reward(),
            calls=made,
            feedback=self.rng.choice(["", "a room", "a rooms", "two rooms"]),
            info=self.rng.choice([{}, {}, {"anchor": "a room"}, {"anchor": 7}]),
        )

    def trajectory(self, name: str, *, max_steps: int, max_tokens: int, stops: Sequence[StopReason]) -> Trajectory:
        steps = [self.step(max_tokens) for _ in range(self.rng.randint(1, max_steps))]
        outcome = self.reward(usual=float(self.rng.randint(0, 1)))
        return trajectory(*steps, reward=outcome, name=name, stop=self.rng.choice(stops))

    def per_token(self, one: Trajectory) -> PerToken:
        return [[self.amount() for _ in s.response_ids] for s in one.steps]


SOUND = [StopReason.ANSWERED, StopReason.PARSE_LIMIT, StopReason.MAX_STEPS, StopReason.MAX_TOKENS]


@st.composite
def batches(draw: st.DrawFn, *, stops: Sequence[StopReason] = (*SOUND, *SOUND, *StopReason)) -> Batch:
    """1 to 3 groups of 1 to 4 attempts with a greedy one each, of 1 to 6 steps of 0 to 3 tokens."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape: dict[str, Any] = {
        "max_steps": draw(st.integers(1, 6)),
        "max_tokens": draw(st.integers(1, 3)),
        "stops": stops,
    }
    dice = Dice(draw(st.integers(0, 2**32)), sparse=draw(st.booleans()))
    groups = [
        replace(
            group(*(dice.trajectory(f"{g}.{i}", **shape) for i in range(size))),
            greedy=dice.trajectory(f"{g}.greedy", **shape),
        )
        for g, size in enumerate(sizes)
    ]
    attempts = [one for each in groups for one in each.trajectories]
    # Also with a value after episodes that terminated, which nobody may read.
    values = {one.trajectory_id: Values(per_token=dice.per_token(one), bootstrap=dice.amount()) for one in attempts}
    return Batch(groups=groups, values=values, kl={one.trajectory_id: dice.per_token(one) for one in attempts})


@st.composite
def settings(draw: st.DrawFn, algorithm: Algorithm) -> dict[str, object]:
    """Some of the settings that an algorithm's credit has."""
    known: dict[str, st.SearchStrategy[object]] = {
        "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "lam": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "whiten_batch": st.booleans(),
        "bootstrap_truncated": st.booleans(),
        "scale": st.sampled_from(["group", "batch", "none"]),
        "step_weight": st.sampled_from([0.0, 0.5, 1.0]),
        "anchor": st.sampled_from(["prompt", "observation"]),
        "similarity": st.sampled_from([None, 0.7, 0.95]),
    }
    return {name: draw(values) for name, values in known.items() if name in algorithm.settings and draw(st.booleans())}


def flat(nested: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for row in nested for value in row]
