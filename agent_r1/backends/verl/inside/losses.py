"""An algorithm's loss on verl's workers: what `Learner` computes for a pack, for a micro-batch of verl.

A worker is given a function with `set_loss_fn`. It gets the model's output and the columns of `rows.py`, flat over all
tokens of the micro-batch. Denominators are counts over the whole mini-batch, so shares add up over micro-batches and
workers. FSDP averages gradients over workers, so a share is multiplied by their number.

Metrics are sums and maxima, never means: the driver adds them up and divides once. Knows no verl.

Shape suffixes: N = tokens of a micro-batch, T = trained tokens of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_r1.backends.verl.inside.schedule import set_rate
from agent_r1.learn.batch.minibatch import Columns, RegularizedLoss
from agent_r1.learn.losses import Counts, LossOutput, value_loss

Metrics = dict[str, float]
SUM, MAX, SHARE = "sum/", "max/", "share/"  # how the driver joins a metric: see `Tally`
COUNTS = ("tokens", "steps", "trajectories")
POLICY_COLUMNS = ("old_logprobs_R", "advantages_R", "step_sizes_R", "trajectory_sizes_R", "importance_R")
POLICY_EXTRAS = ("reference_logprobs_R", "sampler_logprobs_R")  # sent if the run has them
VALUE_COLUMNS = ("values_R", "targets_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(RegularizedLoss):
    """Called by verl for every micro-batch of the policy."""

    def __call__(self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> tuple[Tensor, Metrics]:
        note_rate("policy", data)
        logprobs_N = flat(model_output["log_probs"]).float()
        chosen_N = flat(data["loss_mask"]).bool()
        columns = columns_of(data, chosen_N, (*POLICY_COLUMNS, *POLICY_EXTRAS))
        counts = Counts(**{name: int(data[f"count_{name}"]) for name in COUNTS})
        step_ids_T = torch.unique(flat(data["step_ids"])[chosen_N], return_inverse=True)[1]
        entropy_T = flat(model_output["entropy"]).float()[chosen_N] if "entropy" in model_output else None
        output = self.of(columns, logprobs_N[chosen_N], entropy_T, step_ids_T, counts)
        return _as_share(output, logprobs_N, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Called by verl for every micro-batch of the critic. Unlike in verl's own loss, targets may have gaps (NaN)."""

    clip: float | None

    def __call__(self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> tuple[Tensor, Metrics]:
        note_rate("critic", data)
        values_N = flat(model_output["values"]).float()
        chosen_N = flat(data["loss_mask"]).bool()
        old_T, targets_T = (flat(data[name])[chosen_N] for name in VALUE_COLUMNS)
        error = value_loss(values_N[chosen_N], old_T, targets_T, num_targets=int(data["count_targets"]), clip=self.clip)
        return _as_share(LossOutput(loss=error, shares={"value_loss": error.detach()}), values_N, data)


def _as_share(output: LossOutput, numbers_N: Tensor, data: Any) -> tuple[Tensor, Metrics]:
    """Return the loss to backpropagate, and the metrics by how they are reduced."""
    metrics = {f"{SUM}{name}": float(value) for name, value in output.sums.items()}
    metrics |= {f"{MAX}{name}": float(value) for name, value in output.maxima.items()}
    metrics |= {f"{SHARE}{name}": float(value) for name, value in output.shares.items()}
    metrics |= {f"{SHARE}loss": float(output.loss.detach()), f"{SUM}passes": 1.0}
    # Without a trained token the loss still needs a graph, so that every worker makes the same backward pass.
    return output.loss * int(data["dp_size"]) + 0.0 * numbers_N.sum(), metrics


def columns_of(data: Any, chosen_N: Tensor, names: tuple[str, ...]) -> Columns:
    return Columns(**{name: flat(data[name])[chosen_N] for name in names if name in data})


def flat(tensor: Tensor) -> Tensor:
    """The numbers of a nested tensor, row after row."""
    values: Tensor = tensor.values() if tensor.is_nested else tensor
    return values


def note_rate(role: str, data: Any) -> None:
    """The driver has the schedule: the learning rate of the step comes with its data."""
    set_rate(role, float(data["learning_rate"]))
