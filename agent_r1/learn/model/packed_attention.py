"""Attention over a pack: each token sees the tokens before it in its own segment, and none of its neighbours'.

Plugged into transformers through `AttentionInterface`, so that models need no port. No mask is ever built for the pack:
transformers makes none for an implementation that registers none, and the `PackLayout` that travels through the model
as the keyword argument `packed` describes the rows completely. Both implementations read a pack as runs: stretches of
queries, each with the keys along its path (see `tree.py`), causal from the last query and the last key backwards.

Shape suffixes: N = rows of a pack, K = keys of its runs, H = heads, G = heads of keys and values, D = size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agent_r1.compute.attention import Scoring, plain_attention, read_scoring
from agent_r1.compute.flash import flash_runs, gather_rows, has_flash, sum_rows
from agent_r1.errors import UnsupportedModelError
from agent_r1.learn.batch.tree import PackLayout

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

# (query_NHD, key_NGD, value_NGD, layout, scoring) -> output_NHD
Kernel = Callable[[Tensor, Tensor, Tensor, PackLayout, Scoring], Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from pack to pack, layers are compiled once
def segments(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, layout: PackLayout, scoring: Scoring) -> Tensor:
    """One call of torch's fused attention per run, on any device and in any dtype; plain torch for soft-capped scores
    and sinks.

    On a CPU this beats padding the runs to a rectangle: nothing is computed for padding, and the kernel works on one
    sequence at a time anyway.
    """
    window = scoring.window
    key_KGD, value_KGD = key_NGD, value_NGD
    if layout.gather_K is not None:
        key_KGD, value_KGD = (_Gather.apply(tensor, layout.gather_K) for tensor in (key_NGD, value_NGD))
    queries = query_NHD.transpose(0, 1).split(layout.query_lengths, dim=1)
    keys = key_KGD.transpose(0, 1).split(layout.key_lengths, dim=1)
    values = value_KGD.transpose(0, 1).split(layout.key_lengths, dim=1)
    outputs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        rows, past = q.shape[1], k.shape[1]
        if not scoring.is_plain:
            hidden = _visible(rows, past, window, q.dtype, q.device) != 0
            outputs.append(plain_attention(q[None], k[None], v[None], hidden, scoring)[0])
            continue
        is_square = rows == past and (window is None or past <= window)
        mask = None if is_square else _visible(rows, past, window, q.dtype, q.device)
        fused = scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=is_square,
            scale=scoring.scale,
            enable_gqa=len(q) != len(k),
        )
        outputs.append(fused[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


@lru_cache(maxsize=16)  # all layers share a mask; otherwise autograd would keep one per layer
def _visible(rows: int, past: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a query may look, -inf elsewhere: not ahead, and fewer than `window` positions back."""
    ends = torch.arange(past - rows, past, device=device)[:, None]
    distance = ends - torch.arange(past, device=device)[None, :]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(rows, past, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def varlen(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, layout: PackLayout, scoring: Scoring) -> Tensor:
    """One call of torch's FlashAttention for all runs, on CUDA, in half precision. Keys are not repeated for the heads
    that share them. Falls back to `segments` for what FlashAttention lacks."""
    if not scoring.is_plain:
        segmented: Tensor = segments(query_NHD, key_NGD, value_NGD, layout, scoring)
        return segmented
    dtype = value_NGD.dtype  # rotary embeddings and norms in fp32 may lift queries and keys above it
    output_NHD: Tensor = flash_runs(
        query_NHD.to(dtype),
        key_NGD.to(dtype),
        value_NGD,
        layout.query_starts,
        layout.key_starts,
        layout.gather_K,
        layout.longest,
        scoring.scale,
        scoring.window or 0,
        causal=True,
    )[0]
    return output_NHD


# transformers treats names containing "sdpa", "flash" or "flex" specially, so ours avoid them.
PACKED_ATTENTIONS: dict[str, Kernel] = {"segments": segments, "varlen": varlen}


def packed_attention_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The fastest implementation for a model that computes in `dtype`."""
    return "varlen" if has_flash(device, dtype, head_dim) else "segments"


def _head_dim(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


class _Gather(torch.autograd.Function):
    """`gather_rows` whose gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, rows_NGD: Tensor, gather_K: Tensor) -> Tensor:
        ctx.save_for_backward(gather_K)
        ctx.num_rows = len(rows_NGD)
        return gather_rows(rows_NGD, gather_K)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gather_K,) = ctx.saved_tensors
        return sum_rows(gradients[0], gather_K, ctx.num_rows), None


def _attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Wrap a kernel in the signature that transformers calls."""

    def attention(  # noqa: PLR0913 (transformers' signature)
        module: nn.Module,
        query: Tensor,  # [1, H, N, D]
        key: Tensor,  # [1, G, N, D]
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed: PackLayout | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if dropout or packed is None:
            reason = "it uses dropout" if dropout else "the model does not pass `packed` on to it"
            raise UnsupportedModelError(f"{type(module).__name__} cannot be trained on packed segments: {reason}")
        scoring = read_scoring(module, query, attention_mask, scaling, sliding_window, kwargs)
        query_NHD, key_NGD, value_NGD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        return kernel(query_NHD, key_NGD, value_NGD, packed, scoring)[None], None

    return attention


for _name, _kernel in PACKED_ATTENTIONS.items():
    AttentionInterface.register(f"agent_r1_{_name}", _attention(_kernel))


def use_packed_attention(model: Any, name: str | None, autocast_dtype: torch.dtype | None = None) -> None:
    """Switch a transformers model to one of the implementations above. None: the fastest on the model's device."""
    if name is None:
        name = packed_attention_for(model.device, autocast_dtype or model.dtype, _head_dim(model.config))
    layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if not layers <= _SUPPORTED_LAYERS or getattr(model.config, "attention_chunk_size", None):
        kinds = sorted(layers - _SUPPORTED_LAYERS) or "chunked_attention"
        raise UnsupportedModelError(f"{type(model).__name__} has layers of kind {kinds}, which cannot be packed")
    model.set_attn_implementation(f"agent_r1_{name}")
