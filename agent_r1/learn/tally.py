"""Metrics of an update: sums and maxima over packs, ranks and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agent_r1.learn.losses import LossOutput


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    steps: int = 0  # optimizer steps
    sums: dict[str, float] = field(default_factory=dict)  # over trained tokens
    maxima: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)  # over optimizer steps
    norms: dict[str, float] = field(default_factory=dict)  # gradient norms of one optimizer step, over all ranks
    mismatch: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[LossOutput], *, tokens: int, norms: Mapping[str, Tensor]) -> Tally:
        """One rank's share of one optimizer step."""
        tally = cls(tokens=tokens)
        entries: list[tuple[dict[str, float], str, Tensor]] = []
        for output in outputs:
            entries += [(tally.sums, name, tensor) for name, tensor in output.sums.items()]
            entries += [(tally.maxima, name, tensor) for name, tensor in output.maxima.items()]
            entries += [(tally.step_sums, name, tensor) for name, tensor in output.shares.items()]
            entries += [(tally.step_sums, "loss", output.loss)]
        entries += [(tally.norms, name, tensor) for name, tensor in norms.items()]
        numbers = _read([tensor for _, _, tensor in entries])
        for (totals, name, _), number in zip(entries, numbers, strict=True):
            (_raise if totals is tally.maxima else _add)(totals, {name: number})
        return tally

    @classmethod
    def merge(cls, ranks: Sequence[Tally]) -> Tally:
        """Join the shares of all ranks in one optimizer step."""
        merged = cls(norms=ranks[0].norms)
        for rank in ranks:
            merged._include(rank)
        return merged

    @property
    def is_finite(self) -> bool:
        """Whether this optimizer step may be taken."""
        return all(map(math.isfinite, [self.loss, *self.norms.values()]))

    @property
    def loss(self) -> float:
        return self.step_sums.get("loss", 0.0)

    def add_step(self, step: Tally) -> None:
        self.steps += 1
        self._include(step)
        _add(self.step_sums, {"grad_norm": 0.0} | step.norms)  # 0 while the policy waits for its critic
        if self.steps == 1 and "approx_kl" in self.sums and "mismatch_kl" not in self.sums:
            # Nothing has been learned yet, so this is how far sampler and learner disagree about the same weights.
            self.mismatch = {
                "mismatch_kl": self.sums["approx_kl"] / max(1, self.tokens),
                "mismatch_max": self.maxima.get("log_ratio_max", 0.0),
            }

    def metrics(self) -> dict[str, float]:
        if self.steps == 0:  # every optimizer step was skipped
            return {"loss": math.nan, "grad_norm": math.nan}
        means = {name: total / max(1, self.tokens) for name, total in self.sums.items()}
        step_means = {name: total / self.steps for name, total in self.step_sums.items()}
        return step_means | means | self.maxima | self.mismatch

    def _include(self, other: Tally) -> None:
        self.tokens += other.tokens
        _add(self.sums, other.sums)
        _add(self.step_sums, other.step_sums)
        _raise(self.maxima, other.maxima)


def _add(totals: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


def _raise(maxima: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        maxima[name] = max(maxima.get(name, -math.inf), value)


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """Convert to numbers with a single copy from the device, because each copy waits for all its pending work."""
    if not tensors:
        return []
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    numbers: list[float] = torch.stack([tensor.detach().to(device, torch.float64) for tensor in tensors]).tolist()
    return numbers
