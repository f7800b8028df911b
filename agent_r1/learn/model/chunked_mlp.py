"""MLPs in chunks of tokens: their wide activations exist for one chunk at a time, not for a whole pack.

Only the input of an MLP is kept. The backward pass computes the MLP again, chunk by chunk. In a checkpointed layer it
is still computed only twice: a checkpoint repeats a layer up to the last tensor that the backward pass needs, and
`_Keep` makes that the input of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from agent_r1.errors import ConfigError


def chunk_mlps(layers: Iterable[Any], tokens: int) -> None:
    """Compute the MLP of each layer for at most `tokens` tokens at a time."""
    for layer in layers:
        if not hasattr(layer, "mlp"):
            raise ConfigError(f"cannot find the MLP of {type(layer).__name__}: leave out learner.mlp_chunk_tokens")
        layer.mlp.forward = partial(_in_chunks, layer.mlp.forward, tokens)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_chunks(mlp: Any, tokens: int, x: Tensor) -> Tensor:
    """mlp: the bound method of a module."""
    if x.shape[-2] <= tokens or not torch.is_grad_enabled():
        return _join(mlp, tokens, x)
    trained = next((p for p in mlp.__self__.parameters() if p.requires_grad), None)  # its input may need no gradient
    kept = _Keep.apply(x, trained)
    out: Tensor = _Chunks.apply(kept, kept.grad_fn, mlp, tokens)
    return out


def _join(mlp: Any, tokens: int, x: Tensor) -> Tensor:
    parts = [mlp(part) for part in x.split(tokens, dim=-2)]
    if not isinstance(parts[0], Tensor):
        name = type(mlp.__self__).__name__
        raise ConfigError(f"{name} returns more than hidden states: leave out learner.mlp_chunk_tokens")
    return torch.cat(parts, dim=-2)


class _Keep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _trained: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Chunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: Any, mlp: Any, tokens: int) -> Tensor:
        device, ctx.keeper, ctx.mlp, ctx.tokens = x.device.type, keeper, mlp, tokens
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return _join(mlp, tokens, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inputs = [part.detach().requires_grad_() for part in ctx.keeper.saved_tensors[0].split(ctx.tokens, dim=-2)]
        for part, grad in zip(inputs, grads[0].split(ctx.tokens, dim=-2), strict=True):
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                out = ctx.mlp(part)
            torch.autograd.backward(out, grad)
        return torch.cat([part.grad for part in inputs], dim=-2), None, None, None
