"""`Learner` over verl's worker groups: the same update, whose passes and optimizer steps run on verl's workers.

Everything that decides what an update means is inherited: mini-batches of whole trajectories, epochs, old log-probs,
corrections, the critic's warm-up, skipped steps, metrics. Here rows are sent instead of packs being computed, one call
per optimizer step, so that the driver knows the outcome of a step before it plans the next.

A segment on which nothing is trained is not sent, where verl's own trainer would compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from agent_r1.backends.verl.inside.losses import COUNTS, MAX, POLICY_COLUMNS, POLICY_EXTRAS, SHARE, SUM, VALUE_COLUMNS
from agent_r1.backends.verl.rows import RowBatch
from agent_r1.learn.batch.minibatch import MiniBatch, Share, share_out
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.learn.batch.support import Supports
from agent_r1.learn.learner import Learner, Outcome
from agent_r1.learn.losses import ratio_report
from agent_r1.learn.optimizer import Schedule
from agent_r1.learn.tally import Tally
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import CreditedTrajectory, Trajectory
from agent_r1.vision.picture_format import PictureFormat

Rows = dict[str, list[Tensor]]  # by name: one tensor per row
Extras = dict[str, Any]  # numbers for the whole batch, by name
Found = dict[str, list[float]]  # values of each metric in a call, from all micro-batches of all workers
Ask = Callable[[RowBatch], Tensor]  # one number per token of all rows


class Workers(Protocol):
    """The processes that hold policy, reference and critic; see `workers.py`. Queries return one number per token."""

    size: int  # number of shares of a batch

    def logprobs(self, rows: Rows, extras: Extras) -> Tensor: ...
    def reference_logprobs(self, rows: Rows, extras: Extras) -> Tensor: ...
    def values(self, rows: Rows, extras: Extras) -> Tensor: ...
    def update_policy(self, rows: Rows, extras: Extras) -> Found: ...
    def update_critic(self, rows: Rows, extras: Extras) -> Found: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare(Share):
    """All rows of a mini-batch: the driver is the only rank, and the workers compute."""

    workers: int

    def column(self, model: Any, like_R: Tensor) -> Tensor:
        """`model` is an `Ask`: all rows are computed in one call."""
        rows = RowBatch.of(self.packs, self.workers)
        return rows.gather(model(rows), like_R) if self.packs else torch.full_like(like_R, float("nan"))


@dataclass(kw_only=True)
class RemoteModel:
    """Stands for a model that the workers hold."""

    packs: bool = False  # every segment is a row of its own
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # device of the driver's data
    pictures: PictureFormat | None = None  # verl runs are for text only

    def release(self) -> None:
        """Workers manage their own memory."""


@dataclass(kw_only=True)
class RemoteCritic(RemoteModel):
    values: Ask
    lr: float
    schedule: Schedule
    value_clip: float | None
    warmup_updates: int
    shared: bool = False

    def note_targets(self, credited: Sequence[CreditedTrajectory]) -> None:
        """Only normalised returns need them, which verl cannot do."""


@dataclass(kw_only=True)
class RemoteOptimizer:
    """Counts the steps of an optimizer on the workers, and decides their learning rates."""

    base_lr: float
    schedule: Schedule
    steps: int = 0
    planned: int = 0
    lr: float = 0.0  # learning rate of the last step

    def next_rate(self) -> float:
        return self.base_lr * self.schedule(self.steps + 1, self.planned + 1)

    def count(self, rate: float) -> None:
        self.steps, self.planned, self.lr = self.steps + 1, self.planned + 1, rate

    def zero_grad(self) -> None:
        """The workers drop gradients after every step."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "planned": self.planned, "lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.planned, self.lr = state["steps"], state["planned"], state["lr"]


