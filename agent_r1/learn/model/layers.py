"""Make a transformers model faster or smaller in memory, without changing its results or the names of its weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from agent_r1.compute.compiling import COMPILERS, compile_each, has_compiler, repeated_layers
from agent_r1.errors import ConfigError


def decoder_layers(model: nn.Module, *, without: str) -> list[Any]:
    """Return the decoder layers. `without`: what to do without them, for the error."""
    layers = repeated_layers(model)
    if not layers:
        raise ConfigError(f"cannot find the layers of {type(model).__name__}: {without}")
    return layers


def checkpoint_layers(model: nn.Module) -> None:
    """Keep only the input of each layer, and compute the layer again in the backward pass.

    transformers does so while a layer is in training mode. Only the layer itself is switched: its parts stay in
    evaluation mode, so dropout stays off.
    """
    for layer in decoder_layers(model, without="set learner.activation_checkpointing=false"):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.training = True


def compile_layers(model: nn.Module) -> None:
    compile_each(decoder_layers(model, without="set learner.compile=false"))


def require_compiler(device: torch.device) -> None:
    """Fail early: torch.compile would only fail in the middle of the first update."""
    if not has_compiler():
        raise ConfigError(
            f"learner.compile needs a C++ compiler: install one of {', '.join(COMPILERS)}, or set learner.compile=false"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("learner.compile needs the package triton on a GPU: install it, or set learner.compile=false")


def untied_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict as live tensors; tied weights appear once."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def chunk_mlps(layers: Iterable[Any], tokens: int) -> None:
    """Compute the MLP of each layer for at most `tokens` tokens at a time: its wide activations exist for one chunk.

    Only the input of an MLP is kept. The backward pass computes the MLP again, chunk by chunk. In a checkpointed layer
    it is still computed only twice: a checkpoint repeats a layer up to the last tensor that the backward pass needs,
    and `_Keep` makes that the input of the MLP.
    """
    in_chunks = torch.compiler.disable(_in_chunks)  # not a decorator, which would import dynamo even for a dry run
    for layer in layers:
        if not hasattr(layer, "mlp"):
            raise ConfigError(f"cannot find the MLP of {type(layer).__name__}: leave out learner.mlp_chunk_tokens")
        layer.mlp.forward = partial(in_chunks, layer.mlp.forward, tokens)


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
