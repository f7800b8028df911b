"""From credited trajectories to tensors: steps are merged by exact prefix, then packed without padding.

A T-step episode that only appends to its context would cost O(T^2) tokens if every step were a row of its own. Here
step k + 1 joins step k whenever its prompt starts with exactly the prompt and response of step k: the model then sees
each token once, and every response token is still predicted from exactly the ids that the sampler saw. Text of the
environment or a tool has no log-prob and no advantage, so it cannot be trained on by mistake.

    step 0   prompt [1 2 3]              response [4 5]
    step 1   prompt [1 2 3 4 5 6 7]      response [8]
    segment         [1 2 3 4 5 6 7 8]    trained at positions 3, 4, 7

A trajectory may hold several conversations that take turns, and each of them becomes a segment.

Segments can share a common prefix; see `tree.py`. Only rows are shared: a token that two attempts sampled in the same
place is trained twice, each time with its own old log-prob and advantage.

Data about response tokens (old log-prob, advantage, value ...) is kept in columns over all response tokens of the
mini-batch, trajectory by trajectory, step by step; a pack holds indices into them. Nothing here knows models or
algorithms.

Shape suffixes: R = response tokens of a mini-batch, N = rows of a pack, T = trained (response) tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from agent_r1.errors import DataError
from agent_r1.learn.batch.support import Supports
from agent_r1.learn.batch.tree import (
    IntArray,
    PackLayout,
    PrefixSharing,
    break_even,
    count_rows,
    first_fit,
    grow_trees,
    lay_out,
)
from agent_r1.types import PerToken, Step, Trajectory
from agent_r1.vision.eyes import Sight
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import Picture, by_key

Item = TypeVar("Item")
CPU = torch.device("cpu")

# Keys and values of a tree are gathered along its paths, layer by layer. More than this multiple
# of the pack's rows would exceed the memory that a pack may take.
MAX_KEYS_PER_ROW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps of one trajectory that form one sequence. From `trained` on, lists have one entry per trained token."""

    trajectory_id: int  # position of the trajectory in the list that was merged
    token_ids: list[int]
    trained: list[int]  # positions in token_ids that the policy sampled; ascending
    columns: list[int]  # index of each of these tokens among all response tokens of the list
    step_indices: list[int]  # step of the trajectory that each of these tokens belongs to
    temperatures: list[float | None] = field(default_factory=list)  # sampling temperatures; None: not recorded
    pictures: dict[int, Picture] = field(default_factory=dict)  # the pictures behind negative ids, by key


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Several segments back to back: what one forward pass reads."""

    input_ids_N: Tensor
    position_ids_N: Tensor  # within the segment; [3, N] for a model whose positions have three numbers
    layout: PackLayout  # which rows attend to which
    lengths: tuple[int, ...]  # lengths of the segments; they sum to N, or to more where rows are shared
    sources_T: Tensor  # the row whose hidden state predicts the trained token; shared rows occur repeatedly
    targets_T: Tensor  # the trained token itself
    columns_T: Tensor  # the token's column in the mini-batch
    step_ids_T: Tensor  # 0, 1, 2 ... over the steps of this pack
    trajectory_ids_T: Tensor
    temperature: float | Tensor | None = None  # one for all trained tokens, or [T]; None, NaN: not recorded
    supports: Supports | None = None  # the ids that trained tokens were sampled from; None: the whole vocabulary
    sight: Sight | None = None  # the pictures that rows show; None: all rows are text

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
        sight = None if self.sight is None else self.sight.to(device)
        return replace(self, layout=self.layout.to(device), sight=sight, **tensors)


def merge_steps(trajectories: Iterable[Trajectory]) -> list[Segment]:
    """Every response token becomes a trained position of exactly one segment; see the module header."""
    segments = []
    column = 0
    for trajectory_id, trajectory in enumerate(trajectories):
        own: list[Segment] = []
        for index, step in enumerate(trajectory.steps):
            if not step.prompt_ids:
                raise DataError(
                    f"step {index} of trajectory {trajectory.trajectory_id!r} has an empty prompt. Start prompts with "
                    "at least one token (for example BOS) to predict the first response token from."
                )
            current = _extended(own, step.prompt_ids)
            if current is None:
                current = Segment(trajectory_id=trajectory_id, token_ids=[], trained=[], columns=[], step_indices=[])
                own.append(current)
            _append(current, step, index, column)
            column += len(step.response_ids)
        segments += own
    return [segment for segment in segments if segment.trained]


def _extended(segments: Sequence[Segment], prompt_ids: list[int]) -> Segment | None:
    """The longest segment that the prompt extends; of equal ones, the latest."""
    found: Segment | None = None
    for segment in reversed(segments):
        ids = segment.token_ids
        longer = found is None or len(ids) > len(found.token_ids)
        # The last token first: a segment that was rewritten rarely has the same token there.
        if longer and len(ids) <= len(prompt_ids) and ids[-1] == prompt_ids[len(ids) - 1]:
            found = segment if prompt_ids[: len(ids)] == ids else found
    return found


def _append(segment: Segment, step: Step, index: int, column: int) -> None:
    if step.pictures:
        segment.pictures.update(by_key((*segment.pictures.values(), *step.pictures)))
    segment.token_ids.extend(step.prompt_ids[len(segment.token_ids) :])
    start, count = len(segment.token_ids), len(step.response_ids)
    segment.token_ids.extend(step.response_ids)
    segment.trained.extend(range(start, start + count))
    segment.columns.extend(range(column, column + count))
    segment.step_indices.extend([index] * count)
    segment.temperatures.extend([step.temperature] * count)


def pack(
    segments: Sequence[Segment],
    max_tokens: int,
    *,
    prefix_sharing: PrefixSharing = "off",
    device: torch.device = CPU,
    supports: Supports | None = None,
    pictures: PictureFormat | None = None,
) -> list[Pack]:
    """Fill packs first-fit decreasing with segments, or with trees of segments. Deterministic.

    `supports` cover all columns; `pictures` says how the model takes them (None: it takes text only). A segment longer
    than the budget gets a pack of its own: cutting it would change what its tokens are predicted from.
    """
    ids = [np.asarray(segment.token_ids, dtype=np.int64) for segment in segments]
    trees = grow_trees(ids, max_tokens, break_even(prefix_sharing, device))
    bins = first_fit([_room([ids[index] for index in tree]) for tree in trees], max_tokens)
    if pictures is None and any(segment.pictures for segment in segments):
        raise DataError("the trajectories show pictures, but the model takes text only")
    chosen = [[trees[index] for index in members] for members in bins]
    return [_to_pack(members, segments, ids, supports, pictures).to(device) for members in chosen]


def _room(tree: Sequence[IntArray]) -> int:
    """A tree's share of the budget: its rows, or more if the keys gathered along its paths are many times as many."""
    return max(count_rows(tree), -(-sum(map(len, tree)) // MAX_KEYS_PER_ROW))


def _to_pack(
    trees: list[list[int]],
    segments: Sequence[Segment],
    ids: list[IntArray],
    supports: Supports | None,
    form: PictureFormat | None,
) -> Pack:
    rows = lay_out([[ids[index] for index in tree] for tree in trees])
    order = list(chain(*trees))
    members = [segments[index] for index in order]
    trained = [np.asarray(segment.trained, dtype=np.int64) for segment in members]
    columns = np.concatenate([np.asarray(segment.columns) for segment in members])
    positions, sight = rows.depths_N, None
    if form is not None:
        # Segments that share a row also share all that comes before it, so they agree on its position.
        given = [form.positions(ids[index], segments[index].pictures) for index in order]
        positions = np.zeros((len(given[0]), len(rows.token_ids_N)), np.int64)
        for path, positions_AL in zip(rows.paths, given, strict=True):
            positions[:, path] = positions_AL
        shown = by_key(picture for segment in members for picture in segment.pictures.values())
        sight = Sight.of(rows.token_ids_N, shown, form)
    return Pack(
        input_ids_N=torch.from_numpy(rows.token_ids_N),
        position_ids_N=torch.from_numpy(positions),
        layout=rows.layout,
        lengths=tuple(len(segment.token_ids) for segment in members),
        # A token is predicted by the hidden state one position before it.
        sources_T=_concat([path[at - 1] for path, at in zip(rows.paths, trained, strict=True)]),
        targets_T=_concat([ids[index][at] for index, at in zip(order, trained, strict=True)]),
        columns_T=torch.from_numpy(columns),
        step_ids_T=_number_steps([np.asarray(segment.step_indices) for segment in members]),
        trajectory_ids_T=_concat([np.full(len(segment.trained), segment.trajectory_id) for segment in members]),
        temperature=_one_or_each(list(chain.from_iterable(segment.temperatures for segment in members))),
        supports=None if supports is None else supports.at(columns),
        sight=sight,
    )


def _one_or_each(temperatures_T: list[float | None]) -> float | Tensor | None:
    """A single number if all tokens agree, which spares the head a division by a vector."""
    if len(set(temperatures_T)) <= 1:
        return temperatures_T[0] if temperatures_T else None
    return torch.tensor([math.nan if each is None else each for each in temperatures_T])


def _concat(arrays: Sequence[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _number_steps(step_indices: list[IntArray]) -> Tensor:
    """0, 1, 2 ... over the steps of all segments. No step is in two segments, and in each of them they ascend."""
    starts = [np.diff(indices, prepend=-1) != 0 for indices in step_indices]
    return torch.from_numpy(np.cumsum(np.concatenate(starts)) - 1)


def column(per_trajectory: Iterable[Sequence[Sequence[float]]]) -> Tensor:
    """[trajectory][step][token] as one column over all response tokens."""
    flat = chain.from_iterable(chain.from_iterable(per_trajectory))
    return torch.from_numpy(np.fromiter(flat, dtype=np.float32))


def column_with_gaps(per_trajectory: Iterable[Sequence[Sequence[float | None]]]) -> Tensor:
    """`column` for numbers that may be None, which becomes NaN."""
    return column([[[math.nan if v is None else v for v in step] for step in steps] for steps in per_trajectory])


def nested(column_R: Tensor, trajectories: Iterable[Trajectory]) -> list[PerToken]:
    """The inverse of `column`."""
    numbers = iter(column_R.tolist())
    return [[[next(numbers) for _ in step.response_ids] for step in each.steps] for each in trajectories]


def step_sizes(trajectories: Iterable[Trajectory]) -> Tensor:
    """At every response token, the number of tokens of its step."""
    return _repeat_sizes([len(step.response_ids) for each in trajectories for step in each.steps])


def trajectory_sizes(trajectories: Iterable[Trajectory]) -> Tensor:
    """At every response token, the number of response tokens of its trajectory."""
    return _repeat_sizes([each.num_response_tokens for each in trajectories])


def _repeat_sizes(sizes: list[int]) -> Tensor:
    counts = np.array(sizes, dtype=np.int64)
    return torch.from_numpy(np.repeat(counts.astype(np.float32), counts))


def split_evenly(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Split into contiguous parts whose sizes differ by at most one; fewer parts if there are fewer items."""
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else []
    return [items[start:end] for start, end in pairwise(bounds)]
