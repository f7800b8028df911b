"""What an update has to say for itself: sums, maxima and losses of packs, optimizer steps and ranks, added up."""

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
    steps: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)  # over trained tokens
    maxima: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)  # over optimizer steps
    norms: dict[str, float] = field(default_factory=dict)  # of gradients, of one optimizer step
    mismatch: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[LossOutput], *, tokens: int, norms: Mapping[str, Tensor]) -> Tally:
        """One rank's share of one optimizer step; the gradient's norms are those of all ranks."""
        reports = [
            {"loss": {"": output.loss}, "sums": output.sums, "shares": output.shares, "maxima": output.maxima}
            for output in outputs
        ]
        made = cls(tokens=tokens)
        *packs, last = _read([*reports, {"norms": dict(norms)}])
        for report in packs:
            made.loss += report["loss"][""]
            _add(made.sums, report["sums"])
            _add(made.step_sums, report["shares"])
            _raise(made.maxima, report["maxima"])
        made.norms = last["norms"]
        return made

    @classmethod
    def merged(cls, shares: Sequence[Tally]) -> Tally:
        """All ranks of one optimizer step."""
        made = cls()
        for share in shares:
            made.tokens += share.tokens
            made.loss += share.loss
            _add(made.sums, share.sums)
            _add(made.step_sums, share.step_sums)
            _raise(made.maxima, share.maxima)
            made.norms = share.norms
        return made

    @property
    def is_finite(self) -> bool:
        """Of one optimizer step: whether it may be taken."""
        return all(map(math.isfinite, [self.loss, *self.norms.values()]))

    def add_step(self, step: Tally) -> None:
        self.steps += 1
        self.tokens += step.tokens
        _add(self.sums, step.sums)
        # 0: a policy that waits for its critic does not move
        _add(self.step_sums, step.step_sums | {"loss": step.loss, "grad_norm": 0.0} | step.norms)
        _raise(self.maxima, step.maxima)
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


def _add(totals: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


def _raise(maxima: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        maxima[name] = max(maxima.get(name, -math.inf), value)


Report = dict[str, dict[str, Tensor]]


def _read(reports: Sequence[Report]) -> list[dict[str, dict[str, float]]]:
    """All tensors as numbers, with one copy from the device: each one waits until the device has done all its work."""
    tensors = [tensor for report in reports for values in report.values() for tensor in values.values()]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    flat = [tensor.detach().to(device, torch.float64) for tensor in tensors]
    numbers = iter(torch.stack(flat).tolist() if flat else [])
    return [{kind: {name: next(numbers) for name in values} for kind, values in report.items()} for report in reports]
