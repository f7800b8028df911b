"""AdamW with gradient clipping and a schedule, over one set of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Schedule = Callable[[int], float]  # optimizer step, from 1 -> factor of the learning rate


def warmup(steps: int) -> Schedule:
    """Rise linearly over the first optimizer steps, then stay."""
    return lambda optimizer_step: min(1.0, optimizer_step / (steps + 1))


def cosine(warmup_steps: int, total: int, floor: float = 0.1) -> Schedule:
    """Rise linearly, then fall along half a cosine to `floor` at optimizer step `total`."""

    def scale(optimizer_step: int) -> float:
        progress = min(1.0, max(0, optimizer_step - warmup_steps) / max(1, total - warmup_steps))
        return warmup(warmup_steps)(optimizer_step) * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return scale


class Optimizer:
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,  # of matrices; vectors (norms, biases) are never decayed
        max_grad_norm: float,
        schedule: Schedule,
    ) -> None:
        self.parameters = list(parameters)
        self.steps = 0
        self._base_lr, self._schedule, self._max_grad_norm = lr, schedule, max_grad_norm
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)

    @property
    def lr(self) -> float:
        """Of the last step."""
        return self._base_lr * self._schedule(self.steps)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Scale the gradient down to the allowed norm; returns the norm it had."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm))

    def step(self) -> None:
        self.steps += 1
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()

    def state_dict(self) -> dict[str, Any]:
        """As usual in torch the tensors are live: save before the next step."""
        return {"adam": self._adam.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        self.steps = state["steps"]
