"""torch's FlashAttention over runs of rows, as an operator that `torch.compile` treats as one node. The learner's packs
and the towers that look at pictures use it.

Lengths reach the operator as tensors, so nothing that differs from pack to pack is compiled in. It calls the operator
under `torch.nn.attention.varlen`, which has been stable since torch 2.11; `varlen` itself refuses grouped heads there.
Keys and values are gathered along the runs' paths inside (see `tree.py`), so autograd keeps them once and not once per
run.

Shape suffixes: N = rows of a pack, K = keys of its runs, H = heads, G = heads of keys and values, D = size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DROPOUT, _DEBUG_MASK = 0.0, False
FLASH_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or dtype not in FLASH_DTYPES:
        return False
    is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # the first that FlashAttention supports
    return is_ampere and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


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
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(output_NHD, logsumexp_HN) of queries that see the keys of their run.

    longest: the most queries and keys of a run, on the CPU.
    window: how many keys a query sees, itself included; 0: all.
    causal: whether a query sees no later keys; the last query of a run is at the place of its last key.
    """
    output_NHD, logsumexp_HN, *_ = torch.ops.aten._flash_attention_forward(
        query_NHD,
        gather_rows(key_NGD, gather_K),
        gather_rows(value_NGD, gather_K),
        query_starts,
        key_starts,
        *longest.tolist(),
        _DROPOUT,
        causal,
        _DEBUG_MASK,
        **_options(scale, window, causal),
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
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Deterministic if torch's deterministic mode is on."""
    # Dropout is off, but the operator wants its random state.
    seed_and_offset = torch.zeros(2, dtype=torch.uint64, device=query_NHD.device)
    unused = torch.empty(0, dtype=torch.uint64, device=query_NHD.device)
    query_gradient, key_gradient, value_gradient = torch.ops.aten._flash_attention_backward(
        gradient_NHD.contiguous(),
        query_NHD,
        gather_rows(key_NGD, gather_K),
        gather_rows(value_NGD, gather_K),
        output_NHD,
        logsumexp_HN,
        query_starts,
        key_starts,
        *longest.tolist(),
        _DROPOUT,
        causal,
        seed_and_offset,
        unused,
        **_options(scale, window, causal),
    )
    return (
        query_gradient.contiguous(),
        sum_rows(key_gradient, gather_K, len(key_NGD)),
        sum_rows(value_gradient, gather_K, len(value_NGD)),
    )


@flash_runs_backward.register_fake
def _(_gradient: Tensor, query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query_NHD, key_NGD, value_NGD))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query_NHD, key_NGD, value_NGD, query_starts, key_starts, gather_K, longest, *ctx.options = inputs
    ctx.save_for_backward(query_NHD, key_NGD, value_NGD, *output, query_starts, key_starts, gather_K, longest)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient_NHD: Tensor, _logsumexp_gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradients = flash_runs_backward(gradient_NHD, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None, None, None)


flash_runs.register_autograd(_backward, setup_context=_setup_context)


def _options(scale: float, window: int, causal: bool) -> dict[str, Any]:
    left, right = window - 1 if window else None, 0 if causal else None
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


def gather_rows(rows_NGD: Tensor, gather_K: Tensor | None) -> Tensor:
    return rows_NGD if gather_K is None else rows_NGD.index_select(0, gather_K)


def sum_rows(gradient_KGD: Tensor, gather_K: Tensor | None, rows: int) -> Tensor:
    """The gradient of `gather_rows`. A row on many paths sums in fp32: half precision would lose small gradients."""
    if gather_K is None:
        return gradient_KGD.contiguous()
    dtype = torch.promote_types(gradient_KGD.dtype, torch.float32)
    total_NGD = gradient_KGD.new_zeros(rows, *gradient_KGD.shape[1:], dtype=dtype)
    return total_NGD.index_add_(0, gather_K, gradient_KGD.to(dtype)).to(gradient_KGD.dtype)
