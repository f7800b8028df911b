"""Linear layers that read the same input, computed as one matrix product.

Decoding is a sequence of many small products, and three of them take three times as long as one of three times the
size. The layers stay in the model with weights of the same names and shapes, which are views of the fused weight, so
copying into them takes effect at once. The first layer that is called computes the results of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order of their calls


class First(nn.Module):
    """Computes all results, and keeps the results of the other layers."""

    all_weights: Tensor
    all_biases: Tensor | None

    def __init__(self, weights: Tensor, biases: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("all_weights", weights, persistent=False)
        self.register_buffer("all_biases", biases, persistent=False)
        self.sizes = list(sizes)
        self.kept: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = linear(x, self.all_weights, self.all_biases).split(self.sizes, dim=-1)
        self.kept = parts[1:]
        return parts[0]


class Later(nn.Module):
    """Returns its share of the output that `First` already computed."""

    def __init__(self, first: First, *, last: bool) -> None:
        super().__init__()
        self._first = [first]  # in a list, so that its weights are not registered here too
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        kept = self._first[0].kept
        assert kept is not None
        self._first[0].kept = None if self.last else kept[1:]
        return kept[0]


def fuse_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Fuse groups of layers. Returns the replaced ones as (parent, name, module)."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for names in GROUPS:
            layers = [getattr(parent, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and _can_fuse(layers):
                replaced += [(parent, name, layer) for name, layer in zip(names, layers, strict=True)]  # type: ignore[misc]
                _fuse(parent, names, layers)
    return replaced


def restore_linears(replaced: Sequence[tuple[nn.Module, str, nn.Module]]) -> None:
    for parent, name, module in replaced:
        setattr(parent, name, module)


def _can_fuse(layers: Sequence[Any]) -> bool:
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        for layer in layers
    )


@torch.no_grad()
def _fuse(parent: nn.Module, names: Sequence[str], layers: Sequence[Any]) -> None:
    sizes = [layer.out_features for layer in layers]
    weights = torch.cat([layer.weight for layer in layers])
    biases = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    first = First(weights, biases, sizes)
    modules = [first, *(Later(first, last=name == names[-1]) for name in names[1:])]
    for name, layer, module, weight in zip(names, layers, modules, weights.split(sizes), strict=True):
        module.weight = layer.weight = nn.Parameter(weight, requires_grad=False)
        setattr(parent, name, module)
    for layer, module, bias in zip(layers, modules, [] if biases is None else biases.split(sizes), strict=False):
        module.bias = layer.bias = nn.Parameter(bias, requires_grad=False)
