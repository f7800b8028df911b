from __future__ import annotations

import math
import random
from typing import Any, Literal

import pytest
import torch

from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import (
    correction,
    credit_for,
    gradients_of,
    learner_for,
    on_policy,
    random_groups,
    tiny_model,
)

KINDS: tuple[Literal["truncate", "reject"], ...] = ("truncate", "reject")
STEPS = torch.tensor([0, 0, 1, 1])


def weights(ratios: list[float], **settings: Any) -> list[float]:
    """Of four tokens in two steps; the ratio is learner / sampler."""
    learner = torch.tensor(ratios, dtype=torch.float64).log()
    got: list[float] = correction(**settings).weights(learner, torch.zeros(4).double(), STEPS).tolist()
    return got


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # ratios 0.5, 1, 3, 2; the cap of 2 is itself allowed
        ({"kind": "truncate"}, [0.5, 1, 2, 2]),
        ({"kind": "truncate", "cap": 5.0}, [0.5, 1, 3, 2]),
        ({"kind": "reject"}, [0.5, 1, 0, 2]),
        ({"kind": "reject", "floor": 0.6}, [0, 1, 0, 2]),
        # products over the steps: 0.5 * 1 = 0.5 and 3 * 2 = 6
        ({"kind": "truncate", "level": "step"}, [0.5, 0.5, 2, 2]),
        ({"kind": "truncate", "level": "step", "cap": 7.0}, [0.5, 0.5, 6, 6]),
        ({"kind": "reject", "level": "step"}, [0.5, 0.5, 0, 0]),
        ({"kind": "reject", "level": "step", "floor": 0.6, "cap": 7.0}, [0, 0, 6, 6]),
    ],
)
def test_weights_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    assert weights([0.5, 1, 3, 2], **settings) == pytest.approx(expected)


def test_weights_of_nothing_and_of_huge_ratios() -> None:
    nothing = torch.zeros(0)
    for kind in KINDS:
        for level in ("token", "step"):
            made = correction(kind, level=level)
            assert made.weights(nothing, nothing, nothing.long()).numel() == 0
            got = made.weights(torch.tensor([1e4, -1e4]), torch.zeros(2), torch.tensor([0, 1]))
            assert torch.isfinite(got).all()


def test_uncapped_weights_make_an_expectation_under_the_sampler_one_under_the_learner() -> None:
    # exact: sum over outcomes of sampler * weight * f = sum of learner * f
    rows = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    learner, sampler = rows[0].log_softmax(-1), rows[1].log_softmax(-1)
    got = correction("truncate", cap=1e9).weights(learner, sampler, torch.arange(6))
    torch.testing.assert_close((sampler.exp() * got * rows[2]).sum(), (learner.exp() * rows[2]).sum())


def batch(policy: PolicyModel, noise: float) -> list[CreditedTrajectory]:
    rng = random.Random(3)
    groups = on_policy(random_groups(rng, rows=3), policy, rng, noise=noise)
    return credit_for("grpo", groups, learner_for("grpo", policy))


def test_with_a_correction_the_old_policy_is_the_learner_and_the_mismatch_is_still_reported() -> None:
    policy = PolicyModel(tiny_model())
    credited = batch(policy, noise=0.5)
    plain = learner_for("grpo", policy.copy()).update(credited)
    corrected = learner_for("grpo", policy.copy(), correction=correction("truncate")).update(credited)
    # The ratio of the loss compares the learner with itself before the first step; sampler against learner is apart.
    assert corrected["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert corrected["clip_fraction"] == 0
    assert plain["mismatch_kl"] > 0.05
    assert corrected["mismatch_kl"] == pytest.approx(plain["mismatch_kl"], rel=1e-5)
    assert corrected["mismatch_max"] == pytest.approx(plain["mismatch_max"], rel=1e-5)
    assert corrected["importance_rejected"] == 0
    assert 0.5 < corrected["importance_mean"] < 2


def test_truncated_importance_by_hand_through_the_learner() -> None:
    # every token was sampled at a half, or a quarter, of the learner's probability: weights 2, and 4 cut to 3
    policy = PolicyModel(tiny_model())
    gradients, metrics = {}, {}
    for factor in (1.0, 2.0, 4.0):
        exact = batch(policy, noise=0.0)
        for item in exact:
            for step in item.trajectory.steps:
                step.response_logprobs[:] = [old - math.log(factor) for old in step.response_logprobs]
        learner = learner_for("grpo", policy.copy(), max_grad_norm=math.inf, correction=correction("truncate", cap=3.0))
        metrics[factor] = learner.update(exact)
        gradients[factor] = gradients_of(learner)
    for factor, weight in ((2.0, 2.0), (4.0, 3.0)):
        assert metrics[factor]["importance_mean"] == pytest.approx(weight, rel=1e-5)
        for name, gradient in gradients[1.0].items():
            torch.testing.assert_close(gradients[factor][name], weight * gradient, rtol=1e-4, atol=1e-6)


def test_the_kl_to_a_reference_is_corrected_like_the_loss() -> None:
    # Nothing but the penalty has a gradient (advantages 0); sampled at half the learner's probability: weight 2.
    policy = PolicyModel(tiny_model())
    reference = PolicyModel(tiny_model(seed=1))
    gradients = {}
    for factor in (1.0, 2.0):
        idle = [
            CreditedTrajectory(
                trajectory=item.trajectory, advantages=[[0.0] * len(s.response_ids) for s in item.trajectory.steps]
            )
            for item in batch(policy, noise=0.0)
        ]
        for item in idle:
            for step in item.trajectory.steps:
                step.response_logprobs[:] = [old - math.log(factor) for old in step.response_logprobs]
        learner = learner_for(
            "grpo",
            policy.copy(),
            max_grad_norm=math.inf,
            reference=reference,
            kl_coef=0.1,
            kl_estimator="k2",
            correction=correction("truncate", cap=3.0),
        )
        learner.update(idle)
        gradients[factor] = gradients_of(learner)
    for name, gradient in gradients[1.0].items():
        torch.testing.assert_close(gradients[2.0][name], 2 * gradient, rtol=1e-4, atol=1e-6)
