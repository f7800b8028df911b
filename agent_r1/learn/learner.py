"""The learner: credited trajectories in, one or more optimizer steps, metrics out.

It does not know which algorithm runs (the loss is a function it is given), where the trajectories came from, or how
weights are saved. One `update` is: mini-batches of whole trajectories, each merged and packed once; per epoch and
mini-batch, gradients accumulated over the packs with one global denominator, then one AdamW step. An optimizer step
whose loss or gradient is not finite is skipped and counted; several in a row are an error that names the trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_r1.errors import ConfigError, TrainingError, did_you_mean
from agent_r1.learn.batch import Pack, Segment, merge_steps, pack, split_evenly
from agent_r1.learn.losses import KL_PENALTIES, Counts, LossInputs, LossOutput
from agent_r1.learn.policy import PolicyModel
from agent_r1.types import CreditedTrajectory

MAX_NAMED = 8  # trajectories an error message lists


def warmup(steps: int) -> Callable[[int], float]:
    """Rise linearly over the first optimizer steps, then stay."""
    return lambda optimizer_step: min(1.0, optimizer_step / (steps + 1))


def cosine(warmup_steps: int, total: int, floor: float = 0.1) -> Callable[[int], float]:
    """Rise linearly, then fall along half a cosine to `floor` at optimizer step `total`."""

    def scale(optimizer_step: int) -> float:
        progress = min(1.0, max(0, optimizer_step - warmup_steps) / max(1, total - warmup_steps))
        return warmup(warmup_steps)(optimizer_step) * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """What one optimizer step trains on, in every epoch."""

    packs: list[Pack]
    counts: Counts
    trajectory_names: list[str]
    reference_logprobs: list[Tensor]  # per pack; empty without a reference


@dataclass(slots=True)
class _Tally:
    """Metrics of one update, over its finite optimizer steps."""

    tokens: int = 0
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)  # over trained tokens
    maxima: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)  # over optimizer steps
    mismatch: dict[str, float] = field(default_factory=dict)

    def add_step(self, outputs: Sequence[LossOutput], *, tokens: int, **step_values: float) -> None:
        self.steps += 1
        self.tokens += tokens
        for name, value in step_values.items():
            self.step_sums[name] = self.step_sums.get(name, 0.0) + value
        for output in outputs:
            for name, total in output.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(total)
            for name, largest in output.maxima.items():
                self.maxima[name] = max(self.maxima.get(name, -math.inf), float(largest))
        if self.steps == 1 and "approx_kl" in self.sums:
            # Nothing has been learned yet, so this is how far sampler and learner disagree about the same weights.
            self.mismatch = {
                "mismatch_kl": self.sums["approx_kl"] / self.tokens,
                "mismatch_max": self.maxima["log_ratio_max"],
            }

    def metrics(self) -> dict[str, float]:
        if self.steps == 0:  # every optimizer step was skipped
            return {"loss": math.nan, "grad_norm": math.nan}
        means = {name: total / self.tokens for name, total in self.sums.items()}
        step_means = {name: total / self.steps for name, total in self.step_sums.items()}
        return step_means | means | self.maxima | self.mismatch


@dataclass(kw_only=True, eq=False, repr=False)
class Learner:
    """Trains one policy."""

    policy: PolicyModel = field(kw_only=False)
    loss: Callable[[LossInputs], LossOutput]  # an algorithm's `loss`, or `supervised_loss`
    lr: float
    temperature: float  # of the sampler: the log-probs are those of the distribution it drew from
    betas: tuple[float, float]
    weight_decay: float  # of matrices; vectors (norms, biases) are never decayed
    max_grad_norm: float
    max_tokens_per_pack: int
    max_nonfinite_updates: int  # optimizer steps skipped in a row before giving up
    schedule: Callable[[int], float] = field(default=lambda optimizer_step: 1.0)  # multiplies lr; steps count from 1
    num_epochs: int = 1
    num_minibatches: int = 1
    kl_coef: float = 0.0  # weight of the KL to `reference`
    kl_estimator: str = "k3"
    reference: PolicyModel | None = None
    entropy_coef: float = 0.0
    optimizer_steps: int = field(default=0, init=False)
    nonfinite_updates: int = field(default=0, init=False)
    _nonfinite_in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._validate()
        self._parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)

    def _validate(self) -> None:
        for name in ("lr", "temperature", "max_grad_norm", "max_tokens_per_pack", "num_epochs", "num_minibatches"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Learner.{name} must be positive, got {getattr(self, name)}")
        if self.kl_estimator not in KL_PENALTIES:
            raise ConfigError(
                f"unknown KL estimator {self.kl_estimator!r}.{did_you_mean(self.kl_estimator, KL_PENALTIES)} "
                "(k1 penalises nothing when used as a loss: its gradient is zero on average)"
            )
        if (self.kl_coef > 0) != (self.reference is not None):
            raise ConfigError(
                f"kl_coef is {self.kl_coef} but the reference model is "
                f"{'missing' if self.reference is None else 'given'}: a penalty needs both, no penalty neither"
            )

    def update(self, credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
        """Train on these trajectories. With nothing to learn from, nothing changes and `empty_update` is 1."""
        batches = [self._prepare(part) for part in split_evenly(credited, self.num_minibatches)]
        filled = [batch for batch in batches if batch.packs]
        tally, skipped = _Tally(), 0
        for _ in range(self.num_epochs):
            for batch in filled:
                skipped += not self._optimize(batch, tally)
        metrics = tally.metrics() if filled else {"loss": 0.0, "grad_norm": 0.0}
        return (
            metrics
            | self._batch_metrics(credited, filled)
            | {
                "lr": self._lr_at(self.optimizer_steps),
                "optimizer_steps": float(self.optimizer_steps),
                "skipped_updates": float(skipped),
                "nonfinite_updates": float(self.nonfinite_updates),
                "empty_update": float(not filled),
            }
        )

    def weights(self) -> Mapping[str, Tensor]:
        """For the engine: the live weights by name, tied ones once."""
        return self.policy.weights()

    def state_dict(self) -> dict[str, Any]:
        """All but the weights of the model. As usual in torch the tensors are live: save before the next update."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "nonfinite_updates": self.nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self.optimizer_steps = state["optimizer_steps"]
        self.nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]

    def _prepare(self, credited: Sequence[CreditedTrajectory]) -> _MiniBatch:
        steps = [step for item in credited for step in item.trajectory.steps if step.response_ids]
        packs = pack([s for s in merge_steps(credited) if self._matters(s)], self.max_tokens_per_pack)
        packs = [p.to(self.policy.device) for p in packs]
        reference = []
        if self.reference is not None:
            with torch.no_grad():
                reference = [self.reference.logprobs(p, temperature=self.temperature)[0] for p in packs]
        return _MiniBatch(
            packs=packs,
            counts=Counts(
                tokens=sum(len(step.response_ids) for step in steps), steps=len(steps), trajectories=len(credited)
            ),
            trajectory_names=[item.trajectory.trajectory_id for item in credited],
            reference_logprobs=reference,
        )

    def _matters(self, segment: Segment) -> bool:
        """A segment without advantage adds exactly 0 to loss and gradient: it is counted, but never computed."""
        return self.kl_coef > 0 or self.entropy_coef > 0 or any(segment.advantages)

    def _optimize(self, batch: _MiniBatch, tally: _Tally) -> bool:
        """One optimizer step; False when it had to be skipped."""
        self._optimizer.zero_grad(set_to_none=True)
        outputs, logprobs = [], []
        for index in range(len(batch.packs)):
            output, logprobs_T = self._pack_loss(batch, index)
            output.loss.backward()
            outputs.append(output)
            logprobs.append(logprobs_T)
        loss = sum(float(output.loss.detach()) for output in outputs)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._skip(batch, logprobs, loss, grad_norm)
            return False
        self._nonfinite_in_a_row = 0
        self.optimizer_steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr_at(self.optimizer_steps)
        self._optimizer.step()
        tokens = sum(p.num_trained for p in batch.packs)
        tally.add_step(outputs, tokens=tokens, loss=loss, grad_norm=grad_norm)
        return True

    def _pack_loss(self, batch: _MiniBatch, index: int) -> tuple[LossOutput, Tensor]:
        """This pack's share of the loss of the optimizer step, and its log-probs for the post-mortem."""
        part, counts = batch.packs[index], batch.counts
        logprobs_T, entropy_T = self.policy.logprobs(
            part, temperature=self.temperature, entropy_gradient=self.entropy_coef > 0
        )
        output = self.loss(
            LossInputs(
                logprobs_T=logprobs_T,
                old_logprobs_T=part.old_logprobs_T,
                advantages_T=part.advantages_T,
                step_ids_T=part.step_ids_T,
                trajectory_ids_T=part.trajectory_ids_T,
                counts=counts,
            )
        )
        loss, sums = output.loss, output.sums | {"entropy": entropy_T.detach().sum()}
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * entropy_T.sum() / counts.tokens
        if self.kl_coef > 0:
            kl_T = KL_PENALTIES[self.kl_estimator](batch.reference_logprobs[index] - logprobs_T)
            loss = loss + self.kl_coef * kl_T.sum() / counts.tokens
            sums["kl_to_reference"] = kl_T.detach().sum()
        return LossOutput(loss=loss, sums=sums, maxima=output.maxima), logprobs_T.detach()

    def _skip(self, batch: _MiniBatch, logprobs: list[Tensor], loss: float, grad_norm: float) -> None:
        """Leave the weights alone, count, and give up when it keeps happening."""
        self._optimizer.zero_grad(set_to_none=True)
        self.nonfinite_updates += 1
        self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row < self.max_nonfinite_updates:
            return
        names = self._culprits(batch, logprobs)
        raise TrainingError(
            f"{self._nonfinite_in_a_row} optimizer steps in a row were not finite (loss {loss}, gradient norm "
            f"{grad_norm}); the weights are those of optimizer step {self.optimizer_steps}. Look at trajectories: "
            f"{', '.join(names[:MAX_NAMED])}{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}. "
            "Their log-probs or advantages are not finite, or their gradient overflowed (try a lower lr)."
        )

    @staticmethod
    def _culprits(batch: _MiniBatch, logprobs: list[Tensor]) -> list[str]:
        """The trajectories with a token that is not finite; all of them when only the gradient overflowed."""
        bad: set[int] = set()
        for part, logprobs_T in zip(batch.packs, logprobs, strict=True):
            finite_T = (logprobs_T + part.old_logprobs_T + part.advantages_T).isfinite()
            bad.update(part.trajectory_ids_T[~finite_T].tolist())
        everyone = {i for part in batch.packs for i in part.trajectory_ids_T.tolist()}
        return [batch.trajectory_names[i] for i in sorted(bad or everyone)]

    def _lr_at(self, optimizer_step: int) -> float:
        return self.lr * self.schedule(optimizer_step)

    def _batch_metrics(self, credited: Sequence[CreditedTrajectory], batches: list[_MiniBatch]) -> dict[str, float]:
        """How the batch was laid out; counts are per epoch."""
        packs = [part for batch in batches for part in batch.packs]
        sequence_tokens = sum(part.num_tokens for part in packs)
        segments = sum(len(part.lengths) for part in packs)
        steps = sum(int(part.step_ids_T.max()) + 1 for part in packs)
        return {
            "trajectories": float(len(credited)),
            "tokens": float(sum(item.trajectory.num_response_tokens for item in credited)),
            "tokens_trained": float(sum(part.num_trained for part in packs)),
            "tokens_computed": float(sequence_tokens),
            "segments": float(segments),
            "steps_per_segment": steps / segments if segments else 0.0,
            "packs": float(len(packs)),
            "packing_efficiency": sequence_tokens / (len(packs) * self.max_tokens_per_pack) if packs else 0.0,
        }
