"""What an update has to say for itself: sums, maxima and losses of packs, optimizer steps and ranks, added up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agent_r1.learn.losses import LossOutput


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    steps: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)  # over trained tokens
    maxima: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)  # over optimizer steps
    mismatch: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[LossOutput], *, tokens: int) -> Tally:
        """One rank's share of one optimizer step."""
        made = cls(tokens=tokens)
        for output in outputs:
            made.loss += float(output.loss.detach())
            _add(made.sums, {name: float(total) for name, total in output.sums.items()})
            _add(made.step_sums, {name: float(share) for name, share in output.shares.items()})
            _raise(made.maxima, {name: float(largest) for name, largest in output.maxima.items()})
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
        return made

    def add_step(self, step: Tally, **step_values: float) -> None:
        self.steps += 1
        self.tokens += step.tokens
        _add(self.sums, step.sums)
        _add(self.step_sums, step.step_sums | {"loss": step.loss} | step_values)
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
