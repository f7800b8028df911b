"""Attention over a pack: each token sees the tokens before it in its own segment, and nothing of its neighbours.

Plugged into transformers through `AttentionInterface`, so that models need no port. No mask is ever built: transformers
makes none for an implementation that registers none, and the segment lengths say all there is to say.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agent_r1.errors import ConfigError, did_you_mean

# Arguments with which some models change the attention scores. None of them may be dropped silently.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def segment_attention(  # noqa: PLR0913 (transformers decides what an attention function is given)
    module: nn.Module,
    query: Tensor,  # [1, heads, N, head_dim]
    key: Tensor,  # [1, kv_heads, N, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One call of torch's fused attention per segment.

    On a CPU this beats padding the segments to a rectangle: nothing is gathered, nothing is computed for padding, and
    the kernel works on one sequence at a time anyway.
    """
    _refuse_what_would_be_ignored(module, attention_mask, dropout, kwargs)
    if packed_lengths is None:
        raise ConfigError(
            f"{type(module).__name__} got no segment lengths: the model does not hand keyword arguments down to its "
            "attention, so it cannot be trained on packed segments"
        )
    parts = [tensor.split(packed_lengths, dim=2) for tensor in (query, key, value)]
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        length = q.shape[2]
        mask = _band(length, sliding_window, q.device) if sliding_window and length > sliding_window else None
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _refuse_what_would_be_ignored(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    used = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    used += ["attention_mask"] if attention_mask is not None else []
    used += ["dropout"] if dropout else []
    if used:
        raise ConfigError(
            f"{type(module).__name__} cannot be trained on packed segments: its attention uses {', '.join(used)}, "
            "which the packed attention does not implement"
        )


@lru_cache(maxsize=64)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """True where a query may look: not ahead, and fewer than `window` positions back."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


# transformers reads meaning into names with "sdpa", "flash" or "flex" in them, so ours have none of these.
PACKED_ATTENTIONS = {"segments": segment_attention}
for _name, _function in PACKED_ATTENTIONS.items():
    AttentionInterface.register(f"agent_r1_{_name}", _function)


def use_packed_attention(model: Any, name: str) -> None:
    """Switch a transformers model to one of the implementations above."""
    if name not in PACKED_ATTENTIONS:
        raise ConfigError(f"unknown packed attention {name!r}.{did_you_mean(name, PACKED_ATTENTIONS)}")
    layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if not layers <= _SUPPORTED_LAYERS or getattr(model.config, "attention_chunk_size", None):
        raise ConfigError(
            f"{type(model).__name__} has layers of kind {sorted(layers - _SUPPORTED_LAYERS) or 'chunked_attention'}, "
            f"which cannot be packed. Supported: {sorted(_SUPPORTED_LAYERS)}"
        )
    model.set_attn_implementation(f"agent_r1_{name}")
