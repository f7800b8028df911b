"""From credited trajectories to tensors: steps are merged by exact prefix, then packed without padding.

A T-step episode that only appends to its context would cost O(T^2) tokens if every step were a row of its own. Here
step k + 1 joins step k whenever its prompt starts with exactly the prompt and response of step k: the model then sees
each token once, and every response token is still predicted from exactly the ids that the sampler saw. What the env
or a tool wrote has no log-prob and no advantage at all, so it cannot be trained on by mistake.

    step 0   prompt [1 2 3]              response [4 5]
    step 1   prompt [1 2 3 4 5 6 7]      response [8]
    segment         [1 2 3 4 5 6 7 8]    trained at positions 3, 4, 7

What is known about each response token (its old log-prob, advantage, value ...) stands in columns over all response
tokens of the mini-batch, trajectory by trajectory, step by step; a pack says which of them it holds. Nothing here knows
models or algorithms.

Shape suffixes: R = response tokens of a mini-batch, N = tokens of a pack, T = trained (response) tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from agent_r1.errors import DataError
from agent_r1.types import PerToken, Step, Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps of one trajectory that read as one sequence. The last three lists run over trained tokens."""

    trajectory_id: int  # position of the trajectory in the list that was merged
    token_ids: list[int]
    trained: list[int]  # positions in token_ids that the policy sampled; ascending
    columns: list[int]  # which response token of the list each of them is
    step_indices: list[int]  # which step of the trajectory each of them belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Several segments back to back: what one forward pass reads."""

    input_ids_N: Tensor
    position_ids_N: Tensor  # restart at 0 with every segment
    lengths: tuple[int, ...]  # of the segments; they sum to N
    sources_T: Tensor  # where in N the hidden state sits that predicts the trained token
    targets_T: Tensor  # the trained token itself
    columns_T: Tensor  # which column of the mini-batch it is
    step_ids_T: Tensor  # 0, 1, 2 ... over the steps of this pack
    trajectory_ids_T: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_N.numel())

    @property
    def num_trained(self) -> int:
        return int(self.targets_T.numel())

    def to(self, device: torch.device) -> Pack:
        tensors: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)


def merge_steps(trajectories: Iterable[Trajectory]) -> list[Segment]:
    """Every response token becomes a trained position of exactly one segment; see the module header."""
    segments = []
    column = 0
    for trajectory_id, trajectory in enumerate(trajectories):
        current: Segment | None = None
        for index, step in enumerate(trajectory.steps):
            if not step.prompt_ids:
                raise DataError(
                    f"step {index} of trajectory {trajectory.trajectory_id!r} has an empty prompt, so nothing "
                    "predicts its first response token. Start prompts with at least one token (for example BOS)."
                )
            if current is None or not _extends(step, current.token_ids):
                current = Segment(trajectory_id=trajectory_id, token_ids=[], trained=[], columns=[], step_indices=[])
                segments.append(current)
            _append(current, step, index, column)
            column += len(step.response_ids)
    return [segment for segment in segments if segment.trained]


def _extends(step: Step, token_ids: list[int]) -> bool:
    return step.prompt_ids[: len(token_ids)] == token_ids


def _append(segment: Segment, step: Step, index: int, column: int) -> None:
    segment.token_ids.extend(step.prompt_ids[len(segment.token_ids) :])
    start, count = len(segment.token_ids), len(step.response_ids)
    segment.token_ids.extend(step.response_ids)
    segment.trained.extend(range(start, start + count))
    segment.columns.extend(range(column, column + count))
    segment.step_indices.extend([index] * count)


def pack(segments: Sequence[Segment], max_tokens: int) -> list[Pack]:
    """First-fit decreasing: long segments first, each into the first pack with room. Deterministic.

    A segment longer than the budget gets a pack of its own: cutting it would change what its tokens are predicted from.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(segments)), key=lambda i: (-len(segments[i].token_ids), i)):
        length = len(segments[index].token_ids)
        slot = next((i for i, free in enumerate(room) if length <= free), None)
        if slot is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[slot].append(index)
            room[slot] -= length
    return [_to_pack([segments[index] for index in sorted(members)]) for members in bins]


def _to_pack(segments: list[Segment]) -> Pack:
    lengths = tuple(len(segment.token_ids) for segment in segments)
    sources: list[int] = []
    step_ids: list[int] = []
    seen: dict[tuple[int, int], int] = {}
    start = 0
    for segment, length in zip(segments, lengths, strict=True):
        # A token is predicted by the hidden state one position before it.
        sources.extend(start + position - 1 for position in segment.trained)
        step_ids.extend(seen.setdefault((segment.trajectory_id, index), len(seen)) for index in segment.step_indices)
        start += length
    return Pack(
        input_ids_N=torch.tensor([token for segment in segments for token in segment.token_ids]),
        position_ids_N=torch.cat([torch.arange(length) for length in lengths]),
        lengths=lengths,
        sources_T=torch.tensor(sources),
        targets_T=torch.tensor([segment.token_ids[position] for segment in segments for position in segment.trained]),
        columns_T=torch.tensor([column for segment in segments for column in segment.columns]),
        step_ids_T=torch.tensor(step_ids),
        trajectory_ids_T=torch.tensor([segment.trajectory_id for segment in segments for _ in segment.trained]),
    )


def column(per_trajectory: Iterable[Sequence[Sequence[float | None]]]) -> Tensor:
    """[trajectory][step][token] as one column over all response tokens; None becomes NaN."""
    flat = chain.from_iterable(chain.from_iterable(per_trajectory))
    return torch.tensor([float("nan") if value is None else value for value in flat], dtype=torch.float32)


def nested(column_R: Tensor, trajectories: Iterable[Trajectory]) -> list[PerToken]:
    """The inverse of `column`, for numbers."""
    numbers = iter(column_R.tolist())
    return [[[next(numbers) for _ in step.response_ids] for step in each.steps] for each in trajectories]


def step_sizes(trajectories: Iterable[Trajectory]) -> Tensor:
    """At every response token, how many tokens its step has."""
    return column([[[len(s.response_ids)] * len(s.response_ids) for s in each.steps] for each in trajectories])


def trajectory_sizes(trajectories: Iterable[Trajectory]) -> Tensor:
    """At every response token, how many response tokens its trajectory has."""
    return column([[[t.num_response_tokens] * len(s.response_ids) for s in t.steps] for t in trajectories])


def split_evenly(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Contiguous parts whose sizes differ by at most one; fewer than asked when there are fewer items.

    Mini-batches are made of whole trajectories in the order given, so a group stays together as far as it can and no
    random state has to be saved: the order of the rows was already random.
    """
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else []
    return [items[start:end] for start, end in pairwise(bounds)]
