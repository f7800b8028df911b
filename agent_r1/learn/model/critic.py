"""The critic: the value of the state before each response token, as a linear head on hidden states.

With its own backbone it is a second model, trained separately from the policy. If it shares the policy's backbone, it
reads the policy's hidden states, and its gradient also changes the policy's body. Knows packs and models; knows no
rewards and no advantages.

With `normalize_returns` the head predicts in units of the targets seen so far: V = mean + std * head. The size of the
value loss and of the head's weights then does not depend on the unit of the rewards.

Shape suffixes: T = trained tokens of a pack, D = hidden size, N = any set of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from agent_r1.errors import ConfigError
from agent_r1.learn.batch.minibatch import Columns
from agent_r1.learn.batch.packs import Pack, column, column_with_gaps
from agent_r1.learn.losses import LossOutput, value_loss
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.model.sharding import onto, shard_linear
from agent_r1.learn.optimizer import Schedule
from agent_r1.learn.rewards import RunningMoments
from agent_r1.types import CreditedTrajectory, Step, Trajectory


@dataclass(kw_only=True, eq=False)
class Critic:
    """A value model, and how it is trained."""

    policy: InitVar[PolicyModel]  # shared, or copied to be the backbone
    shared: bool
    lr: float
    value_clip: float | None  # distance from the old value within which a new one may lower the loss; None: no clip
    value_coef: float  # weight of the value loss beside the policy's; matters when the backbone is shared
    warmup_updates: int  # updates in which only the critic is trained
    schedule: Schedule | None = None  # schedule of the learning rate; None: the learner's
    normalize_returns: bool = False

    def __post_init__(self, policy: PolicyModel) -> None:
        self.returns = RunningMoments() if self.normalize_returns else None  # of all value targets so far
        self.backbone = policy if self.shared else policy.copy()
        self.head = nn.Linear(policy.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)  # start with V = 0 everywhere, not with noise
        nn.init.zeros_(self.head.bias)

    def shard(self, mesh: DeviceMesh) -> None:
        self.backbone.shard(mesh)
        shard_linear(self.head, mesh)

    def release(self) -> None:
        self.backbone.release()

    @property
    def _unit(self) -> float:
        """One unit of the head's output, in units of returns."""
        return 1.0 if self.returns is None else self.returns.std(correction=0)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters it does not share with the policy."""
        return [*self.head.parameters(), *([] if self.shared else self.backbone.body_parameters())]

    def values(self, pack: Pack, policy_hidden_TD: Tensor | None = None, *, head_only: bool = False) -> Tensor:
        """[T] in fp32, in units of returns. A shared critic reuses `policy_hidden_TD` if given.

        `head_only` keeps the gradient out of a shared body, which belongs to the policy.
        """
        body_learns = torch.is_grad_enabled() and not (head_only and self.shared)
        with torch.set_grad_enabled(body_learns):
            hidden_TD = policy_hidden_TD if self.shared and policy_hidden_TD is not None else self.backbone.hidden(pack)
        values_T: Tensor = self.head((hidden_TD if body_learns else hidden_TD.detach()).float())[:, 0]
        return values_T if self.returns is None else self.returns.mean + self._unit * values_T

    def loss(self, pack: Pack, columns: Columns, policy_hidden_TD: Tensor | None, num_targets: int) -> LossOutput:
        """This pack's share of the value loss. Without the policy's hidden states, the policy gets no gradient."""
        assert columns.values_R is not None
        assert columns.targets_R is not None
        error = value_loss(
            self.values(pack, policy_hidden_TD, head_only=policy_hidden_TD is None),
            columns.values_R,
            columns.targets_R,
            num_targets=num_targets,
            clip=self.value_clip,
        )
        error = error / self._unit**2
        return LossOutput(loss=self.value_coef * error, shares={"value_loss": error.detach()})

    @torch.no_grad()
    def note_targets(self, credited: Sequence[CreditedTrajectory]) -> None:
        """Update mean and std before training, so that the head keeps its unit during the update. The head is rescaled
        so that no value changes (PopArt, arXiv:1602.07714): a value clip compares with earlier values."""
        if self.returns is None:
            return
        targets_R = column_with_gaps([item.value_targets or [] for item in credited])
        mean, unit = self.returns.mean, self._unit
        self.returns.add(targets_R[targets_R.isfinite()].tolist())
        self.head.weight.mul_(unit / self._unit)
        self.head.bias.mul_(unit).add_(mean - self.returns.mean).div_(self._unit)

    def state_dict(self) -> dict[str, Any]:
        own = {} if self.shared else {"backbone": self.backbone.trained_state()}
        returns = None if self.returns is None else asdict(self.returns)
        return {"head": self.head.state_dict(), "returns": returns, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.head.state_dict()
        self.head.load_state_dict({name: onto(state["head"][name], own[name]) for name in own})
        saved = state.get("returns")  # older checkpoints do not have it
        if (saved is None) != (self.returns is None):
            raise ConfigError("critic.normalize_returns differs from the saved run: keep the saved value")
        self.returns = None if saved is None else RunningMoments(**saved)
        if not self.shared:
            self.backbone.load_trained_state(state["backbone"])


def with_last_state(trajectory: Trajectory) -> Trajectory:
    """Add a step for the state a truncated trajectory would have continued from, if known.

    Its single token is never trained on; the critic's value before it completes the truncated return.
    """
    if not (trajectory.stop.is_truncated and trajectory.next_prompt_ids):
        return trajectory
    last = Step(
        prompt_ids=trajectory.next_prompt_ids,
        response_ids=[0],
        response_logprobs=[0.0],
        pictures=trajectory.next_pictures,
    )
    return replace(trajectory, steps=[*trajectory.steps, last])


def value_report(credited: Sequence[CreditedTrajectory]) -> dict[str, float]:
    """Metrics of the values that this batch's advantages were computed with; empty without a critic."""
    values_R = column([item.values or [] for item in credited])
    targets_R = column_with_gaps([item.value_targets or [] for item in credited])
    has_target_R = ~targets_R.isnan()
    if not bool(has_target_R.any()):
        return {}
    return {
        "explained_variance": explained_variance(values_R[has_target_R], targets_R[has_target_R]),
        "value_mean": float(values_R[has_target_R].mean()),
        "value_target_mean": float(targets_R[has_target_R].mean()),
    }


def explained_variance(values_N: Tensor, targets_N: Tensor) -> float:
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that predicts the mean. 0 if all targets are
    equal."""
    if targets_N.numel() < 2:
        return 0.0
    values_N, targets_N = values_N.double(), targets_N.double()
    variance = float(targets_N.var())
    return 1.0 - float((targets_N - values_N).var()) / variance if variance > 1e-12 else 0.0
