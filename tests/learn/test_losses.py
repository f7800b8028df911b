from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.losses import (
    KL_PENALTIES,
    MAX_LOG_RATIO,
    Aggregation,
    Counts,
    KLEstimator,
    LossInputs,
    LossOutput,
    capped_weight,
    clipped_surrogate,
    kl_k1,
    kl_k3,
    step_log_ratio,
    token_weights,
    value_loss,
)

LN2 = math.log(2)
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(loss: Tensor, by: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, by)
    slopes: list[float] = gradient.tolist()
    return slopes


def approx(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


# How much each token counts.


def two_trajectories(importance: Tensor | None = None) -> LossInputs:
    """Trajectory 0 has steps of 2 and 1 tokens, trajectory 1 one step of 1: 4 tokens, 3 steps, 2 trajectories."""
    zeros = numbers(0, 0, 0, 0)
    return LossInputs(
        logprobs_T=zeros,
        old_logprobs_T=zeros,
        advantages_T=zeros,
        importance_T=torch.ones_like(zeros) if importance is None else importance,
        step_ids_T=torch.tensor([0, 0, 1, 2]),
        step_sizes_T=numbers(2, 2, 1, 1),
        trajectory_sizes_T=numbers(3, 3, 3, 1),
        counts=Counts(tokens=4, steps=3, trajectories=2),
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("step", [1 / 3 / 2, 1 / 3 / 2, 1 / 3, 1 / 3]),
        ("trajectory", [1 / 2 / 3, 1 / 2 / 3, 1 / 2 / 3, 1 / 2]),
        ("constant", [1 / (2 * 10)] * 4),
    ],
)
def test_token_weights_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    got = token_weights(two_trajectories(), aggregation=aggregation, horizon=10)
    assert got.tolist() == approx(*expected)
    # all but "constant" are means: the weights of an optimizer step sum to 1
    assert got.sum().item() == pytest.approx(1.0 if aggregation != "constant" else 0.2)


def test_importance_multiplies_the_weights_and_leaves_the_denominators_alone() -> None:
    got = token_weights(two_trajectories(numbers(2, 0, 1, 0.5)), aggregation="token", horizon=10)
    assert got.tolist() == approx(2 / 4, 0, 1 / 4, 0.5 / 4)


# PPO-clip.


def surrogate(ratios: list[float], advantages: list[float], **settings: Any) -> tuple[LossOutput, list[float]]:
    """Every token with weight 1; returns the derivatives by the log-ratio too."""
    log_ratio = leaf(*(math.log(ratio) for ratio in ratios))
    out = clipped_surrogate(log_ratio, numbers(*advantages), torch.ones(len(ratios)).double(), **(CLIP | settings))
    return out, slope(out.loss, log_ratio)


def test_clipped_surrogate_by_hand() -> None:
    #                ratio   A    ratio * A   clipped * A   minimum   slope of -minimum by the log-ratio
    #   untouched      1     2       2            2            2      -A * ratio = -2
    #   too good       2     1       2            1.2          1.2     0: the clip stops it
    #   too bad        0.5  -1      -0.5         -0.8         -0.8     0
    #   harmless       2    -1      -2           -1.2         -2      +2: a bad token that became likelier
    #   harmless       0.5   1       0.5          0.8          0.5    -0.5
    out, slopes = surrogate([1, 2, 0.5, 2, 0.5], [2, 1, -1, -1, 1])
    assert out.loss.item() == pytest.approx(-(2 + 1.2 - 0.8 - 2 + 0.5))
    assert slopes == approx(-2, 0, 0, 2, -0.5)
    assert out.sums["clip_fraction"].item() == 2
    # k3 of the log-ratios 0, ln 2, -ln 2, ln 2, -ln 2: 0 + 2 * (2 - ln2 - 1) + 2 * (0.5 + ln2 - 1) = 1
    assert out.sums["approx_kl"].item() == pytest.approx(1.0)
    assert out.maxima["ratio_max"].item() == pytest.approx(2.0)
    assert out.maxima["log_ratio_max"].item() == pytest.approx(LN2)
    assert "dual_clip_fraction" not in out.sums


