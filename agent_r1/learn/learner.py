"""The learner: credited trajectories in, one or more optimizer steps, metrics out.

It does not know which algorithm runs (the loss is a function it is given), where the trajectories came from, or how
weights are saved. One `update` splits the batch into mini-batches of whole trajectories, reshuffled from the second
epoch on. For each mini-batch, gradients accumulate over its packs with one global denominator, then AdamW takes one
step. A critic is trained in the same passes, at the tokens that have a value target. An optimizer step whose loss or
gradient is not finite is skipped and counted; several in a row raise an error that names the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from agent_r1.errors import ConfigError, TrainingError
from agent_r1.learn.batch.minibatch import (
    Columns,
    MiniBatch,
    RegularizedLoss,
    columns_at,
    culprits,
    layout,
    layout_metrics,
    prepare,
    reshuffle,
    share_out,
    with_own_logprobs,
)
from agent_r1.learn.batch.packs import Pack, merge_steps, nested, split_evenly
from agent_r1.learn.batch.support import Supports, supports_of
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.credit import Values
from agent_r1.learn.losses import Correction, KLEstimator, LossInputs, LossOutput
from agent_r1.learn.model.critic import Critic, value_report, with_last_state
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import Optimizer, Schedule, warmup
from agent_r1.learn.tally import Tally
from agent_r1.ranks.crew import OneProcess
from agent_r1.text import first_names
from agent_r1.types import ByRole, CreditedTrajectory, PerToken, Trajectory

NORMS = {"optimizer": "grad_norm", "critic_optimizer": "critic_grad_norm"}  # metric for the norm of its gradient
Outcome = Literal["taken", "nonfinite", "too_far"]  # how an optimizer step ended


@dataclass(kw_only=True, eq=False, repr=False)
class Learner:
    """Trains one policy, and a critic if the algorithm has one."""

    policy: PolicyModel = field(kw_only=False)
    loss: Callable[[LossInputs], LossOutput]  # an algorithm's `loss`, or `supervised_loss`
    lr: float
    temperature: ByRole  # the sampler's: log-probs must be those of the distribution that it drew from
    betas: tuple[float, float]
    weight_decay: float  # applies to matrices; vectors (norms, biases) are never decayed
    max_grad_norm: float
    max_tokens_per_pack: int
    max_nonfinite_updates: int  # optimizer steps skipped in a row before giving up
    adam_eps: float = 1e-8
    schedule: Schedule = field(default_factory=lambda: warmup(0))  # multiplies lr
    num_epochs: int = 1
    num_minibatches: int = 1
    seed: int = 0  # fixes the order of trajectories from the second epoch on
    target_kl: float | None = None  # KL per token to the old log-probs above which the rest of an update is dropped
    kl_coef: float = 0.0  # weight of the KL to `reference` in the loss
    kl_estimator: KLEstimator | None = None  # required with kl_coef
    reference: PolicyModel | None = None  # for the KL, in the loss or (`kl_to_reference`) in the reward
    entropy_coef: float = 0.0
    own_old_logprobs: bool = False  # ratios to the learner's log-probs from before the update, not the sampler's
    correction: Correction | None = None  # implies own_old_logprobs, and weights tokens by the disagreement
    critic: Critic | None = None
    offload_optimizer: bool = False  # its state stays on the host between steps
    eight_bit_optimizer: bool = False  # its state is kept in 8 bits between steps
    prefix_sharing: PrefixSharing = "off"
    ranks: OneProcess = field(default_factory=OneProcess)
    noted: dict[str, dict[str, PerToken]] = field(default_factory=dict, init=False)  # `NOTES` of the last update
    updates: int = field(default=0, init=False)
    nonfinite_updates: int = field(default=0, init=False)
    _nonfinite_in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and (self.reference is None or self.kl_estimator is None):
            raise ConfigError(f"kl_coef={self.kl_coef} needs a reference model and a KL estimator")
        if not self.policy.packs:
            if self.prefix_sharing == "on":
                name = type(self.policy.model).__name__
                raise ConfigError(f"{name} cannot be packed, so learner.prefix_sharing=on has no effect: leave it out")
            self.prefix_sharing = "off"
        if self.ranks.size > 1:
            mesh = init_device_mesh(self.policy.device.type, (self.ranks.size,))
            for model in self._models:
                model.shard(mesh)
        settings: dict[str, Any] = {"betas": self.betas, "eps": self.adam_eps, "weight_decay": self.weight_decay}
        settings |= {"offload": self.offload_optimizer, "eight_bit": self.eight_bit_optimizer}
        settings["max_grad_norm"] = self.max_grad_norm
        trained = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.optimizers = {"optimizer": Optimizer(trained, lr=self.lr, schedule=self.schedule, **settings)}
        if self.critic is not None:
            settings |= {"lr": self.critic.lr, "schedule": self.critic.schedule or self.schedule}
            self.optimizers["critic_optimizer"] = Optimizer(self.critic.parameters, **settings)

    @property
    def optimizer_steps(self) -> int:
        return self.optimizers["optimizer"].steps

    @property
    def is_warming_up(self) -> bool:
        """Only the critic is trained: its values are not yet good enough to move the policy."""
        return self.critic is not None and self.updates < self.critic.warmup_updates

    def update(self, credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
        """Train on these trajectories. If there is nothing to learn from, weights stay as they are and `empty_update`
        is 1."""
        if self.critic is not None:
            self.critic.note_targets(credited)
        parts = split_evenly(range(len(credited)), self.num_minibatches)
        batches = [self._with_old_logprobs(self._prepare(credited, part)) for part in parts]
        filled = [batch for batch in batches if batch.num_segments]
        planned = self.optimizers["optimizer"].planned + self.num_epochs * self.num_minibatches
        tally, skipped, dropped = Tally(), 0, 0
        self.noted = {}
        for number, batch in enumerate(self._passes(credited, batches)):
            if not batch.num_segments:
                continue
            outcome = self._optimize(batch, tally)
            self.noted |= batch.noted()
            skipped += outcome == "nonfinite"
            if outcome == "too_far":
                dropped = self.num_epochs * len(parts) - number
                break
        for optimizer in self.optimizers.values():
            optimizer.planned = planned
        metrics = tally.metrics() if filled else {"loss": 0.0, "grad_norm": 0.0}
        laid_out = layout([part for batch in filled for part in batch.packs])
        metrics |= layout_metrics(credited, self.ranks.gather(laid_out), self.max_tokens_per_pack)
        if report := value_report(credited):
            metrics |= report | {"critic_warming_up": float(self.is_warming_up)}
        self.updates += bool(filled)
        if self.target_kl is not None:
            metrics["kl_dropped_updates"] = float(dropped)
        return metrics | {
            "lr": self.optimizers["optimizer"].lr,
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_updates": float(skipped),
            "nonfinite_updates": float(self.nonfinite_updates),
            "empty_update": float(not filled),
        }

    def rehearse(self, credited: Sequence[CreditedTrajectory]) -> int:
        """Run only the passes of one optimizer step, to compile layers or measure memory; return the tokens computed.

        Every rank runs all packs. Gradients remain, as in the middle of an update; `zero_grad` drops them. The policy
        takes part even while only the critic is trained, because it will take part later.
        """
        batch = self._with_old_logprobs(self._prepare(credited, range(len(credited)), OneProcess()))
        for part in batch.packs:
            self._pack_loss(part, batch, critic_alone=False)[0].loss.backward()
        return sum(part.num_tokens for part in batch.packs)

    def release(self) -> None:
        """Free the weights that passes without a gradient gathered."""
        for model in self._models:
            model.release()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[Values]:
        """The critic's value before every sampled token, and of the states in which truncated episodes stopped."""
        assert self.critic is not None
        extended = [with_last_state(trajectory) for trajectory in trajectories]
        if not bool((values_R := self._query(extended, self.critic.values)).isfinite().all()):
            raise TrainingError(f"critic values are not finite after {self.updates} updates; try a lower critic.lr")
        values = nested(values_R, extended)
        return [
            Values(per_token=rows[:count], bootstrap=rows[count][0] if len(rows) > count else None)
            for count, rows in zip((len(each.steps) for each in trajectories), values, strict=True)
        ]

    @torch.no_grad()
    def kl_to_reference(self, trajectories: Sequence[Trajectory]) -> list[PerToken]:
        """log pi - log reference at every response token: the k1 estimate, which a KL in the reward sums up.

        Both come from the learner's kernels; compared with the sampler's log-probs, even equal policies would differ.
        """
        assert self.reference is not None
        own, other = self._logprobs_of(self.policy), self._logprobs_of(self.reference)
        supports = supports_of(trajectories, temperature=self.temperature)
        return nested(self._query(trajectories, lambda part: own(part) - other(part), supports), trajectories)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name for the engine, tied ones once. If the engine shares the base: only the adapters."""
        return self.policy.sampler_weights()

    def state_dict(self) -> dict[str, Any]:
        """Everything except the policy's weights. As usual in torch, tensors are live: save before the next update."""
        return {
            "adapter": self.policy.adapter_state(),
            "updates": self.updates,
            "nonfinite_updates": self.nonfinite_updates,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "critic": self.critic.state_dict() if self.critic is not None else None,
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_adapter_state(state.get("adapter"))  # older states do not have it
        self.updates = state["updates"]
        self.nonfinite_updates = state["nonfinite_updates"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        if (state["critic"] is None) != (self.critic is None):
            raise ConfigError("only one of saved state and learner has a critic: continue with the saved algorithm")
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])

    @property
    def _packing(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens_per_pack if self.policy.packs else 1,  # 1: a pack for every segment
            "device": self.policy.device,
            "prefix_sharing": self.prefix_sharing,
            "pictures": self.policy.pictures,
        }

    def _query(
        self, trajectories: Sequence[Trajectory], model: Callable[[Pack], Tensor], supports: Supports | None = None
    ) -> Tensor:
        """One number per response token, computed without a gradient."""
        rows, segments = [trajectory.row_id for trajectory in trajectories], merge_steps(trajectories)
        share = share_out(segments, rows, self.ranks, supports=supports, **self._packing)
        empty_R = torch.empty(sum(t.num_response_tokens for t in trajectories), device=self.policy.device)
        column_R = share.column(model, empty_R)
        self.release()
        return column_R

    def _passes(self, credited: Sequence[CreditedTrajectory], batches: Sequence[MiniBatch]) -> Iterator[MiniBatch]:
        """Yield the mini-batches of all epochs: in the given order first, then in an order that is a function of seed,
        update and epoch, so that resuming repeats it. The old log-probs stay the same."""
        yield from batches
        known = Columns.join([batch.columns for batch in batches]) if len(batches) > 1 else None
        for epoch in range(1, self.num_epochs):
            if known is None:  # no other mini-batch to exchange trajectories with
                yield from batches
                continue
            order = reshuffle(credited, f"epoch:{self.seed}:{self.updates}:{epoch}")
            for part in split_evenly(order, self.num_minibatches):
                yield replace(self._prepare(credited, part), columns=columns_at(known, credited, part))

    def _prepare(
        self, credited: Sequence[CreditedTrajectory], positions: Sequence[int], ranks: OneProcess | None = None
    ) -> MiniBatch:
        """Pack this rank's share of the trajectories at these positions."""
        chosen = [credited[position] for position in positions]
        return prepare(
            chosen,
            ranks=ranks or self.ranks,
            keep_idle=self._regularizes or self.critic is not None,
            supports=supports_of([item.trajectory for item in chosen], temperature=self.temperature),
            **self._packing,
        )

    @torch.no_grad()
    def _with_old_logprobs(self, batch: MiniBatch) -> MiniBatch:
        """Add the log-probs of the current policy and of the reference, if they are needed."""
        if self.correction is not None or self.own_old_logprobs:
            batch = with_own_logprobs(batch, self._logprobs_of(self.policy), self.correction)
        if self.kl_coef > 0 and self.reference is not None:
            reference_R = batch.share.column(self._logprobs_of(self.reference), batch.columns.old_logprobs_R)
            batch = batch.with_columns(reference_logprobs_R=reference_R)
        self.release()
        return batch

    def _logprobs_of(self, model: PolicyModel) -> Callable[[Pack], Tensor]:
        return lambda part: model.logprobs(part, temperature=self.temperature)[0]

    def _optimize(self, batch: MiniBatch, tally: Tally) -> Outcome:
        """Take one optimizer step, unless loss or gradient is not finite or the policy has already moved too far."""
        optimizers = self._active_optimizers(batch)
        self.zero_grad()
        outputs, logprobs = [], []
        for part in batch.packs:
            output, logprobs_T = self._pack_loss(part, batch, critic_alone=self.is_warming_up)
            output.loss.backward()
            outputs.append(output)
            logprobs.append(logprobs_T)
        for part in batch.share.fillers:
            self._filler_loss(part, critic_alone=self.is_warming_up).backward()
        norms = {name: optimizer.clip() for name, optimizer in optimizers.items()}
        own = Tally.of(outputs, tokens=sum(part.num_trained for part in batch.packs), norms=norms)
        step = Tally.merge(self.ranks.gather(own))
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
        """Whether the KL of this mini-batch, over all ranks, is above `target_kl`."""
        if self.target_kl is None or self.is_warming_up:
            return False
        if "approx_kl" not in step.sums:
            raise ConfigError("target_kl needs a loss that reports approx_kl, such as one with a ratio")
        return step.sums["approx_kl"] > self.target_kl * step.tokens

    @property
    def _models(self) -> list[PolicyModel | Critic]:
        return [model for model in (self.policy, self.reference, self.critic) if model is not None]

    @property
    def _regularizes(self) -> bool:
        return self.kl_coef > 0 or self.entropy_coef > 0  # whether the loss depends on more than advantages

    def _active_optimizers(self, batch: MiniBatch) -> dict[str, Optimizer]:
        """The optimizers that take a step now, by the metric for the norm of their gradient. The policy's is left out
        if there is nothing to learn from: Adam's momentum alone would move the weights."""
        is_shared = self.critic is not None and self.critic.shared
        moves_policy = (batch.has_advantages or is_shared or self._regularizes) and not self.is_warming_up
        active = {NORMS[name]: optimizer for name, optimizer in self.optimizers.items()}
        return {name: active[name] for name in active if moves_policy or name != "grad_norm"}

    def _pack_loss(self, part: Pack, batch: MiniBatch, *, critic_alone: bool) -> tuple[LossOutput, Tensor]:
        """This pack's share of the loss, and its log-probs to find the culprit if it is not finite."""
        columns = batch.columns.at(part.columns_T)
        if critic_alone:
            assert self.critic is not None
            return self.critic.loss(part, columns, None, batch.num_targets), columns.old_logprobs_R
        hidden_TD = self.policy.hidden(part)
        output, logprobs_T = self._policy_loss(part, columns, hidden_TD, batch)
        if self.critic is not None:
            value = self.critic.loss(part, columns, hidden_TD, batch.num_targets)
            shares = value.shares | {"policy_loss": output.loss.detach()}
            output = replace(output, loss=output.loss + value.loss, shares=shares)
        return output, logprobs_T.detach()

    def _filler_loss(self, part: Pack, *, critic_alone: bool) -> Tensor:
        """Return 0, computed from everything that a pack's loss depends on, in the same order."""
        hidden_TD = None if critic_alone else self.policy.hidden(part)
        numbers = [] if hidden_TD is None else [self.policy.score(hidden_TD, part, temperature=self.temperature)[0]]
        numbers += [] if self.critic is None else [self.critic.values(part, hidden_TD, head_only=critic_alone)]
        return 0.0 * torch.cat(numbers).sum()

    def _policy_loss(
        self, part: Pack, columns: Columns, hidden_TD: Tensor, batch: MiniBatch
    ) -> tuple[LossOutput, Tensor]:
        logprobs_T, entropy_T = self.policy.score(
            hidden_TD, part, temperature=self.temperature, entropy_gradient=self.entropy_coef > 0
        )
        batch.note(part.columns_T, ratios=(logprobs_T - columns.old_logprobs_R).exp(), entropies=entropy_T)
        loss = RegularizedLoss(
            loss=self.loss, kl_coef=self.kl_coef, kl_estimator=self.kl_estimator, entropy_coef=self.entropy_coef
        )
        return loss.of(columns, logprobs_T, entropy_T, part.step_ids_T, batch.counts), logprobs_T

    def _skip(self, batch: MiniBatch, logprobs: list[Tensor], seen: dict[str, float]) -> None:
        """Leave the weights alone and count. Raise after too many in a row."""
        self.zero_grad()
        self.nonfinite_updates += 1
        self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row < self.max_nonfinite_updates:
            return
        found = [name for names in self.ranks.gather(culprits(batch, logprobs)) for name in names]
        numbers = ", ".join(f"{name} {value}" for name, value in seen.items())
        raise TrainingError(
            f"{self._nonfinite_in_a_row} optimizer steps in a row were not finite ({numbers}). Check trajectories "
            f"{first_names(found or batch.trajectory_names)}, or try a lower lr. The weights are those of optimizer "
            f"step {self.optimizer_steps}."
        )
