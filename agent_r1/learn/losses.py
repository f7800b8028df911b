"""Losses: pure functions of per-token tensors.

Building blocks first, each checkable by hand; `token_clip` and the functions after it combine them into the `loss`
column of the algorithm table. Their keyword arguments are settings.

Every loss is a weighted sum over tokens, with weights from counts over the whole optimizer step, all packs and ranks
together. So the shares of any split add up to the same loss, and packing, micro-batching and data parallelism cannot
change the gradient. Nothing here knows models, packs or which algorithm runs.

Shape suffixes: T = trained (response) tokens of one pack, S = steps of one pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in fp32; beyond it one stale token could turn the loss into inf

KLEstimator = Literal["k1", "k2", "k3", "k3+", "k1_weighted", "k3_weighted"]
Aggregation = Literal["token", "step", "trajectory", "constant"]
Share = Annotated[float, Field(ge=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one optimizer step over all packs and ranks: the denominators."""

    tokens: int
    steps: int  # steps with at least one response token
    trajectories: int  # trajectories with at least one response token


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of one pack. All tokens of a step are in the same pack; the tokens of a trajectory may be in
    several."""

    logprobs_T: Tensor  # under the policy being trained; the only one that carries a gradient
    old_logprobs_T: Tensor  # under the policy that sampled
    advantages_T: Tensor
    importance_T: Tensor  # corrects for the disagreement of sampler and learner; 1 without correction
    step_ids_T: Tensor  # 0, 1, 2 ... over the steps of this pack
    step_sizes_T: Tensor  # the number of tokens of the token's step
    trajectory_sizes_T: Tensor  # the number of tokens of its trajectory, over all packs
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A share of the loss, with its metrics."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)  # sums over tokens; added up, then divided by their count
    maxima: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)  # shares of means over the optimizer step; added up


def token_weights(inputs: LossInputs, *, aggregation: Aggregation, horizon: int) -> Tensor:
    """The weight of each token in the loss.

    token        the mean over all response tokens (DAPO)
    step         every step weighs the same, whatever its length
    trajectory   every trajectory weighs the same, so that a long failure does not outweigh short successes (GRPO)
    constant     a sum over tokens, divided by trajectories * horizon, which does not depend on lengths (Dr.GRPO)
    """
    counts = inputs.counts
    ones_T = torch.ones_like(inputs.advantages_T)
    weights: dict[str, Callable[[], Tensor]] = {
        "token": lambda: ones_T / counts.tokens,
        "step": lambda: ones_T / (counts.steps * inputs.step_sizes_T),
        "trajectory": lambda: ones_T / (counts.trajectories * inputs.trajectory_sizes_T),
        "constant": lambda: ones_T / (counts.trajectories * horizon),
    }
    return weights[aggregation]() * inputs.importance_T


def clipped_surrogate(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossOutput:
    """PPO-clip (arXiv:1707.06347, eq. 7), per token.

    With `clip_high > clip_low` this is DAPO's clip-higher (arXiv:2503.14476). `dual_clip` bounds the loss at tokens of
    negative advantage, which otherwise grows with the ratio without limit (arXiv:1912.09729).
    """
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    # min, not clip alone: clipping must never make a bad update look better than it is.
    objective_T = (ratio_T * advantages_T).minimum(clipped_T * advantages_T)
    # The clip is active where it stops the gradient: outside the range, on the side the advantage pushes towards.
    stopped_T = ((ratio_T > 1 + clip_high) & (advantages_T > 0)) | ((ratio_T < 1 - clip_low) & (advantages_T < 0))
    sums = {"clip_fraction": stopped_T.sum()}
    if dual_clip is not None:
        floor_T = dual_clip * advantages_T
        bounded_T = (advantages_T < 0) & (objective_T < floor_T)
        objective_T = torch.where(advantages_T < 0, objective_T.maximum(floor_T), objective_T)
        sums["dual_clip_fraction"] = bounded_T.sum()
    return _reported(-(weights_T * objective_T).sum(), log_ratio_T, sums)


def step_log_ratio(log_ratio_T: Tensor, step_ids_T: Tensor, step_sizes_T: Tensor) -> Tensor:
    """The mean log-ratio of a step, at each of its tokens: its exp is the length-normalised ratio of the whole
    response (GSPO, arXiv:2507.18071; StepPO, arXiv:2604.18401).

    The mean sets the value; each token carries its own gradient (GSPO-token, eq. 14). With equal weights in a step this
    is the gradient of the mean. With weights per token, a token of weight 0 gets gradient 0; through the mean, every
    token would get the step's average weight instead.
    """
    own_T = log_ratio_T.detach()
    return _step_sums(own_T, step_ids_T) / step_sizes_T + log_ratio_T - own_T


def _step_sums(values_T: Tensor, step_ids_T: Tensor) -> Tensor:
    """The sum over each step, at each of its tokens."""
    sums_S = torch.zeros_like(values_T).index_add(0, step_ids_T, values_T)  # there are at most as many steps as tokens
    return sums_S[step_ids_T]


def weighted_likelihood(logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor) -> Tensor:
    """REINFORCE: minus the advantage-weighted log-likelihood."""
    return -(weights_T * advantages_T * logprobs_T).sum()


def value_loss(
    values_T: Tensor, old_values_T: Tensor, targets_T: Tensor, *, num_targets: int, clip: float | None
) -> Tensor:
    """Half the squared error of a critic, over the tokens that have a target (NaN: none).

    With `clip`, the new value may help only within that distance of the old one (PPO's value clipping): the larger of
    the two errors counts.
    """
    has_target_T = ~targets_T.isnan()
    # Not by indexing, which would wait for the device to count targets. Without a target, the error becomes 0.
    own_T = values_T.detach()
    old_values_T = torch.where(has_target_T, old_values_T, own_T)
    targets_T = torch.where(has_target_T, targets_T, own_T)
    error_T = (values_T - targets_T).square()
    if clip is not None:
        near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
        error_T = error_T.maximum((near_T - targets_T).square())
    return 0.5 * error_T.sum() / max(1, num_targets)


def ratio_report(log_ratio_T: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima that every loss reports: how far the policy is from the one that drew the samples."""
    log_ratio_T = log_ratio_T.detach()
    sums = {"approx_kl": kl_k3(log_ratio_T).sum()}
    if log_ratio_T.numel() == 0:  # torch has no maximum of nothing
        return sums, {}
    ratio_max = log_ratio_T.max().clamp(max=MAX_LOG_RATIO).exp()
    return sums, {"ratio_max": ratio_max, "log_ratio_max": log_ratio_T.abs().max()}


def _reported(loss: Tensor, log_ratio_T: Tensor, more: dict[str, Tensor]) -> LossOutput:
    sums, maxima = ratio_report(log_ratio_T)
    return LossOutput(loss=loss, sums=more | sums, maxima=maxima)


# Estimators of KL(p || q) from samples of p, given log q - log p per sample (J. Schulman, "Approximating KL
# divergence", 2020).


def kl_k1(log_ratio_T: Tensor) -> Tensor:
    """Unbiased, high variance, negative for half of the samples."""
    return -log_ratio_T


def kl_k2(log_ratio_T: Tensor) -> Tensor:
    """Biased, low variance. Its gradient, unlike its value, is an unbiased estimate of the gradient of the KL."""
    return 0.5 * log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()


def kl_k3(log_ratio_T: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: e^d - 1 - d."""
    clamped_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # e^d - 1 loses precision for small d, so use expm1. Its result may still round below 0.
    return (clamped_T.expm1() - clamped_T).clamp(min=0)


# As penalties in a loss, each takes (log-probs with gradient, reference, old). The gradient of an estimate is not the
# gradient of the KL: the samples depend on p too, which autograd does not see (arXiv:2506.09477).


def _with_gradient_of(value_T: Tensor, carrier_T: Tensor) -> Tensor:
    return value_T.detach() + carrier_T - carrier_T.detach()


def _weighted(estimate: Callable[[Tensor], Tensor], logprobs_T: Tensor, reference_T: Tensor, old_T: Tensor) -> Tensor:
    """Times p / p_old with its gradient: unbiased in value and gradient, also for samples of an older policy."""
    ratio_T = (logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio_T * estimate(reference_T - logprobs_T)


KLPenalty = Callable[[Tensor, Tensor, Tensor], Tensor]
KL_PENALTIES: dict[KLEstimator, KLPenalty] = {
    # The plain gradient of k1 is zero on average and would penalise nothing. Its score-function gradient is k2's.
    "k1": lambda lp, ref, old: _with_gradient_of(kl_k1(ref - lp), kl_k2(ref - lp)),
    "k2": lambda lp, ref, old: kl_k2(ref - lp),
    "k3": lambda lp, ref, old: kl_k3(ref - lp),  # GRPO's; its gradient is that of KL(q || p)
    "k3+": lambda lp, ref, old: _with_gradient_of(kl_k3(ref - lp), kl_k2(ref - lp)),
    "k1_weighted": lambda lp, ref, old: _weighted(kl_k1, lp, ref, old),
    "k3_weighted": lambda lp, ref, old: _weighted(kl_k3, lp, ref, old),  # DeepSeek-V3.2's
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance weights for tokens drawn by a policy that is not quite the one being trained.

    Sampler and learner compute the same log-probs with different kernels, number formats or older weights. Weighting a
    token by learner / sampler makes its gradient unbiased again; truncating (TIS) or rejecting large weights bounds the
    variance. The old log-probs of the loss are then the learner's own, from before the first optimizer step.
    """

    kind: Literal["truncate", "reject"]  # cut weights above the cap, or drop those tokens
    level: Literal["token", "step"]  # one weight per token, or the product over the response
    cap: float
    floor: float  # reject only: weights below it are dropped too

    def weights(self, learner_T: Tensor, sampler_T: Tensor, step_ids_T: Tensor) -> Tensor:
        log_ratio_T = learner_T - sampler_T
        if self.level == "step":
            log_ratio_T = _step_sums(log_ratio_T, step_ids_T)
        ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.kind == "truncate":
            return ratio_T.clamp(max=self.cap)
        keep_T = (ratio_T >= self.floor) & (ratio_T <= self.cap)
        return torch.where(keep_T, ratio_T, torch.zeros_like(ratio_T))


# The losses of the table.


def token_clip(
    inputs: LossInputs,
    *,
    clip_low: Share,
    clip_high: NonNegativeFloat,
    dual_clip: AboveOne | None,
    aggregation: Aggregation,
    horizon: PositiveInt,
) -> LossOutput:
    """PPO-clip with a ratio per token."""
    return clipped_surrogate(
        inputs.logprobs_T - inputs.old_logprobs_T,
        inputs.advantages_T,
        token_weights(inputs, aggregation=aggregation, horizon=horizon),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def step_clip(
    inputs: LossInputs, *, clip_low: Share, clip_high: NonNegativeFloat, aggregation: Aggregation, horizon: PositiveInt
) -> LossOutput:
    """PPO-clip with one length-normalised ratio per step, shared by its tokens."""
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    output = clipped_surrogate(
        step_log_ratio(log_ratio_T, inputs.step_ids_T, inputs.step_sizes_T),
        inputs.advantages_T,
        token_weights(inputs, aggregation=aggregation, horizon=horizon),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return _reported(output.loss, log_ratio_T, output.sums)  # per token, so that algorithms can be compared


def reinforce(inputs: LossInputs, *, aggregation: Aggregation, horizon: PositiveInt) -> LossOutput:
    """No ratio and no clip: correct only for the policy that sampled, so for one optimizer step per batch."""
    weights_T = token_weights(inputs, aggregation=aggregation, horizon=horizon)
    loss = weighted_likelihood(inputs.logprobs_T, inputs.advantages_T, weights_T)
    return _reported(loss, inputs.logprobs_T - inputs.old_logprobs_T, {})


def capped_weight(
    inputs: LossInputs, *, weight_cap: PositiveFloat, aggregation: Aggregation, horizon: PositiveInt
) -> LossOutput:
    """CISPO (arXiv:2506.13585): REINFORCE whose importance weights are capped and carry no gradient, so that no
    token is ever dropped from the update."""
    weights_T = token_weights(inputs, aggregation=aggregation, horizon=horizon)
    log_ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).detach()
    importance_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=weight_cap)
    loss = weighted_likelihood(inputs.logprobs_T, importance_T * inputs.advantages_T, weights_T)
    return _reported(loss, log_ratio_T, {"clip_fraction": (log_ratio_T > math.log(weight_cap)).sum()})


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """Cross-entropy, for supervised fine-tuning; the trajectories come from `as_demonstrations`."""
    weights_T = token_weights(inputs, aggregation="token", horizon=1)
    loss = weighted_likelihood(inputs.logprobs_T, inputs.advantages_T, weights_T)
    return LossOutput(loss=loss, sums={"nll": -inputs.logprobs_T.detach().sum()})
