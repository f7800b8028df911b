"""What sampling and learning have in common when they compile a transformers model: its layers, one by one.

transformers marks the layers that repeat (`GradientCheckpointingLayer`), so that they can be found in any model. They
share their code, so it is compiled once and not once per layer. Knows models; knows neither engines nor learners.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Variants of one layer that torch compiles before it gives up and runs it as it is: windows or none, with gradients or
# without, trained or frozen, with adapters or without. torch's own limit of 8 is less than their product.
MAX_VARIANTS = 32
# In the order in which torch looks for them.
COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def repeated_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_each(layers: Iterable[Any]) -> None:
    """The model around them stays as it is."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in layers:
        layer.compile(dynamic=True)


def has_compiler() -> bool:
    """Of C++ or C: torch.compile and Triton build what launches their kernels."""
    wanted = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    return any(shutil.which(name) for name in (*wanted, *COMPILERS))
