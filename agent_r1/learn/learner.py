"""The learner: credited trajectories in, one or more optimizer steps, metrics out.

It does not know which algorithm runs (the loss is a function it is given), where the trajectories came from, or how
weights are saved. One `update` is: mini-batches of whole trajectories, reshuffled from the second epoch on; for each of
them, gradients accumulated over its packs with one global denominator, then one AdamW step. A critic, if there is
one, is trained in the same passes at the tokens that have a value target. An optimizer step whose loss or gradient is
not finite is skipped and counted; several in a row are an error that names the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from agent_r1.errors import ConfigError, TrainingError, did_you_mean
from agent_r1.learn.batch.minibatch import (
    Columns,
    MiniBatch,
    columns_at,
    culprits,
    layout,
    mismatch_report,
    on_columns,
    prepare,
    reshuffle,
    with_own_logprobs,
)
from agent_r1.learn.batch.packs import Pack, column_with_gaps, merge_steps, nested, pack, split_evenly
from agent_r1.learn.batch.support import Supports, supports_of
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.credit import Values
from agent_r1.learn.losses import KL_PENALTIES, Correction, KLEstimator, LossInputs, LossOutput, value_loss
from agent_r1.learn.model.critic import Critic, value_report, with_last_state
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import Optimizer, Schedule, warmup
from agent_r1.learn.parallel import OneProcess
from agent_r1.learn.tally import Tally
from agent_r1.types import CreditedTrajectory, PerToken, Trajectory

MAX_NAMED = 8  # trajectories an error message lists
Outcome = Literal["taken", "nonfinite", "too_far"]  # of an optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTraining:
    """How a critic is trained."""

    critic: Critic
    lr: float
    value_clip: float | None  # how far from its old value a new one may help; None: no clip
    value_coef: float  # weight of the value loss beside the policy's; matters when the backbone is shared
    warmup_updates: int  # updates in which the critic alone is trained
    schedule: Schedule | None = None  # of its learning rate; None: the learner's


@dataclass(kw_only=True, eq=False, repr=False)
class Learner:
    """Trains one policy, and its critic if there is one."""

    policy: PolicyModel = field(kw_only=False)
    loss: Callable[[LossInputs], LossOutput]  # an algorithm's `loss`, or `supervised_loss`
    lr: float
    temperature: float  # of the sampler: the log-probs are those of the distribution it drew from
    betas: tuple[float, float]
    weight_decay: float  # of matrices; vectors (norms, biases) are never decayed
    max_grad_norm: float
    max_tokens_per_pack: int
    max_nonfinite_updates: int  # optimizer steps skipped in a row before giving up
    adam_eps: float = 1e-8  # torch's own default
    schedule: Schedule = field(default_factory=lambda: warmup(0))  # multiplies lr
    num_epochs: int = 1
    num_minibatches: int = 1
    seed: int = 0  # of the order of trajectories from the second epoch on
    target_kl: float | None = None  # KL per token to the old log-probs above which the rest of an update is dropped
    kl_coef: float = 0.0  # weight of the KL to `reference` in the loss
    kl_estimator: KLEstimator | None = None  # of that KL; None: there is none
    reference: PolicyModel | None = None  # for the KL, in the loss or (`kl_to_reference`) in the reward
    entropy_coef: float = 0.0
    own_old_logprobs: bool = False  # ratios to the learner's log-probs from before the update, not the sampler's
    correction: Correction | None = None  # implies that, and weights tokens by the disagreement
    critic: CriticTraining | None = None
    offload_optimizer: bool = False  # its state stays on the host between steps
    prefix_sharing: PrefixSharing = "off"
    ranks: OneProcess = field(default_factory=OneProcess)
    updates: int = field(default=0, init=False)
    nonfinite_updates: int = field(default=0, init=False)
    _nonfinite_in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._validate()
        shared: dict[str, Any] = {
            "betas": self.betas,
            "eps": self.adam_eps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "offload": self.offload_optimizer,
        }
        trained = [p for p in self.policy.model.parameters() if p.requires_grad]
        self._optimizer = Optimizer(trained, lr=self.lr, schedule=self.schedule, **shared)
        self._critic_optimizer = (
            Optimizer(
                self.critic.critic.parameters,
                lr=self.critic.lr,
                schedule=self.critic.schedule or self.schedule,
                **shared,
            )
            if self.critic is not None
            else None
        )

    def _validate(self) -> None:
        positive = ("lr", "temperature", "max_grad_norm", "max_tokens_per_pack", "num_epochs", "num_minibatches")
        for name in (*positive, "adam_eps", *(["target_kl"] if self.target_kl is not None else [])):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Learner.{name} must be positive, got {getattr(self, name)}")
        if self.target_kl is not None and self.num_epochs * self.num_minibatches == 1:
            raise ConfigError(
                f"target_kl={self.target_kl:g} has no effect with one update per batch: "
                "set num_epochs or num_minibatches above 1, or leave target_kl out"
            )
        for name in ("kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"Learner.{name} must not be negative, got {getattr(self, name)}")
        if self.kl_estimator is not None and self.kl_estimator not in KL_PENALTIES:
            raise ConfigError(
                f"unknown KL estimator {self.kl_estimator!r}.{did_you_mean(self.kl_estimator, KL_PENALTIES)}"
            )
        for name, part in (("reference model", self.reference), ("KL estimator", self.kl_estimator)):
            if self.kl_coef > 0 and part is None:
                raise ConfigError(f"kl_coef is {self.kl_coef} but the {name} is missing: a penalty needs both")

    @property
    def optimizer_steps(self) -> int:
        return self._optimizer.steps

    @property
    def is_warming_up(self) -> bool:
        """The critic alone is trained: its values do not yet deserve to move the policy."""
        return self.critic is not None and self.updates < self.critic.warmup_updates

    def update(self, credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
        """Train on these trajectories. With nothing to learn from, nothing changes and `empty_update` is 1."""
        self._note_targets(credited)
        parts = split_evenly(range(len(credited)), self.num_minibatches)
        batches = [self._with_old_logprobs(self._prepare(credited, part)) for part in parts]
        filled = [batch for batch in batches if batch.num_segments]
        planned = self._optimizer.planned + self.num_epochs * self.num_minibatches
        tally, skipped, dropped = Tally(), 0, 0
        for number, batch in enumerate(self._passes(credited, batches)):
            if not batch.num_segments:
                continue
            outcome = self._optimize(batch, tally)
            skipped += outcome == "nonfinite"
            if outcome == "too_far":
                dropped = self.num_epochs * len(parts) - number
                break
        for optimizer in self.optimizers:
            optimizer.planned = planned
        metrics = tally.metrics() if filled else {"loss": 0.0, "grad_norm": 0.0}
        metrics |= self._batch_metrics(credited, filled) | self._critic_metrics(credited)
        self.updates += bool(filled)
        if self.target_kl is not None:
            metrics["kl_dropped_updates"] = float(dropped)
        return metrics | {
            "lr": self._optimizer.lr,
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_updates": float(skipped),
            "nonfinite_updates": float(self.nonfinite_updates),
            "empty_update": float(not filled),
        }

    def rehearse(self, credited: Sequence[CreditedTrajectory]) -> int:
        """The passes of one optimizer step without the step: to have layers compiled, or to measure what it takes.
        Returns the tokens that were computed.

        Gradients are left behind, as in the middle of an update; `zero_grad` drops them. A policy that still waits for
        its critic takes part too, as it will later.
        """
        batch = self._with_old_logprobs(self._prepare(credited, range(len(credited))))
        for part in batch.packs:
            self._pack_loss(part, batch, critic_alone=False)[0].loss.backward()
        return sum(part.num_tokens for part in batch.packs)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[Values]:
        """What the critic says of every state in which a token was sampled, and of where truncated episodes stopped."""
        assert self.critic is not None  # whoever asks has built one
        extended = [with_last_state(trajectory) for trajectory in trajectories]
        values_R = self._ask(extended, self.critic.critic.values)
        if not bool(values_R.isfinite().all()):
            raise TrainingError(
                f"the critic gives values that are not finite after {self.updates} updates; try a lower critic.lr"
            )
        asked = nested(values_R, extended)
        steps = [len(trajectory.steps) for trajectory in trajectories]
        return [
            Values(per_token=rows[:count], bootstrap=rows[count][0] if len(rows) > count else None)
            for count, rows in zip(steps, asked, strict=True)
        ]

    @torch.no_grad()
    def kl_to_reference(self, trajectories: Sequence[Trajectory]) -> list[PerToken]:
        """log pi - log reference at every response token: the k1 estimate that a KL in the reward adds up.

        Both by the learner's own kernels: against the sampler's log-probs even equal policies would differ by noise.
        """
        assert self.reference is not None
        own, other = self._logprobs_of(self.policy), self._logprobs_of(self.reference)
        supports = supports_of(trajectories, temperature=self.temperature)
        return nested(self._ask(trajectories, lambda part: own(part) - other(part), supports), trajectories)

    def weights(self) -> Mapping[str, Tensor]:
        """For the engine: the weights by name, tied ones once."""
        return self.policy.weights()

    def state_dict(self) -> dict[str, Any]:
        """All but the weights of the policy. As usual in torch the tensors are live: save before the next update."""
        return {
            "adapter": self.policy.adapter_state(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
            "nonfinite_updates": self.nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "critic": self.critic.critic.state_dict() if self.critic is not None else None,
            "critic_optimizer": self._critic_optimizer.state_dict() if self._critic_optimizer is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_adapter_state(state.get("adapter"))  # states from before there were any have none
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        if (state["critic"] is None) != (self.critic is None):
            raise ConfigError(
                f"the saved state has {'no' if state['critic'] is None else 'a'} critic, this learner has "
                f"{'none' if self.critic is None else 'one'}: continue with the algorithm that was saved"
            )
        if self.critic is not None and self._critic_optimizer is not None:
            self.critic.critic.load_state_dict(state["critic"])
            self._critic_optimizer.load_state_dict(state["critic_optimizer"])

    def _ask(
        self, trajectories: Sequence[Trajectory], model: Callable[[Pack], Tensor], supports: Supports | None = None
    ) -> Tensor:
        """One number per response token, from a model that is not being trained right now."""
        device = self.policy.device
        packs = pack(
            merge_steps(trajectories),
            self.max_tokens_per_pack,
            prefix_sharing=self.prefix_sharing,
            device=device,
            supports=supports,
        )
        count = sum(trajectory.num_response_tokens for trajectory in trajectories)
        return on_columns(packs, model, torch.empty(count, device=device))

    def _passes(self, credited: Sequence[CreditedTrajectory], batches: Sequence[MiniBatch]) -> Iterator[MiniBatch]:
        """Yield the mini-batches of all epochs: in the given order first, then reshuffled, with the same old log-probs.

        The order is a function of the seed, the update and the epoch, so that resuming repeats it.
        """
        yield from batches
        known = Columns.join([batch.columns for batch in batches]) if len(batches) > 1 else None
        for epoch in range(1, self.num_epochs):
            if known is None:  # no other mini-batch to exchange trajectories with
                yield from batches
                continue
            order = reshuffle(credited, f"epoch:{self.seed}:{self.updates}:{epoch}")
            for part in split_evenly(order, self.num_minibatches):
                yield replace(self._prepare(credited, part), columns=columns_at(known, credited, part))

    def _prepare(self, credited: Sequence[CreditedTrajectory], positions: Sequence[int]) -> MiniBatch:
        """Pack the trajectories at these positions. A trajectory stays on one rank, which holds its columns."""
        everything = self.kl_coef > 0 or self.entropy_coef > 0
        chosen = [credited[position] for position in positions]
        return prepare(
            chosen,
            max_tokens=self.max_tokens_per_pack,
            device=self.policy.device,
            is_mine=lambda index: self.ranks.is_mine(positions[index]),
            keep_idle=everything or self.critic is not None,
            prefix_sharing=self.prefix_sharing,
            supports=supports_of([item.trajectory for item in chosen], temperature=self.temperature),
        )

    @torch.no_grad()
    def _with_old_logprobs(self, batch: MiniBatch) -> MiniBatch:
        """Add the log-probs of the current policy and of the reference, if they are needed."""
        if self.correction is not None or self.own_old_logprobs:
            batch = with_own_logprobs(batch, self._logprobs_of(self.policy), self.correction)
        if self.kl_coef > 0 and self.reference is not None:
            reference_R = on_columns(batch.packs, self._logprobs_of(self.reference), batch.columns.old_logprobs_R)
            batch = batch.with_columns(reference_logprobs_R=reference_R)
        return batch

    def _logprobs_of(self, model: PolicyModel) -> Callable[[Pack], Tensor]:
        return lambda part: model.logprobs(part, temperature=self.temperature)[0]

    def _optimize(self, batch: MiniBatch, tally: Tally) -> Outcome:
        """Take one optimizer step, unless loss or gradient is not finite or the policy has already moved too far."""
        optimizers = self._stepping(batch)
        self.zero_grad()
        outputs, logprobs = [], []
        for part in batch.packs:
            output, logprobs_T = self._pack_loss(part, batch, critic_alone=self.is_warming_up)
            output.loss.backward()
            outputs.append(output)
            logprobs.append(logprobs_T)
        for optimizer in optimizers.values():
            self.ranks.sum_gradients(optimizer.parameters)
        norms = {name: optimizer.clip() for name, optimizer in optimizers.items()}
        own = Tally.of(outputs, tokens=sum(part.num_trained for part in batch.packs), norms=norms)
        step = Tally.merged(self.ranks.gather(own))
        if not step.is_finite:
            self._skip(batch, logprobs, {"loss": step.loss, **step.norms})
            return "nonfinite"
        self._nonfinite_in_a_row = 0
        if self._is_too_far(step) and tally.steps:  # before the first step, the KL is only sampler-learner mismatch
            self.zero_grad()
            return "too_far"
        for optimizer in optimizers.values():
            optimizer.step()
        tally.add_step(step)
        return "taken"

    def _is_too_far(self, step: Tally) -> bool:
        """Whether the KL of the next mini-batch, over all ranks, is above `target_kl`."""
        if self.target_kl is None or self.is_warming_up:
            return False
        if "approx_kl" not in step.sums:
            raise ConfigError("target_kl needs a loss that reports approx_kl, such as one with a ratio")
        return step.sums["approx_kl"] > self.target_kl * step.tokens

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self._optimizer, *([] if self._critic_optimizer is None else [self._critic_optimizer])]

    def _stepping(self, batch: MiniBatch) -> dict[str, Optimizer]:
        """Those that take a step now, by the name under which the norm of their gradient is reported."""
        policy = {"grad_norm": self._optimizer} if self._moves_policy(batch) else {}
        critic = {} if self._critic_optimizer is None else {"critic_grad_norm": self._critic_optimizer}
        return policy | critic

    def _moves_policy(self, batch: MiniBatch) -> bool:
        """Whether the policy takes a step. Without anything to learn from, Adam's momentum alone would move it."""
        is_shared = self.critic is not None and self.critic.critic.shared
        learns = batch.has_advantages or is_shared or self.kl_coef > 0 or self.entropy_coef > 0
        return learns and not self.is_warming_up

    def _pack_loss(self, part: Pack, batch: MiniBatch, *, critic_alone: bool) -> tuple[LossOutput, Tensor]:
        """This pack's share of the loss of the optimizer step, and its log-probs for the post-mortem."""
        columns = batch.columns.at(part.columns_T)
        if critic_alone:
            return self._value_loss(part, columns, None, batch.num_targets), columns.old_logprobs_R
        hidden_TD = self.policy.hidden(part)
        output, logprobs_T = self._policy_loss(part, columns, hidden_TD, batch)
        if self.critic is not None:
            value = self._value_loss(part, columns, hidden_TD, batch.num_targets)
            shares = value.shares | {"policy_loss": output.loss.detach()}
            output = replace(output, loss=output.loss + value.loss, shares=shares)
        return output, logprobs_T.detach()

    def _policy_loss(
        self, part: Pack, columns: Columns, hidden_TD: Tensor, batch: MiniBatch
    ) -> tuple[LossOutput, Tensor]:
        logprobs_T, entropy_T = self.policy.score(
            hidden_TD, part, temperature=self.temperature, entropy_gradient=self.entropy_coef > 0
        )
        output = self.loss(columns.loss_inputs(logprobs_T, part.step_ids_T, batch.counts))
        loss, maxima = output.loss, output.maxima
        sums = output.sums | {"entropy": entropy_T.detach().sum()}
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * entropy_T.sum() / batch.counts.tokens
        if self.kl_coef > 0:
            assert columns.reference_logprobs_R is not None
            assert self.kl_estimator is not None
            kl_T = KL_PENALTIES[self.kl_estimator](logprobs_T, columns.reference_logprobs_R, columns.old_logprobs_R)
            # An estimate from what the sampler drew, so it is corrected like the loss. The entropy is no estimate.
            loss = loss + self.kl_coef * (columns.importance_R * kl_T).sum() / batch.counts.tokens
            sums["kl_to_reference"] = kl_T.detach().sum()
        if columns.sampler_logprobs_R is not None:
            more, most = mismatch_report(columns)
            sums, maxima = sums | more, maxima | most
        return LossOutput(loss=loss, sums=sums, maxima=maxima), logprobs_T

    def _value_loss(self, part: Pack, columns: Columns, hidden_TD: Tensor | None, num_targets: int) -> LossOutput:
        """Without the policy's hidden states the critic is trained alone: nothing that is the policy's may change."""
        assert self.critic is not None
        assert columns.values_R is not None
        assert columns.targets_R is not None
        error = value_loss(
            self.critic.critic.values(part, hidden_TD, head_only=hidden_TD is None),
            columns.values_R,
            columns.targets_R,
            num_targets=num_targets,
            clip=self.critic.value_clip,
        )
        error = error / self.critic.critic.unit**2
        return LossOutput(loss=self.critic.value_coef * error, shares={"value_loss": error.detach()})

    def _skip(self, batch: MiniBatch, logprobs: list[Tensor], seen: dict[str, float]) -> None:
        """Leave the weights alone, count, and give up when it keeps happening."""
        self.zero_grad()
        self.nonfinite_updates += 1
        self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row < self.max_nonfinite_updates:
            return
        found = [name for names in self.ranks.gather(culprits(batch, logprobs)) for name in names]
        names = found or batch.trajectory_names
        raise TrainingError(
            f"{self._nonfinite_in_a_row} optimizer steps in a row were not finite "
            f"({', '.join(f'{name} {value}' for name, value in seen.items())}); "
            f"the weights are those of optimizer step {self.optimizer_steps}. Look at trajectories: "
            f"{', '.join(names[:MAX_NAMED])}{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}. "
            "Their log-probs or advantages are not finite, or their gradient overflowed (try a lower lr)."
        )

    def _note_targets(self, credited: Sequence[CreditedTrajectory]) -> None:
        """Update the critic's statistics before training, so that the head keeps its unit during the update."""
        if self.critic is not None:
            targets_R = column_with_gaps([item.value_targets or [] for item in credited])
            self.critic.critic.note_targets(targets_R[targets_R.isfinite()])

    def _critic_metrics(self, credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
        report = value_report(credited)
        return report | {"critic_warming_up": float(self.is_warming_up)} if report else {}

    def _batch_metrics(self, credited: Sequence[CreditedTrajectory], batches: list[MiniBatch]) -> dict[str, float]:
        """How the batch was laid out, on all ranks together; counts are per epoch."""
        ranks = self.ranks.gather(layout([part for batch in batches for part in batch.packs]))
        total = {name: float(sum(one[name] for one in ranks)) for name in ranks[0]}
        steps, room = total.pop("steps"), total["packs"] * self.max_tokens_per_pack
        return total | {
            "trajectories": float(len(credited)),
            "tokens": float(sum(item.trajectory.num_response_tokens for item in credited)),
            "steps_per_segment": steps / total["segments"] if total["segments"] else 0.0,
            "packing_efficiency": total["tokens_computed"] / room if room else 0.0,
        }
