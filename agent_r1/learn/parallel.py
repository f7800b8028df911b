"""Ranks: how several processes train as one. The only module in which ranks communicate.

Every rank gets the same credited trajectories and computes its share of the forward and backward passes. Denominators
come from the whole list, so the gradients of all ranks add up to that of one process.

No command starts several ranks yet; build a `Learner` with `ranks=DataParallel()` in processes of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed, nn

Value = TypeVar("Value")


class OneProcess:
    """The only rank, which owns every trajectory."""

    def is_mine(self, index: int) -> bool:
        return True

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks, in rank order."""
        return [value]


class DataParallel(OneProcess):
    """One of the ranks of a `torch.distributed` process group that is already initialised."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self._world_size = distributed.get_rank(group), distributed.get_world_size(group)

    def is_mine(self, index: int) -> bool:
        return index % self._world_size == self._rank

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum in one message. A rank without a gradient (it owned no trajectory) takes part with zeros.

        A parameter without a gradient on any rank keeps none, as in one process: with a zero gradient, the optimizer
        would decay it.
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
        values = [value] * self._world_size  # all are overwritten
        distributed.all_gather_object(values, value, group=self._group)
        return values
