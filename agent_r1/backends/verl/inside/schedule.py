"""AdamW for verl's workers (`optim.optimizer_impl`), as our learner has it.

verl's own decays norms and biases too, and its warm-up begins with a step of learning rate 0. Here the driver decides
the learning rate of every step. It travels with the data, and the loss function leaves it here. Knows no verl.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_RATES: dict[str, float] = {}  # rates in this process: policy and critic may share one


def set_rate(role: str, rate: float) -> None:
    _RATES[role] = rate


class AdamW(torch.optim.AdamW):
    """Matrices are decayed, vectors (norms, biases) are not."""

    def __init__(self, params: Iterable[nn.Parameter], *, role: str, weight_decay: float, **settings: Any) -> None:
        every = [p for p in params if p.requires_grad]
        groups = [
            {"params": [p for p in every if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], weight_decay=weight_decay, **settings)
        self._role = role

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = _RATES[self._role]
        return super().step(closure)
