"""What is done to the decoder layers of a transformers model for speed or memory; what they compute stays the same.

transformers marks the layers that repeat (`GradientCheckpointingLayer`), so that they can be found in any model.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.errors import ConfigError

# Variants of one layer that torch compiles before it gives up and runs it as it is: windows or none, with gradients or
# without, trained or frozen, with adapters or without. torch's own limit of 8 is less than their product.
MAX_VARIANTS = 32
# In the order in which torch looks for them.
COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def decoder_layers(model: nn.Module) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not mark its layers as transformers models do, so they can be neither "
            "compiled nor checkpointed: set learner.compile=false and learner.activation_checkpointing=false"
        )
    return layers


def checkpoint_layers(model: nn.Module) -> None:
    """Keep only what goes into each layer, and compute the layer again in the backward pass.

    transformers does so while a layer is in training mode. Only the layer itself is put into it: what it is made of
    stays in evaluation mode, so dropout stays off.
    """
    for layer in decoder_layers(model):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.training = True


def compile_layers(model: nn.Module) -> None:
    """One by one: their code is the same, so it is compiled once. The model around them stays as it is."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def require_compiler(device: torch.device) -> None:
    """torch.compile would say so too, but in the middle of the first update."""
    wanted = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    if not any(shutil.which(name) for name in (*wanted, *COMPILERS)):
        raise ConfigError(
            f"learner.compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is on the path. Install one "
            "(for example apt-get install g++), or set learner.compile=false"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("learner.compile needs the package triton on a GPU: install it, or set learner.compile=false")
