"""Random episodes with everything a learner needs about their tokens, for comparing two learners.

Shape suffixes: R = response tokens of a case, in the order of trajectories, steps and tokens; B, L = padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from agent_r1.learn.batch.packs import nested
from agent_r1.learn.credit import Values
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Properties of a case's episodes, which are drawn at random within these ranges."""

    steps: tuple[int, int] = (1, 4)
    tokens: tuple[int, int] = (1, 9)  # of a response
    group_sizes: tuple[int, ...] = (4, 4, 4, 4)
    outcomes: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    uniform_groups: int = 0  # groups whose attempts all have the same reward
    process: bool = False  # steps are rewarded too
    staleness: float = 0.3  # standard deviation of log pi - log pi_old
    value_noise: float = 0.3  # standard deviation of the critic around the mean outcome
    stop: StopReason = StopReason.ANSWERED


KINDS = {
    "one step": Kind(steps=(1, 1)),
    "several steps": Kind(),
    "process rewards": Kind(process=True),
    "success or failure": Kind(outcomes=(0.0, 1.0), uniform_groups=2),
    "one token": Kind(tokens=(1, 1)),
    "uneven groups": Kind(group_sizes=(2, 3, 5, 6)),
    "on-policy": Kind(staleness=0.0),
    "nearly on-policy": Kind(staleness=5e-4),
    "stale": Kind(staleness=2.0),
    "stale, one step": Kind(staleness=2.0, steps=(1, 1)),
    "on-policy, one step": Kind(staleness=0.0, steps=(1, 1)),
    "far": Kind(staleness=15.0),
    "groups of one": Kind(group_sizes=(1,) * 6),
    "equal rewards": Kind(outcomes=(0.6,), group_sizes=(4, 6, 8)),
    "critic rounding only": Kind(outcomes=(1.0,), value_noise=1e-7),
    "truncated": Kind(stop=StopReason.MAX_STEPS),
}
USUAL = ("one step", "several steps", "success or failure", "one token", "uneven groups", "stale")


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the R numbers of a case in a padded matrix."""

    mask_BL: Tensor

    def spread(self, flat_R: Tensor, fill: float = 0.0) -> Tensor:
        empty_BL = torch.full(self.mask_BL.shape, fill, dtype=flat_R.dtype)
        return empty_BL.masked_scatter(self.mask_BL, flat_R)

    def gather(self, rows_BL: Tensor) -> Tensor:
        return rows_BL[self.mask_BL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some groups of episodes, and the inputs of both sides."""

    groups: list[Group]
    gaps: list[list[int]]  # [trajectory][step]: tokens that the environment wrote after the response
    rewards_R: Tensor
    logprobs_R: Tensor  # under the policy in training; the gradient is taken with respect to these
    old_R: Tensor  # under the learner's policy before the update
    sampler_R: Tensor
    reference_R: Tensor
    values_R: Tensor  # of the critic before the update
    new_values_R: Tensor

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def sizes(self) -> list[list[int]]:
        return [[len(step.response_ids) for step in trajectory.steps] for trajectory in self.trajectories]

    @property
    def group_of(self) -> list[int]:
        return [number for number, group in enumerate(self.groups) for _ in group.trajectories]

    @property
    def episodes(self) -> Layout:
        """A row per episode. Text of the environment between responses is masked."""
        pairs = [zip(sizes, gaps, strict=True) for sizes, gaps in zip(self.sizes, self.gaps, strict=True)]
        return _layout([[bit for size, gap in row for bit in [True] * size + [False] * gap] for row in pairs])

    @property
    def steps(self) -> Layout:
        """A row per step."""
        return _layout([[True] * size for sizes in self.sizes for size in sizes])

    @property
    def decisions(self) -> Layout:
        """A row per episode with one column per step."""
        return _layout([[True] * len(sizes) for sizes in self.sizes])

    @property
    def step_of_R(self) -> Tensor:
        sizes = torch.tensor([size for sizes in self.sizes for size in sizes])
        return torch.arange(len(sizes)).repeat_interleave(sizes)

    @property
    def is_first_R(self) -> Tensor:
        """The first token of each step."""
        return self.step_of_R.diff(prepend=torch.tensor([-1])).bool()

    @property
    def values(self) -> list[Values]:
        return [Values(per_token=rows, bootstrap=rows[-1][-1]) for rows in nested(self.values_R, self.trajectories)]

    def to(self, dtype: torch.dtype) -> Case:
        return self._map(lambda tensor_R: tensor_R.to(dtype))

    def varied(self) -> Case:
        """Without groups whose attempts all have the same reward, as after dynamic sampling."""
        kept = [len({t.total_reward for t in group.trajectories}) > 1 for group in self.groups]
        rows = [kept[number] for number in self.group_of]
        tokens_R = torch.tensor([keep for keep, sizes in zip(rows, self.sizes, strict=True) for _ in range(sum(sizes))])
        return replace(
            self._map(lambda tensor_R: tensor_R[tokens_R]),
            groups=[group for group, keep in zip(self.groups, kept, strict=True) if keep],
            gaps=[gap for gap, keep in zip(self.gaps, rows, strict=True) if keep],
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Case:
        names = [each.name for each in fields(self) if each.name.endswith("_R")]
        changed: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return replace(self, **changed)


def _layout(rows: Sequence[Sequence[bool]]) -> Layout:
    return Layout(torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True))


