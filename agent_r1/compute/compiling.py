"""Compile the layers of a transformers model one by one, for sampling and for learning.

transformers marks repeated layers (`GradientCheckpointingLayer`), so they can be found in any model. They share their
code, so it is compiled only once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Variants of a layer that torch compiles before it falls back to eager mode: with or without window, gradients,
# training, adapters. torch's default of 8 is too low for all combinations.
MAX_VARIANTS = 32
# In torch's search order.
COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def repeated_layers(model: nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer  # slow; a plan needs `has_compiler` only

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_each(layers: Iterable[Any]) -> None:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in layers:
        layer.compile(dynamic=True)


def has_compiler() -> bool:
    """Whether there is a C or C++ compiler, which torch.compile and Triton need to build launchers."""
    wanted = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    return any(shutil.which(name) for name in (*wanted, *COMPILERS))