def test_clip_higher_leaves_more_room_upwards_and_none_downwards() -> None:
    # 1.25 is inside [0.8, 1.28] and outside [0.8, 1.2]; 0.75 is below both
    out, slopes = surrogate([1.25, 0.75], [1, -1], clip_high=0.28)
    assert out.loss.item() == pytest.approx(-(1.25 - 0.8))
    assert slopes == approx(-1.25, 0)
    assert out.sums["clip_fraction"].item() == 1


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    # ratio 5, A = -1: without it -min(-5, -1.2) = 5 and slope 5; with c = 3 the cost is 3 and the slope 0.
    # ratio 2, A = -1: 2 < 3, untouched. ratio 5, A = 1: the bound is for negative advantages alone.
    out, slopes = surrogate([5, 2, 5], [-1, -1, 1], dual_clip=3.0)
    assert out.loss.item() == pytest.approx(3 + 2 - 1.2)
    assert slopes == approx(0, 2, 0)
    assert out.sums["dual_clip_fraction"].item() == 1
    assert out.sums["clip_fraction"].item() == 1  # the good token


def test_huge_ratios_stay_finite_and_stop_pushing() -> None:
    log_ratio = torch.tensor([1e4, -1e4, math.inf, -math.inf], requires_grad=True)
    out = clipped_surrogate(log_ratio, torch.tensor([-1.0, 1.0, 1.0, -1.0]), torch.ones(4) / 4, **CLIP)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.sums["approx_kl"])
    assert out.maxima["ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0, 0, 0, 0]


def test_a_loss_over_no_tokens_is_zero() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    out = clipped_surrogate(nothing, torch.zeros(0), torch.zeros(0), **CLIP)
    out.loss.backward()
    assert out.loss.item() == 0
    assert out.maxima == {}
    assert step_log_ratio(nothing, torch.zeros(0, dtype=torch.long), torch.zeros(0)).numel() == 0
    assert value_loss(nothing, torch.zeros(0), torch.zeros(0), num_targets=0, clip=0.5).item() == 0


# One ratio per step.


def test_the_ratio_of_a_step_is_the_geometric_mean_of_its_tokens() -> None:
    # step 0: (ln 2 + ln 8) / 2 = ln 4; step 1: ln 3 alone
    log_ratio = leaf(math.log(2), math.log(8), math.log(3))
    got = step_log_ratio(log_ratio, torch.tensor([0, 0, 1]), numbers(2, 2, 1))
    assert got.exp().tolist() == approx(4, 4, 3)
    # each token carries its own weight; through the mean, the first two would share 3 as 3/2 and 3/2
    assert slope((got * numbers(1, 2, 5)).sum(), log_ratio) == approx(1, 2, 5)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(-3, 3))
def test_with_equal_weights_in_a_step_the_gradient_is_that_of_the_mean(ratios: list[float], advantage: float) -> None:
    ids, sizes = torch.zeros(len(ratios), dtype=torch.long), numbers(*[len(ratios)] * len(ratios))
    ours, plain = leaf(*ratios), leaf(*ratios)
    (step_log_ratio(ours, ids, sizes).exp() * advantage / sizes).sum().backward()
    (plain.mean().exp() * advantage).backward()
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=1e-12)


