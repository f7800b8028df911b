"""Ranks: how several processes train as one.

Every rank is given the same credited trajectories and computes its share of the forward and backward passes. The
denominators come from the whole list, so the gradients of all ranks simply add up to that of one process.

No command starts several ranks yet: what is here is for who builds a `Learner` in processes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed, nn

Value = TypeVar("Value")


class OneProcess:
    """No other ranks: everything is mine."""

    def is_mine(self, index: int) -> bool:
        return True

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def gather(self, value: Value) -> list[Value]:
        """What every rank says, in rank order."""
        return [value]


class DataParallel(OneProcess):
    """One of the ranks of a `torch.distributed` process group that is already initialised."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self._world = distributed.get_rank(group), distributed.get_world_size(group)

    def is_mine(self, index: int) -> bool:
        return index % self._world == self._rank

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """In one message. A rank without a gradient (no trajectory was its own) takes part with zeros.

        A parameter that no rank has a gradient for keeps none, as in one process: an optimizer leaves it alone, but
        would decay one whose gradient is zero.
        """
        if not parameters:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        counts_P = grads[0].new_tensor([p.grad is not None for p in parameters])
        flat = torch.cat([*(grad.flatten() for grad in grads), counts_P])
        distributed.all_reduce(flat, group=self._group)
        *parts, counts_P = flat.split([*(grad.numel() for grad in grads), len(parameters)])
        for parameter, part, count in zip(parameters, parts, counts_P.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if count else None

    def gather(self, value: Value) -> list[Value]:
        values = [value] * self._world  # all are overwritten
        distributed.all_gather_object(values, value, group=self._group)
        return values
