"""Low-rank adapters beside weights that the engine shares with the learner: W x becomes W x + scale * B A x.

The weights then exist once, in the number format of sampling, and an update copies only A and B. A sum of products
rounds less than a merged matrix in half precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The adapters of a model. All start at 0, so the model computes what it did without them."""

    names: Sequence[str]  # names of the linear layers with an adapter
    rank: int
    scale: float

    def add_to(self, model: nn.Module) -> None:
        """Add the adapters after layers are fused, and before they are compiled or captured."""
        for name in self.names:
            layer: Any = model.get_submodule(name)
            if hasattr(layer, PARTS[0]):
                continue
            rows, columns = layer.weight.shape
            for part, shape in zip(PARTS, ((self.rank, columns), (rows, self.rank)), strict=True):
                layer.register_parameter(part, nn.Parameter(layer.weight.new_zeros(shape), requires_grad=False))
            layer.adapter_scale = self.scale
            layer.register_forward_hook(_add_low_rank)


def _add_low_rank(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    added: Tensor = linear(linear(inputs[0], layer.lora_A), layer.lora_B) * layer.adapter_scale
    return output + added


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in PARTS


def sharing_copy(model: Any) -> Any:
    """Copy the modules and buffers of a model, but not its weights."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def adopt_weights(model: Any, source: Any) -> None:
    """Let a model read the weights of its sharing copy, which fusing has moved to other tensors."""
    moved = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        if moved[name].dtype == parameter.dtype:  # a float32 head has its own weights
            parameter.data = moved[name].data
