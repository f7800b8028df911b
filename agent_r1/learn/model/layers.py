"""Make a transformers model faster or smaller in memory, without changing its results or the names of its weights."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
