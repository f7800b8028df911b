"""A rank's share of the work: whole rows, balanced by tokens, and fillers that keep the ranks in step.

With sharded weights every forward and backward pass is a collective operation, so all ranks must make the same number
of passes. A rank with fewer packs makes up for them with tiny packs of weight 0. Nothing here knows models.

Shape suffixes: R = response tokens of a mini-batch, T = trained tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_r1.learn.batch.packs import Pack, Segment, pack
from agent_r1.ranks.crew import OneProcess

FILLER = Segment(trajectory_id=0, token_ids=[0] * 4, trained=[1, 2, 3], columns=[0] * 3, step_indices=[0] * 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    packs: list[Pack]
    fillers: list[Pack]
    ranks: OneProcess

    def column(self, model: Callable[[Pack], Tensor], like_R: Tensor) -> Tensor:
        """Run a model on the packs of all ranks and put its numbers into a column like `like_R`; NaN for tokens in none
        of the packs."""
        result_R = torch.full_like(like_R, float("nan"))
        for part in self.packs:
            result_R[part.columns_T] = model(part).float()
        for part in self.fillers:
            model(part)
        return self.exchange(result_R)

    def exchange(self, column_R: Tensor) -> Tensor:
        """Complete a column with the numbers of the other ranks at their tokens."""
        if self.ranks.size > 1:
            indices = [part.columns_T for part in self.packs]
            index = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64, device=column_R.device)
            for theirs, numbers in self.ranks.gather((index.cpu(), column_R[index].cpu())):
                column_R[theirs.to(column_R.device)] = numbers.to(column_R.device)
        return column_R


def share_out(
    segments: Sequence[Segment], rows: Sequence[str], ranks: OneProcess, max_tokens: int, **settings: Any
) -> Share:
    """Pack the segments of this rank's rows. `rows` has the row of each trajectory; `settings` are for `pack`."""
    owners = assign_rows(segments, rows, ranks.size)
    packs = pack([s for s in segments if owners[rows[s.trajectory_id]] == ranks.rank], max_tokens, **settings)
    missing = max(ranks.gather(len(packs))) - len(packs)
    fillers = pack([FILLER], max_tokens, device=settings["device"]) * missing if missing else []
    return Share(packs=packs, fillers=fillers, ranks=ranks)


def assign_rows(segments: Sequence[Segment], rows: Sequence[str], size: int) -> dict[str, int]:
    """The rank of each row: large rows first, each to the rank with the fewest tokens so far. Attempts at a row stay
    together, so that they can share a prefix."""
    tokens: dict[str, int] = {}
    for segment in segments:
        row = rows[segment.trajectory_id]
        tokens[row] = tokens.get(row, 0) + len(segment.token_ids)
    owners, loads = {}, [0] * size
    for row in sorted(tokens, key=lambda row: -tokens[row]):  # stable: rows of equal size stay in order
        owners[row] = loads.index(min(loads))
        loads[owners[row]] += tokens[row]
    return owners
