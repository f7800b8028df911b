"""What is done to the decoder layers of a transformers model for speed or memory; what they compute stays the same."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agent_r1.compiling import COMPILERS, compile_each, has_compiler, repeated_layers
from agent_r1.errors import ConfigError


def decoder_layers(model: nn.Module, *, needed_by: str) -> list[Any]:
    """Return the decoder layers. `needed_by` is the setting that needs them, for the error."""
    layers = repeated_layers(model)
    if not layers:
        raise ConfigError(
            f"{needed_by} does not work with {type(model).__name__}, which does not mark its layers as transformers "
            f"models do: set {needed_by}=false"
        )
    return layers


def checkpoint_layers(model: nn.Module) -> None:
    """Keep only what goes into each layer, and compute the layer again in the backward pass.

    transformers does so while a layer is in training mode. Only the layer itself is put into it: what it is made of
    stays in evaluation mode, so dropout stays off.
    """
    for layer in decoder_layers(model, needed_by="learner.activation_checkpointing"):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.training = True


def compile_layers(model: nn.Module) -> None:
    compile_each(decoder_layers(model, needed_by="learner.compile"))


def require_compiler(device: torch.device) -> None:
    """torch.compile would say so too, but in the middle of the first update."""
    if not has_compiler():
        raise ConfigError(
            f"learner.compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is on the path. Install one "
            "(for example apt-get install g++), or set learner.compile=false"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("learner.compile needs the package triton on a GPU: install it, or set learner.compile=false")
