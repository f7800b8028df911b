"""Trajectories in compact form, and mini-batches as rows of verl. Knows neither verl nor Ray.

`pack` and `unpack` carry trajectories from the processes that play them to the driver. A prompt that only grows is
stored once, however many steps read it:

    step 0   prompt [1 2 3]             response [4 5]
    step 1   prompt [1 2 3 4 5 6 7]     response [8]         stored: [1 2 3 4 5 6 7 8], ends (3, 5) and (7, 8)

`RowBatch` carries mini-batches to the workers. verl trains on rows of tokens. A row is one segment of a trajectory
(`learn/batch/packs.py`): its steps as far as they extend each other. Data about a trained token is stored at the
position whose output predicts it, one before the token, so it lines up with the model's output. Workers get equal
numbers of rows; the missing ones are short rows on which nothing is trained.

Shape suffixes: L = tokens of a row, T = trained tokens of a row, R = response tokens of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import Pack
from agent_r1.types import Group, Step, TaskRow, Trajectory

IDS = ("prompt_ids", "response_ids", "response_logprobs")
FILLER_TOKENS = 2  # length of a row on which nothing is trained: the fewest that a causal model can predict from


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTrajectory:
    """A trajectory whose token ids are arrays, each stored once."""

    segments: list[NDArray[np.int32]]
    places: list[tuple[int, int, int]]  # per step: its segment, where its prompt ends, where its response ends
    logprobs: NDArray[np.float64]  # log-probs of all steps
    next_prompt_ids: NDArray[np.int32]
    steps: list[dict[str, Any]]  # the other fields of each step
    rest: Trajectory  # the trajectory without its steps


def pack(trajectory: Trajectory) -> PackedTrajectory:
    segments: list[list[int]] = []
    places = []
    for step in trajectory.steps:
        known = segments[-1] if segments else None
        if known is None or step.prompt_ids[: len(known)] != known:
            known = []
            segments.append(known)
        known.extend(step.prompt_ids[len(known) :])
        start = len(known)
        known.extend(step.response_ids)
        places.append((len(segments) - 1, start, len(known)))
    names = [field.name for field in fields(Step) if field.name not in IDS]
    return PackedTrajectory(
        segments=[np.asarray(ids, dtype=np.int32) for ids in segments],
        places=places,
        logprobs=np.asarray([value for step in trajectory.steps for value in step.response_logprobs], np.float64),
        next_prompt_ids=np.asarray(trajectory.next_prompt_ids, dtype=np.int32),
        steps=[{name: getattr(step, name) for name in names} for step in trajectory.steps],
        rest=replace(trajectory, steps=[], next_prompt_ids=[]),
    )


def unpack(packed: PackedTrajectory) -> Trajectory:
    """The inverse of `pack`. The prompts of a segment share their integers: a list costs 8 bytes per token, not 36."""
    segments = [ids.tolist() for ids in packed.segments]
    logprobs = packed.logprobs.tolist()
    steps, used = [], 0
    for (index, start, end), other in zip(packed.places, packed.steps, strict=True):
        ids, count = segments[index], end - start
        own = {"prompt_ids": ids[:start], "response_ids": ids[start:end]}
        steps.append(Step(**own, response_logprobs=logprobs[used : used + count], **other))
        used += count
    return replace(packed.rest, steps=steps, next_prompt_ids=packed.next_prompt_ids.tolist())


def pack_group(group: Group) -> list[PackedTrajectory]:
    return [pack(trajectory) for trajectory in group.trajectories]


def unpack_group(row: TaskRow, packed: Sequence[PackedTrajectory]) -> Group:
    return Group(row=row, trajectories=[unpack(each) for each in packed])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows in the order in which the workers get them: equal shares, one after the other."""

    packs: list[Pack | None]  # one segment each; None: nothing is trained
    workers: int

    @classmethod
    def of(cls, packs: Sequence[Pack], workers: int) -> RowBatch:
        """Deal rows out, long ones first, each to the worker with the fewest tokens that still has room."""
        room = max(1, -(-len(packs) // workers))
        shares: list[list[Pack | None]] = [[] for _ in range(workers)]
        loads = [0] * workers
        for pack_ in sorted(packs, key=lambda each: -each.num_tokens):  # stable, so the same on every machine
            open_ = [worker for worker in range(workers) if len(shares[worker]) < room]
            chosen = min(open_, key=lambda worker: loads[worker])
            shares[chosen].append(pack_)
            loads[chosen] += pack_.num_tokens
        for share in shares:
            share += [None] * (room - len(share))
        return cls(packs=[row for share in shares for row in share], workers=workers)

    @property
    def num_tokens(self) -> int:
        return sum(FILLER_TOKENS if row is None else row.num_tokens for row in self.packs)

    def token_columns(self) -> dict[str, list[Tensor]]:
        """The input of every pass of verl: ids, positions, and the mask of trained positions, per row."""
        ids = [torch.zeros(FILLER_TOKENS, dtype=torch.int64) if row is None else row.input_ids_N for row in self.packs]
        masks = [torch.zeros(len(each), dtype=torch.int64) for each in ids]
        for row, mask_L in zip(self.packs, masks, strict=True):
            if row is not None:
                mask_L[row.sources_T] = 1
        return {"input_ids": ids, "position_ids": [torch.arange(len(each)) for each in ids], "loss_mask": masks}

    def spread(self, columns: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Numbers per response token of the mini-batch, at the positions that predict these tokens."""
        made: dict[str, list[Tensor]] = {name: [] for name in columns}
        for row in self.packs:
            for name, column_R in columns.items():
                placed_L = torch.zeros(FILLER_TOKENS if row is None else row.num_tokens, dtype=column_R.dtype)
                if row is not None:
                    placed_L[row.sources_T] = column_R[row.columns_T]
                made[name].append(placed_L)
        return made

    def step_ids(self) -> list[Tensor]:
        """The step of each trained position, counted over all rows."""
        made, first = [], 0
        for row in self.packs:
            placed_L = torch.zeros(FILLER_TOKENS if row is None else row.num_tokens, dtype=torch.int64)
            if row is not None:
                placed_L[row.sources_T] = row.step_ids_T + first
                first += int(row.step_ids_T.max()) + 1
            made.append(placed_L)
        return made

    def gather(self, numbers: Tensor, like_R: Tensor) -> Tensor:
        """The inverse of `spread` for what the workers computed: one number per token of all rows in, one per response
        token out. NaN for tokens in none of the rows."""
        result_R = torch.full_like(like_R, float("nan"))
        first = 0
        for row in self.packs:
            if row is not None:
                result_R[row.columns_T] = numbers[row.sources_T + first].to(result_R.dtype)
            first += FILLER_TOKENS if row is None else row.num_tokens
        if first != len(numbers):
            raise DataError(f"verl's workers returned {len(numbers)} numbers for {first} tokens")
        return result_R