@dataclass(kw_only=True, eq=False, repr=False)
class VerlLearner(Learner):
    """Trains one policy on verl's workers, and a critic if the algorithm has one."""

    workers: Workers
    _passes_made: float = field(default=0.0, init=False)  # passes of all workers in the last update
    _tokens_sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        optimizers: Any = {"optimizer": RemoteOptimizer(base_lr=self.lr, schedule=self.schedule)}
        if self.critic is not None:
            schedule = self.critic.schedule or self.schedule
            optimizers["critic_optimizer"] = RemoteOptimizer(base_lr=self.critic.lr, schedule=schedule)
        self.optimizers = optimizers

    def update(self, credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
        self._passes_made, self._tokens_sent = 0.0, 0
        metrics = super().update(credited)
        # A pack is a micro-batch of verl, which may hold up to max_tokens_per_pack tokens.
        room = self._passes_made * self.max_tokens_per_pack
        efficiency = self._tokens_sent / room if room else 0.0
        return metrics | {"packs": self._passes_made / self.num_epochs, "packing_efficiency": efficiency}

    def weights(self) -> Mapping[str, Tensor]:
        """The workers hand their weights to the rollout servers themselves."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights and moments, which verl saves."""
        return {
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "updates": self.updates,
            "nonfinite_updates": self.nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
        self.updates = state["updates"]
        self.nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]

    def _query(self, trajectories: Sequence[Trajectory], model: Any, supports: Supports | None = None) -> Tensor:
        names = [trajectory.row_id for trajectory in trajectories]
        share = share_out(merge_steps(trajectories), names, self.ranks, supports=supports, **self._packing)
        return self._on_workers(share).column(model, torch.empty(sum(t.num_response_tokens for t in trajectories)))

    def _prepare(
        self, credited: Sequence[CreditedTrajectory], positions: Sequence[int], ranks: OneProcess | None = None
    ) -> MiniBatch:
        batch = super()._prepare(credited, positions, ranks)
        return replace(batch, share=self._on_workers(batch.share))

    def _on_workers(self, share: Share) -> RowShare:
        return RowShare(packs=share.packs, fillers=[], ranks=share.ranks, workers=self.workers.size)

    def _logprobs_of(self, model: Any) -> Any:
        ask = self.workers.logprobs if model is self.policy else self.workers.reference_logprobs
        return lambda rows: ask(rows.token_columns(), {"temperature": self.temperature})

    def _optimize(self, batch: MiniBatch, tally: Tally) -> Outcome:
        """Take one optimizer step on the workers, unless it is known to be useless or the policy has moved too far."""
        optimizers = self._active_optimizers(batch)
        old = [batch.columns.at(part.columns_T).old_logprobs_R for part in batch.packs]
        if not self._is_trainable(batch):
            self._skip(batch, old, {"loss": math.nan})
            return "nonfinite"
        if tally.steps and self.target_kl is not None and self._is_too_far(self._distance(batch)):
            return "too_far"
        rows = RowBatch.of(batch.packs, self.workers.size)
        step = self._send(rows, batch, optimizers)
        if not step.is_finite:
            self._skip(batch, old, {"loss": step.loss, **step.norms})
            return "nonfinite"
        self._nonfinite_in_a_row = 0
        tally.add_step(step)
        return "taken"

    def _send(self, rows: RowBatch, batch: MiniBatch, optimizers: Mapping[str, Any]) -> Tally:
        """Have every active optimizer take its step, and return what the passes found."""
        step = Tally(tokens=sum(part.num_trained for part in batch.packs), step_sums={"loss": 0.0})
        updates = {
            "critic_grad_norm": (self.workers.update_critic, VALUE_COLUMNS),
            "grad_norm": (self.workers.update_policy, (*POLICY_COLUMNS, *POLICY_EXTRAS)),
        }
        for name, (update, wanted) in updates.items():
            if name not in optimizers or not step.is_finite:
                continue
            rate = optimizers[name].next_rate()
            columns = {each: found for each in wanted if (found := getattr(batch.columns, each)) is not None}
            sent = rows.token_columns() | rows.spread(columns) | {"step_ids": rows.step_ids()}
            found = update(sent, self._extras(batch, rate))
            self._include(step, found, name)
            self._tokens_sent += rows.num_tokens
            if step.is_finite:
                optimizers[name].count(rate)
        return step

    def _extras(self, batch: MiniBatch, rate: float) -> Extras:
        counts = {f"count_{name}": getattr(batch.counts, name) for name in COUNTS}
        return {
            **counts,
            "count_targets": max(1, batch.num_targets),
            "temperature": self.temperature,
            "learning_rate": rate,
        }

    def _include(self, step: Tally, found: Found, norm: str) -> None:
        """Add what one call found to the step, as `Learner` adds up its packs."""
        for name, values in found.items():
            if name.startswith(SUM):
                step.sums[name.removeprefix(SUM)] = sum(values)
            elif name.startswith(MAX):
                step.maxima[name.removeprefix(MAX)] = max(values)
            elif name.startswith(SHARE) and name != f"{SHARE}loss":
                step.step_sums[name.removeprefix(SHARE)] = sum(values)
        loss = sum(found[f"{SHARE}loss"])
        if self.critic is not None and norm == "grad_norm":
            step.step_sums["policy_loss"] = loss
        step.step_sums["loss"] += loss
        step.norms[norm] = found["grad_norm"][0]
        self._passes_made += step.sums.pop("passes")

    def _is_trainable(self, batch: MiniBatch) -> bool:
        """Whether all numbers in the loss are finite. The workers check the gradient."""
        index = torch.cat([part.columns_T for part in batch.packs])
        columns = batch.columns.at(index)
        return bool((columns.advantages_R + columns.old_logprobs_R + columns.importance_R).isfinite().all())

    def _distance(self, batch: MiniBatch) -> Tally:
        """Return how far the policy has moved since it sampled. Makes a separate pass, because verl's passes end in a
        step."""
        new_R = batch.share.column(self._logprobs_of(self.policy), batch.columns.old_logprobs_R)
        index = torch.cat([part.columns_T for part in batch.packs])
        sums, _ = ratio_report(new_R[index] - batch.columns.old_logprobs_R[index])
        return Tally(tokens=len(index), sums={name: float(value) for name, value in sums.items()})
