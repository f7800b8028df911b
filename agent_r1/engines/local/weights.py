"""The weights of an engine's copy of the model: their number format, new ones, a float32 head, low-rank adapters.

In bfloat16 a logit of 20 is rounded to a multiple of 0.125, which causes most of the mismatch between sampler and
learner. A float32 head avoids that. It has its own weights even if the model ties them to its embeddings, which stay in
half precision.

Low-rank adapters stand beside weights that the engine shares with the learner: W x becomes W x + scale * B A x. The
weights then exist once, in the number format of sampling, and an update copies only A and B. A sum of products rounds
less than a merged matrix in half precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from agent_r1.errors import ConfigError, DataError, did_you_mean

PARTS = ("lora_A", "lora_B")


def cast_weights(model: Any, dtype: torch.dtype) -> Any:
    """`model.to(dtype)` for the weights only. Buffers, such as rotary frequencies, keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def copy_weights(model: Any, source: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the weights one at a time, since a source may compute each on request."""
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    given: dict[int, str] = {}
    adapters = {name for name in targets if is_adapter(name)}
    for name, tensor in with_head_weights(model, source):
        target = targets.get(name)
        if adapters and target is not None and name not in adapters:
            raise DataError(f"weight {name!r} is shared with the learner: only adapters can be loaded")
        if target is None:
            raise DataError(f"the model has no weight {name!r}.{did_you_mean(name, targets)}")
        if tensor.shape != target.shape:
            raise DataError(f"weight {name!r} has shape {list(tensor.shape)}; the model's is {list(target.shape)}")
        # Tied weights are one parameter under several names. One of them is enough, but they must agree.
        other = given.setdefault(id(target), name)
        if other != name and not torch.equal(target, tensor.to(target)):
            raise DataError(f"{name!r} and {other!r} are tied in the model but have different values")
        target.copy_(tensor)
    named = [(name, each) for name, each in model.named_parameters() if not adapters or name in adapters]
    missing = [name for name, parameter in named if id(parameter) not in given]
    if missing:
        raise DataError(f"{len(missing)} of the model's weights are missing, {missing[0]!r} first")


class Fp32Head(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().float().clone(), requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(head.bias.detach().float().clone(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden.float(), self.weight, self.bias)


def use_fp32_head(model: Any, masters: Any) -> None:
    """Replace the model's head by a float32 one. `masters` is the head of a float32 copy of the model."""
    if type(masters) is not nn.Linear:
        name, head = type(model).__name__, type(masters).__name__
        raise ConfigError(f"model.fp32_head needs a linear output head, but {name} has {head}. Remove the setting")
    model.set_output_embeddings(Fp32Head(masters))


def with_head_weights(model: Any, source: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Add the head's weights under their own name, since a learner passes tied weights only once."""
    head = model.get_output_embeddings()
    if not isinstance(head, Fp32Head):
        yield from source
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own, tied = names[id(head.weight)], names[id(model.get_input_embeddings().weight)]
    given: dict[str, Tensor] = {}
    for name, tensor in source:
        if name in (own, tied):
            given[name] = tensor
        yield name, tensor
    if own not in given and tied in given:
        yield own, given[tied]


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
