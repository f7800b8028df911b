from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learn.losses import MAX_LOG_RATIO, clipped_surrogate, kl_k1, kl_k2, kl_k3, supervised


def test_clipped_surrogate_by_hand() -> None:
    # ratios: e^0 = 1, e^ln2 = 2 (clipped to 1.2), e^-ln2 = 0.5 (advantage < 0: clipped to 0.8)
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    old = logprobs - torch.log(torch.tensor([1.0, 2.0, 0.5]))
    advantages = torch.tensor([1.0, 1.0, -1.0])
    out = clipped_surrogate(logprobs, old, advantages, num_tokens=3, clip_low=0.2, clip_high=0.2)
    # minus the mean of 1 * 1, 1.2 * 1 and 0.8 * (-1)
    assert out.loss.item() == pytest.approx(-1.4 / 3)
    assert out.sums["clip_fraction"].item() == 2
    # k3 of the log-ratios 0, ln 2, -ln 2: 0, 2 - ln2 - 1, 0.5 + ln2 - 1; they sum to 0.5
    assert out.sums["approx_kl"].item() == pytest.approx(0.5)
    assert out.maxima["ratio_max"].item() == pytest.approx(2.0)
    assert out.maxima["log_ratio_max"].item() == pytest.approx(math.log(2))


def test_a_ratio_on_the_harmless_side_is_not_clipped() -> None:
    # ratio 2 with advantage -1: min(-2, -1.2) = -2, and ratio 0.5 with advantage 1: min(0.5, 0.8) = 0.5
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    old = -torch.log(torch.tensor([2.0, 0.5]))
    out = clipped_surrogate(logprobs, old, torch.tensor([-1.0, 1.0]), num_tokens=1, clip_low=0.2, clip_high=0.2)
    assert out.loss.item() == pytest.approx(1.5)
    assert out.sums["clip_fraction"].item() == 0
    out.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([2.0, -0.5])  # -A * ratio


def test_clip_higher_leaves_more_room_upwards() -> None:
    old = -torch.log(torch.tensor([1.25]))
    out = clipped_surrogate(torch.zeros(1), old, torch.ones(1), num_tokens=1, clip_low=0.2, clip_high=0.28)
    assert out.loss.item() == pytest.approx(-1.25)


def test_huge_ratios_stay_finite_and_stop_pushing() -> None:
    logprobs = torch.tensor([0.0, -1e4, 0.0], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -math.inf])
    out = clipped_surrogate(logprobs, old, torch.tensor([-1.0, 1.0, 1.0]), num_tokens=3, clip_low=0.2, clip_high=0.2)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert out.maxima["ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_a_loss_over_no_tokens_is_zero() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    out = clipped_surrogate(nothing, torch.zeros(0), torch.zeros(0), num_tokens=5, clip_low=0.2, clip_high=0.2)
    assert out.loss.item() == 0
    assert out.maxima == {}


def test_gradient_does_not_depend_on_the_micro_batch_split() -> None:
    torch.manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 12).unbind()

    def gradient(splits: list[int]) -> torch.Tensor:
        leaf = logprobs.clone().requires_grad_()
        for lp, o, a in zip(leaf.split(splits), old.split(splits), advantages.split(splits), strict=True):
            clipped_surrogate(lp, o, a, num_tokens=12, clip_low=0.2, clip_high=0.2).loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient([12]), gradient([1, 4, 7]), rtol=0, atol=0)


def test_supervised_with_advantage_one_is_cross_entropy() -> None:
    logprobs = torch.tensor([-1.0, -3.0])
    out = supervised(logprobs, torch.ones(2), num_tokens=4)
    assert out.loss.item() == pytest.approx((1 + 3) / 4)
    assert out.sums["nll"].item() == pytest.approx(4.0)


def test_kl_estimators_by_hand() -> None:
    # log q - log p = ln 2: k1 = -ln 2, k2 = (ln 2)^2 / 2, k3 = 2 - ln 2 - 1
    d = torch.tensor([math.log(2)])
    assert kl_k1(d).item() == pytest.approx(-math.log(2))
    assert kl_k2(d).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(d).item() == pytest.approx(1 - math.log(2))


@given(st.integers(0, 10_000))
def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl(seed: int) -> None:
    # the expectation over all outcomes of p, exactly: sum of p * estimate
    torch.manual_seed(seed)
    logits, q = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    logp, logq = logits.log_softmax(-1), q.log_softmax(-1)
    p = logp.exp()
    kl = (p * (logp - logq)).sum()
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((p * estimator(logq - logp)).sum(), kl)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # as a loss the samples are given, so p carries no gradient
    (k2,) = torch.autograd.grad((p.detach() * kl_k2(logq - logp)).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((p.detach() * kl_k1(logq - logp)).sum(), logits)
    torch.testing.assert_close(k2, expected)
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)  # why k1 is no penalty


@given(st.floats(-1e6, 1e6))
def test_k3_is_never_negative_and_never_overflows(value: float) -> None:
    got = kl_k3(torch.tensor(value)).item()
    assert math.isfinite(got)
    assert got >= -1e-6
