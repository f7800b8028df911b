"""torch's FlashAttention over runs of a pack, as an operator that `torch.compile` takes as a whole.

Compiled layers call it without falling apart around it: lengths reach it as tensors, so nothing that differs from pack
to pack is part of what is compiled. It is the operator under `torch.nn.attention.varlen`, which is the same from torch
2.11 on; the function above that one refuses grouped heads in 2.11. Keys and values are gathered along the runs' paths
inside (see `tree.py`), so autograd keeps them once and not once per run.

Shape suffixes: N = rows of a pack, K = keys of its runs, H = heads, G = heads of keys and values, D = size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("agent_r1::flash_runs", mutates_args=())
def flash_runs(  # noqa: PLR0913 (an operator takes tensors and numbers)
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    gather_K: Tensor | None,
    longest: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """(output_NHD, logsumexp_HN), causal by the last query and key of each run.

    longest: the most queries and keys of a run, on the CPU.
    window: how many keys a query sees, itself included; 0: all.
    """
    output_NHD, logsumexp_HN = _forward(
        query_NHD,
        _gathered(key_NGD, gather_K),
        _gathered(value_NGD, gather_K),
        query_starts,
        key_starts,
        longest.tolist(),
        _options(scale, window),
    )
    return output_NHD.contiguous(), logsumexp_HN


@flash_runs.register_fake
def _(query_NHD: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _size = query_NHD.shape
    return query_NHD.new_empty(query_NHD.shape), query_NHD.new_empty((heads, rows), dtype=torch.float32)


@torch.library.custom_op("agent_r1::flash_runs_backward", mutates_args=())
def flash_runs_backward(  # noqa: PLR0913 (an operator takes tensors and numbers)
    gradient_NHD: Tensor,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    output_NHD: Tensor,
    logsumexp_HN: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    gather_K: Tensor | None,
    longest: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Deterministic when torch is told to be."""
    query_gradient, key_gradient, value_gradient = _backward(
        gradient_NHD.contiguous(),
        query_NHD,
        _gathered(key_NGD, gather_K),
        _gathered(value_NGD, gather_K),
        output_NHD,
        logsumexp_HN,
        query_starts,
        key_starts,
        longest.tolist(),
        _options(scale, window),
    )
    return (
        query_gradient.contiguous(),
        _summed(key_gradient, gather_K, len(key_NGD)),
        _summed(value_gradient, gather_K, len(value_NGD)),
    )


@flash_runs_backward.register_fake
def _(_gradient: Tensor, query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query_NHD, key_NGD, value_NGD))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query_NHD, key_NGD, value_NGD, query_starts, key_starts, gather_K, longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query_NHD, key_NGD, value_NGD, *output, query_starts, key_starts, gather_K, longest)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient_NHD: Tensor, _logsumexp_gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradients = flash_runs_backward(gradient_NHD, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*gradients, None, None, None, None, None, None)


flash_runs.register_autograd(_differentiate, setup_context=_keep)


def _forward(
    query_NHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: list[int],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    tensors = (query_NHD, key_KGD, value_KGD, query_starts, key_starts)
    dropout, causal, debug_mask = 0.0, True, False
    output_NHD, logsumexp_HN, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, *longest, dropout, causal, debug_mask, **options
    )
    return output_NHD, logsumexp_HN


def _backward(  # noqa: PLR0913 (what the kernel takes)
    gradient_NHD: Tensor,
    query_NHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    output_NHD: Tensor,
    logsumexp_HN: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: list[int],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (gradient_NHD, query_NHD, key_KGD, value_KGD, output_NHD, logsumexp_HN, query_starts, key_starts)
    seed_and_offset = torch.zeros(2, dtype=torch.uint64, device=query_NHD.device)  # of a dropout that there is none of
    unused = torch.empty(0, dtype=torch.uint64, device=query_NHD.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *tensors, *longest, 0.0, True, seed_and_offset, unused, **options
    )
    return gradients


def _options(scale: float, window: int) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window - 1 if window else None, "window_size_right": 0}


def _gathered(rows_NGD: Tensor, gather_K: Tensor | None) -> Tensor:
    return rows_NGD if gather_K is None else rows_NGD.index_select(0, gather_K)


def _summed(gradient_KGD: Tensor, gather_K: Tensor | None, rows: int) -> Tensor:
    """Of a row that lies on many paths, in fp32: half precision would lose the small ones among its gradients."""
    if gather_K is None:
        return gradient_KGD.contiguous()
    total_NGD = gradient_KGD.new_zeros(rows, *gradient_KGD.shape[1:], dtype=torch.float32)
    return total_NGD.index_add_(0, gather_K, gradient_KGD.float()).to(gradient_KGD.dtype)
