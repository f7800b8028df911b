"""A float32 output head for a model in half precision.

In bfloat16 a logit of 20 is rounded to a multiple of 0.125, which causes most of the mismatch between sampler and
learner. The head has its own weights even if the model ties them to its embeddings, which stay in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from agent_r1.errors import ConfigError


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