def make_case(name: str, seed: int) -> Case:
    """Equal names and seeds give equal numbers, in fp32."""
    kind, random = KINDS[name], torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=random))

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=random)

    sizes = [
        [[draw(*kind.tokens) for _ in range(draw(*kind.steps))] for _ in range(attempts)]
        for attempts in kind.group_sizes
    ]
    tokens = sum(size for group in sizes for attempt in group for size in attempt)
    logprobs_R = -3 * torch.rand(tokens, generator=random) - 0.01
    old_R = logprobs_R + noise(kind.staleness)
    sampler_R = old_R + noise(0.5 * kind.staleness)
    gaps = [[draw(1, 3) for _ in attempt[1:]] + [0] for group in sizes for attempt in group]
    drawn, groups = iter(sampler_R.tolist()), []
    for number, group in enumerate(sizes):
        outcomes = [kind.outcomes[draw(0, len(kind.outcomes) - 1)] for _ in group]
        if number < kind.uniform_groups:
            outcomes = [outcomes[0]] * len(group)
        elif len(group) > 1:  # in every other group, attempts differ
            outcomes[:2] = kind.outcomes[0], kind.outcomes[-1]
        attempts = [
            _attempt(f"{number}.{index}", sizes_K, gaps_K, drawn, [0.25 * draw(-1, 2) * kind.process for _ in sizes_K])
            for index, (sizes_K, gaps_K) in enumerate(zip(group, gaps[sum(map(len, sizes[:number])) :], strict=False))
        ]
        scored = [
            replace(attempt, outcome_reward=outcome, stop=kind.stop)
            for attempt, outcome in zip(attempts, outcomes, strict=True)
        ]
        greedy = replace(scored[0], trajectory_id=f"{number}.greedy", outcome_reward=0.25 * draw(0, 4))
        groups.append(Group(row=TaskRow(prompt=[], row_id=str(number)), trajectories=scored, greedy=greedy))
    mean = sum(kind.outcomes) / len(kind.outcomes)
    values_R = mean + noise(kind.value_noise)
    return Case(
        groups=groups,
        gaps=gaps,
        rewards_R=_rewards([trajectory for group in groups for trajectory in group.trajectories]),
        logprobs_R=logprobs_R,
        old_R=old_R,
        sampler_R=sampler_R,
        reference_R=logprobs_R + noise(kind.staleness or 0.3),
        values_R=values_R,
        new_values_R=values_R + noise(0.3),
    )


def _attempt(name: str, sizes: list[int], gaps: list[int], logprobs: Iterator[float], paid: list[float]) -> Trajectory:
    context, steps = [1, 2, 3], []
    for size, gap, reward in zip(sizes, gaps, paid, strict=True):
        ids = list(range(10, 10 + size))
        step = Step(
            prompt_ids=context, response_ids=ids, response_logprobs=[next(logprobs) for _ in ids], reward=reward
        )
        steps.append(step)
        context = [*context, *ids, *[4] * gap]
    row = name.partition(".")[0]
    return Trajectory(
        row_id=row, trajectory_id=name, steps=steps, stop=StopReason.ANSWERED, next_prompt_ids=[*context, 5]
    )


def _rewards(trajectories: Sequence[Trajectory]) -> Tensor:
    """Each step pays at its last token, the outcome at the last token of all."""
    placed = []
    for trajectory in trajectories:
        for step in trajectory.steps:
            placed += [0.0] * (len(step.response_ids) - 1) + [step.reward]
        placed[-1] += trajectory.outcome_reward
    return torch.tensor(placed)
