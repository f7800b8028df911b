"""Policy losses: pure functions of per-token tensors.

Every loss is a sum over its tokens divided by a count that the caller takes over the whole optimizer step, all packs
and ranks together. So the shares of any split add up to the same loss, and packing, micro-batching and data
parallelism cannot change the gradient. Nothing here knows models, packs or which algorithm runs.

Shape suffixes: T = trained (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in fp32; beyond it one stale token could turn the loss into inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The denominators: what one optimizer step trains on, over all packs and ranks."""

    tokens: int
    steps: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of one pack. The tokens of a step always come together; those of a trajectory may not."""

    logprobs_T: Tensor  # under the policy being trained; the only one that carries a gradient
    old_logprobs_T: Tensor  # under the policy that sampled
    advantages_T: Tensor
    step_ids_T: Tensor  # 0, 1, 2 ... over the steps of this pack
    trajectory_ids_T: Tensor  # position of the trajectory in the optimizer step
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A share of the loss, and what to report about it."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)  # over the tokens given; add up, then divide by their count
    maxima: dict[str, Tensor] = field(default_factory=dict)


def clipped_surrogate(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """PPO-clip (arXiv:1707.06347, eq. 7), per token.

    `num_tokens` is the response-token count of the whole optimizer step. With `clip_high > clip_low` this is DAPO's
    clip-higher (arXiv:2503.14476).
    """
    log_ratio_T = logprobs_T - old_logprobs_T
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    # min, not clip alone: clipping must never make a bad update look better than it is.
    objective_T = (ratio_T * advantages_T).minimum(clipped_T * advantages_T)
    # The clip is active where it stops the gradient: outside the range, on the side the advantage pushes towards.
    stopped_T = ((ratio_T > 1 + clip_high) & (advantages_T > 0)) | ((ratio_T < 1 - clip_low) & (advantages_T < 0))
    sums, maxima = ratio_report(log_ratio_T)
    return LossOutput(
        loss=-objective_T.sum() / num_tokens, sums=sums | {"clip_fraction": stopped_T.sum()}, maxima=maxima
    )


def supervised(logprobs_T: Tensor, advantages_T: Tensor, *, num_tokens: int) -> LossOutput:
    """Advantage-weighted log-likelihood. With advantage 1 everywhere: the cross-entropy of supervised fine-tuning."""
    nll = -logprobs_T.detach().sum()
    return LossOutput(loss=-(advantages_T * logprobs_T).sum() / num_tokens, sums={"nll": nll})


def ratio_report(log_ratio_T: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums and maxima that any loss with an importance ratio reports: how far the policy is from its sampler."""
    log_ratio_T = log_ratio_T.detach()
    sums = {"approx_kl": kl_k3(log_ratio_T).sum()}
    if log_ratio_T.numel() == 0:  # torch refuses the maximum of nothing
        return sums, {}
    ratio_max = log_ratio_T.max().clamp(max=MAX_LOG_RATIO).exp()
    return sums, {"ratio_max": ratio_max, "log_ratio_max": log_ratio_T.abs().max()}


# Estimators of KL(p || q) from samples of p, given log q - log p per sample (J. Schulman, "Approximating KL
# divergence", 2020).


def kl_k1(log_ratio_T: Tensor) -> Tensor:
    """Unbiased, high variance, negative for half of the samples."""
    return -log_ratio_T


def kl_k2(log_ratio_T: Tensor) -> Tensor:
    """Biased, low variance. Its gradient, unlike its value, is an unbiased estimate of the gradient of the KL."""
    return 0.5 * log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()


def kl_k3(log_ratio_T: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: e^d - d - 1."""
    clamped_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_T.exp() - clamped_T - 1


# k1 is missing on purpose: as a loss its gradient is that of a log-likelihood under its own samples, zero on average,
# so it would penalise nothing. It belongs into a reward.
KL_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {"k2": kl_k2, "k3": kl_k3}