def test_a_rejected_token_of_a_step_learns_nothing() -> None:
    # one step of three tokens at ratio 1, A = 1, mean over the step; the correction rejects the second (weight 0) and
    # weighs the third by 2: slopes -1/3 * (1, 0, 2)
    logprobs = leaf(-1, -2, -3)
    inputs = LossInputs(
        logprobs_T=logprobs,
        old_logprobs_T=numbers(-1, -2, -3),
        advantages_T=numbers(1, 1, 1),
        importance_T=numbers(1, 0, 2),
        step_ids_T=torch.tensor([0, 0, 0]),
        step_sizes_T=numbers(3, 3, 3),
        trajectory_sizes_T=numbers(3, 3, 3),
        counts=Counts(tokens=3, steps=1, trajectories=1),
    )
    for name in ("gspo", "steppo"):
        assert slope(get_algorithm(name).loss(inputs).loss, logprobs) == approx(-1 / 3, 0, -2 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_estimate_of_a_sampler_that_almost_agrees_is_never_negative(dtype: torch.dtype) -> None:
    # e^d - d - 1 in float32 loses all digits below |d| = 1e-4 and comes out negative for about half of them
    log_ratio = torch.cat([torch.linspace(-1e-3, 1e-3, 20_001, dtype=dtype), torch.logspace(-12, 0, 500, dtype=dtype)])
    got = kl_k3(log_ratio)
    assert bool((got >= 0).all())
    torch.testing.assert_close(got.double(), log_ratio.double().expm1() - log_ratio.double(), rtol=1e-2, atol=1e-9)


def test_the_clipped_objective_of_a_step_by_hand() -> None:
    # one step of two tokens, A = 1, weights 1/2, ratios 1 and 1.21: the step's ratio is sqrt(1.21) = 1.1, unclipped.
    # loss = -1.1; each token's slope = -(ratio * sum of weights) / length = -1.1 / 2
    log_ratio = leaf(0, math.log(1.21))
    mean = step_log_ratio(log_ratio, torch.tensor([0, 0]), numbers(2, 2))
    out = clipped_surrogate(mean, numbers(1, 1), numbers(0.5, 0.5), **CLIP)
    assert out.loss.item() == pytest.approx(-1.1)
    assert slope(out.loss, log_ratio) == approx(-0.55, -0.55)
    # clipped at 1.05 neither token is pushed any more, not even the one whose own ratio is 1
    mean = step_log_ratio(log_ratio, torch.tensor([0, 0]), numbers(2, 2))
    out = clipped_surrogate(mean, numbers(1, 1), numbers(0.5, 0.5), clip_low=0.05, clip_high=0.05)
    assert out.loss.item() == pytest.approx(-1.05)
    assert slope(out.loss, log_ratio) == approx(0, 0)
    assert out.sums["clip_fraction"].item() == 2


# Likelihoods.


def test_cispo_by_hand() -> None:
    # ratios 2 and 8, cap 5: importance 2 and 5. loss = -(2 * 1 * -1 + 5 * -1 * -3) = 2 - 15.
    # The importance is a number: slopes are -importance * A, without a term for the derivative of the ratio.
    logprobs = leaf(-1, -3)
    old = numbers(-1 - LN2, -3 - 3 * LN2)
    inputs = LossInputs(
        logprobs_T=logprobs,
        old_logprobs_T=old,
        advantages_T=numbers(1, -1),
        importance_T=numbers(1, 1),
        step_ids_T=torch.tensor([0, 0]),
        step_sizes_T=numbers(2, 2),
        trajectory_sizes_T=numbers(2, 2),
        counts=Counts(tokens=1, steps=1, trajectories=1),
    )
    loss = capped_weight(inputs, weight_cap=5.0, aggregation="token", horizon=1).loss
    assert loss.item() == pytest.approx(2 - 15)
    assert slope(loss, logprobs) == approx(-2, 5)


# The critic's loss.


def test_value_loss_by_hand() -> None:
    # errors 1 and -2 over 2 targets: (1 + 4) / 2 / 2; slopes error / targets; the third is not asked
    values = leaf(1, 0, 7)
    loss = value_loss(values, numbers(0, 0, 0), numbers(0, 2, math.nan), num_targets=2, clip=None)
    assert loss.item() == pytest.approx(1.25)
    assert slope(loss, values) == approx(0.5, -1, 0)


def test_value_clipping_takes_the_larger_error() -> None:
    # clip 0.5 around old value 0, all targets 2
    #   value 1    near 0.5: errors 1 and 2.25    -> 2.25, no slope: it has moved far enough towards the target
    #   value 0.3  near 0.3: errors equal 2.89    -> slope 0.3 - 2
    #   value -1   near -0.5: errors 9 and 6.25   -> 9, slope -3: it moved the wrong way
    values = leaf(1, 0.3, -1)
    loss = value_loss(values, numbers(0, 0, 0), numbers(2, 2, 2), num_targets=1, clip=0.5)
    assert loss.item() == pytest.approx((2.25 + 2.89 + 9) / 2)
    assert slope(loss, values) == approx(0, -1.7, -3)


def test_a_critic_without_targets_has_no_loss_and_no_gradient() -> None:
    values = leaf(1, 2)
    loss = value_loss(values, numbers(0, 0), numbers(math.nan, math.nan), num_targets=0, clip=0.5)
    assert loss.item() == 0
    assert slope(loss, values) == [0, 0]


# KL penalties.


@pytest.mark.parametrize(
    ("name", "value", "slope_by_logprob"),
    [
        # log p = -1, log q = log p + ln 2, old = log p - ln 3 (so p / old = 3); d log q - log p = ln 2
        ("k1", -LN2, -LN2),  # score function: log p - log q
        ("k2", LN2**2 / 2, -LN2),  # d/dlp of (lp - lq)^2 / 2 = lp - lq
        ("k3", 1 - LN2, 1 - 2),  # d/dlp of q/p - (lq - lp) - 1 = 1 - q/p
        ("k3+", 1 - LN2, -LN2),  # k3's value with k2's gradient
        ("k1_weighted", 3 * -LN2, 3 * -LN2 + 3),  # w * k1: w' = w, k1' = 1
        ("k3_weighted", 3 * (1 - LN2), 3 * (1 - LN2) + 3 * (1 - 2)),
    ],
)
def test_kl_penalties_by_hand(name: KLEstimator, value: float, slope_by_logprob: float) -> None:
    logprob = leaf(-1)
    penalty = KL_PENALTIES[name](logprob, numbers(-1 + LN2), numbers(-1 - math.log(3)))
    assert penalty.item() == pytest.approx(value)
    assert slope(penalty.sum(), logprob) == approx(slope_by_logprob)


def test_the_table_of_penalties_is_the_one_tested() -> None:
    assert list(KL_PENALTIES) == list(get_args(KLEstimator)) == ["k1", "k2", "k3", "k3+", "k1_weighted", "k3_weighted"]


class Categorical:
    """Policy p(theta), reference q and sampler old over five outcomes; expectations are exact sums."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(3, 5, dtype=torch.float64, generator=generator)
        self.theta = rows[0].clone().requires_grad_()
        self.logp = self.theta.log_softmax(-1)
        self.logq, self.old = rows[1].log_softmax(-1), rows[2].log_softmax(-1)

    def gradient(self, of: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(of, self.theta, retain_graph=True)
        return gradient

    def expected(self, name: KLEstimator, sampler: Tensor) -> Tensor:
        """Samples are given, so what they are drawn from carries no gradient."""
        sampler = sampler.detach()
        return (sampler.exp() * KL_PENALTIES[name](self.logp, self.logq, sampler)).sum()

    @property
    def kl(self) -> Tensor:
        return (self.logp.exp() * (self.logp - self.logq)).sum()

    @property
    def reverse_kl(self) -> Tensor:
        return (self.logq.exp() * (self.logq - self.logp)).sum()


@given(st.integers(0, 10_000))
def test_on_policy_every_penalty_but_k3_has_the_gradient_of_the_kl(seed: int) -> None:
    c = Categorical(seed)
    for name in KL_PENALTIES:
        target = c.reverse_kl if name == "k3" else c.kl
        torch.testing.assert_close(c.gradient(c.expected(name, c.logp)), c.gradient(target), rtol=1e-9, atol=1e-12)
        if name != "k2":  # the one whose value is biased
            torch.testing.assert_close(c.expected(name, c.logp), c.kl, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10_000))
def test_the_weighted_penalties_are_unbiased_for_samples_of_another_policy(seed: int) -> None:
    c = Categorical(seed)
    for name in ("k1_weighted", "k3_weighted"):
        torch.testing.assert_close(c.expected(name, c.old), c.kl, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(c.gradient(c.expected(name, c.old)), c.gradient(c.kl), rtol=1e-9, atol=1e-12)


def test_other_penalties_are_biased_and_plain_k1_penalises_nothing() -> None:
    c = Categorical(0)
    for name in ("k1", "k2", "k3", "k3+"):
        assert not torch.allclose(c.gradient(c.expected(name, c.old)), c.gradient(c.kl), rtol=1e-2)
    plain = (c.logp.detach().exp() * kl_k1(c.logq - c.logp)).sum()
    torch.testing.assert_close(c.gradient(plain), torch.zeros(5).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_penalties_stay_finite_for_a_reference_far_away(name: KLEstimator) -> None:
    logprob = torch.tensor([-1.0, -90.0], requires_grad=True)
    penalty = KL_PENALTIES[name](logprob, torch.tensor([-95.0, -1.0]), torch.tensor([-60.0, -1.0]))
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()
