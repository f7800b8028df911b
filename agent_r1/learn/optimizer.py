"""AdamW with gradient clipping and a schedule, over one set of parameters.

Its two moments take twice the memory of the parameters and are read once per step. In between, they stay on the host
with `offload`, and are kept in 8 bits with `eight_bit`; a step converts them, bucket by bucket, into AdamW's form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agent_r1.learn.model.sharding import local, sharded_like, whole
from agent_r1.learn.moments import State, compress, expand
from agent_r1.learn.sizes import is_compressed, moment_bytes

Decay = Literal["constant", "linear", "cosine"]  # how a learning rate falls after its warm-up
# (steps taken, steps planned so far), both from 1 -> factor of the learning rate. An update that is empty, skipped or
# stopped early takes fewer steps than planned: a warm-up counts the steps taken, a decay those planned.
Schedule = Callable[[int, int], float]
BUCKET_BYTES = 2**28  # size of the parameters whose state is brought into AdamW's form together


def warmup(steps: int) -> Schedule:
    """Rise linearly over the first steps, then stay."""
    return lambda taken, planned: min(1.0, taken / (steps + 1))


def schedule(decay: Decay, *, warmup_steps: int, total: int, floor: float) -> Schedule:
    """Rise linearly, then stay, or fall linearly or along half a cosine to `floor` at planned step `total`."""
    shapes: dict[Decay, Callable[[float], float]] = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: floor + (1 - floor) * (1 - progress),
        "cosine": lambda progress: floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2,
    }
    rise, fall = warmup(warmup_steps), shapes[decay]

    def scale(taken: int, planned: int) -> float:
        progress = min(1.0, max(0, planned - warmup_steps) / max(1, total - warmup_steps))
        return rise(taken, planned) * fall(progress)

    return scale


class Optimizer:
    def __init__(  # noqa: PLR0913 (the settings of AdamW)
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,  # applies to matrices; vectors (norms, biases) are never decayed
        max_grad_norm: float,
        schedule: Schedule,
        offload: bool = False,
        eight_bit: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.steps = 0
        self.planned = 0  # steps taken plus steps skipped
        self.offload, self.eight_bit = offload, eight_bit
        self._base_lr, self._schedule, self._max_grad_norm = lr, schedule, max_grad_norm
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)

    @property
    def lr(self) -> float:
        """Learning rate of the last step; 0 before the first."""
        return float(self._adam.param_groups[0]["lr"]) if self.steps else 0.0

    @property
    def state_bytes(self) -> int:
        """Size of its state on the device between steps, from the first step on."""
        sizes = [(local(p).numel() // _columns(p), _columns(p)) for p in self.parameters]
        return 0 if self.offload else sum(moment_bytes(*size, eight_bit=self.eight_bit) for size in sizes)

    @property
    def step_bytes(self) -> int:
        """Temporary memory of a step: the moments of the largest bucket in fp32."""
        if not (self.offload or self.eight_bit):
            return 0
        found = (bucket for group in self._adam.param_groups for bucket in buckets(group["params"], BUCKET_BYTES))
        return 2 * max(sum(map(_bytes, bucket)) for bucket in found)

    @property
    def has_state(self) -> bool:
        """False before the first step, which allocates it."""
        return bool(self._adam.state)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> Tensor:
        """Scale the gradient down to the allowed norm. Returns the norm before."""
        return whole(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm))

    def step(self) -> None:
        self.steps, self.planned = self.steps + 1, self.planned + 1
        for group in self._adam.param_groups:
            group["lr"] = self._base_lr * self._schedule(self.steps, self.planned)
        if self.offload or self.eight_bit:
            self._step_in_buckets()
        else:
            self._adam.step()

    def state_dict(self) -> dict[str, Any]:
        """As usual in torch, tensors are live: save before the next step."""
        if self.offload and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies to the host may still be running
        adam, ordered = self._adam.state_dict(), self._ordered
        adam["state"] = {  # tensors that are not in AdamW's form are plain tensors
            index: {name: sharded_like(local(tensor), ordered[index]) for name, tensor in tensors.items()}
            for index, tensors in adam["state"].items()
        }
        return {"adam": adam, "steps": self.steps, "planned": self.planned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["adam"]
        # torch would copy all of it to the device, where it may not fit, and knows nothing of shards.
        self._adam.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        for index, tensors in saved["state"].items():
            p, own = self._ordered[index], {name: local(tensor).clone() for name, tensor in tensors.items()}
            own = self._kept(own if self.eight_bit else expand(own), p)
            as_they_are = self.offload or self.eight_bit
            self._adam.state[p] = own if as_they_are else {name: sharded_like(t, p) for name, t in own.items()}
        self.steps = state["steps"]
        self.planned = state.get("planned", self.steps)  # older checkpoints do not have it

    @property
    def _ordered(self) -> list[nn.Parameter]:
        """The parameters as Adam numbers them."""
        return [p for group in self._adam.param_groups for p in group["params"]]

    def _step_in_buckets(self) -> None:
        """The same step, some parameters at a time."""
        groups = self._adam.param_groups
        try:
            for group in groups:
                for bucket in buckets([p for p in group["params"] if p.grad is not None], BUCKET_BYTES):
                    kept = {p: self._adam.state[p] for p in bucket if p in self._adam.state}
                    for p, state in kept.items():
                        moved = {
                            name: t.to(p.device, non_blocking=True, copy=self.offload) for name, t in state.items()
                        }
                        self._adam.state[p] = {name: sharded_like(t, p) for name, t in expand(moved).items()}
                    self._adam.param_groups = [{**group, "params": bucket}]
                    self._adam.step()
                    for p in bucket:
                        state = {name: local(tensor) for name, tensor in self._adam.state[p].items()}
                        self._adam.state[p] = self._kept(state, p, kept.get(p))
        finally:
            self._adam.param_groups = groups

    def _kept(self, state: State, p: Tensor, before: State | None = None) -> State:
        """The form of this rank's state between steps. `before`: host memory to reuse."""
        if self.eight_bit and is_compressed(_columns(p)) and "exp_avg_scale" not in state:
            state = compress(state)
        if not self.offload:
            return {name: tensor.to(p.device) for name, tensor in state.items()}
        if before is None:
            return {name: _on_host(tensor) for name, tensor in state.items()}
        for name, tensor in state.items():
            before[name].copy_(tensor, non_blocking=True)
        return before


def buckets(parameters: Sequence[nn.Parameter], max_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Split in order into buckets of at most `max_bytes`; a larger parameter gets its own."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        more = _bytes(parameter)
        if bucket and size + more > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += more
    if bucket:
        yield bucket


def _bytes(parameter: Tensor) -> int:
    return local(parameter).numel() * parameter.element_size()


def _columns(parameter: Tensor) -> int:
    """Length of a row, the same on all ranks."""
    return math.prod(parameter.shape[1:])


def _on_host(part: Tensor) -> Tensor:
    """Copy to host memory, pinned if there is a GPU, so that copies need not wait for the host."""
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=torch.cuda.is_available())
    return host.copy_(part)
