"""Stand-ins for torch's FlashAttention kernels: slow, and strict about what the real ones take without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class PlainKernels:
    """FlashAttention forwards and backwards, run by run, and a record of what was asked for."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.backwards: list[dict[str, Any]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        call = asked(query, key, value, *rest, **options)
        self.forwards.append(call)
        query_starts, key_starts, *_ = rest
        outputs, logsumexps = [], []
        for rows, past in runs(query_starts, key_starts):
            scores_HQK = scores(query[rows], key[past], call)
            logsumexps.append(scores_HQK.logsumexp(-1))
            outputs.append(torch.einsum("hqk,khd->qhd", scores_HQK.softmax(-1), heads_of(value[past], query)))
        # not contiguous, as kernels may leave it
        output = torch.cat(outputs).to(query.dtype).transpose(0, 1).contiguous().transpose(0, 1)
        return output, torch.cat(logsumexps, -1), *(query.new_empty(0) for _ in range(3))

    def backward(  # noqa: PLR0913 (what the kernel takes)
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        longest_query, longest_key, dropout, causal, seed_and_offset, _unused = rest
        lengths = (query_starts, key_starts, longest_query, longest_key)
        call = asked(query, key, value, *lengths, dropout, causal, False, **options)
        self.backwards.append(call)
        assert (seed_and_offset.shape, seed_and_offset.dtype) == ((2,), torch.uint64)
        assert gradient.stride(-1) == 1
        assert gradient.dtype == output.dtype == query.dtype
        totals = [torch.zeros(each.shape) for each in (query, key, value)]
        for rows, past in runs(query_starts, key_starts):
            grad, keys, values = gradient[rows].float(), heads_of(key[past], query), heads_of(value[past], query)
            # from what the forward pass has kept, as the kernel does it
            weights_HQK = (scores(query[rows], key[past], call) - logsumexp[:, rows, None]).exp()
            delta_HQ = (grad * output[rows].float()).sum(-1).T
            inner_HQK = weights_HQK * (torch.einsum("qhd,khd->hqk", grad, values) - delta_HQ[..., None])
            totals[0][rows] = torch.einsum("hqk,khd->qhd", inner_HQK, keys) * call["scale"]
            by_head = torch.einsum("hqk,qhd->khd", inner_HQK, query[rows].float()) * call["scale"]
            totals[1][past] = by_head.unflatten(1, (key.shape[1], -1)).sum(2)
            by_head = torch.einsum("hqk,qhd->khd", weights_HQK, grad)
            totals[2][past] = by_head.unflatten(1, (key.shape[1], -1)).sum(2)
        return tuple(total.to(query.dtype) for total in totals)


@contextmanager
def plain_kernels() -> Iterator[PlainKernels]:
    """Put them where torch has no kernels: on the CPU."""
    made = PlainKernels()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", made.forward, "CPU")
        library.impl("_flash_attention_backward", made.backward, "CPU")
        yield made


def asked(  # noqa: PLR0913 (what the kernel takes)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    debug_mask: bool,
    **options: Any,
) -> dict[str, Any]:
    """What differs between calls; what may not differ is looked at here. torch leaves out what is None."""
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert [int(starts[-1]) for starts in (query_starts, key_starts)] == [len(query), len(key)]
    assert (type(longest_query), type(longest_key)) == (int, int)
    assert (dropout, debug_mask) == (0.0, False)
    assert causal == (options.get("window_size_right") == 0)
    return {
        "dtypes": {each.dtype for each in (query, key, value)},
        "keys": len(key),
        "longest": (longest_query, longest_key),
        "window_size_left": None,
        "window_size_right": None,
        **options,
    }


def runs(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    for rows, past in zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        yield slice(*rows), slice(*past)


def heads_of(rows_KGD: Tensor, query_NHD: Tensor) -> Tensor:
    """Once per head that reads them."""
    return rows_KGD.float().repeat_interleave(query_NHD.shape[1] // rows_KGD.shape[1], dim=1)


def scores(query_QHD: Tensor, key_KGD: Tensor, call: dict[str, Any]) -> Tensor:
    """-inf where a query may not look; the last query is at the place of the last key."""
    rows, past = len(query_QHD), len(key_KGD)
    distance = torch.arange(past - rows, past)[:, None] - torch.arange(past)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if call["window_size_right"] is not None:
        hidden |= distance < -call["window_size_right"]
    if call["window_size_left"] is not None:
        hidden |= distance > call["window_size_left"]
    scores_HQK: Tensor = torch.einsum("qhd,khd->hqk", query_QHD.float(), heads_of(key_KGD, query_QHD)) * call["scale"]
    return scores_HQK.masked_fill(hidden, float("-inf"))
