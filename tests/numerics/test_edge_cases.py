"""Batches that are odd but legal: every algorithm takes them with finite numbers, or learns nothing from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Group, StopReason, Trajectory
from tests.learn.builders import (
    correction,
    credit_for,
    critic_of,
    group,
    learner_for,
    on_policy,
    random_groups,
    random_trajectory,
    step,
    tiny_model,
    trajectory,
)

MODEL = tiny_model()
CASES = [(name, False) for name in ALGORITHMS] + [(n, True) for n, row in ALGORITHMS.items() if row.needs_critic]
IDS = [f"{name}{'-shared' if shared else ''}" for name, shared in CASES]
every_case = pytest.mark.parametrize(("name", "shared"), CASES, ids=IDS)


def learner_of(name: str, shared: bool, **more: Any) -> Learner:
    policy = PolicyModel(MODEL).copy()
    critic = critic_of(policy, shared=shared) if ALGORITHMS[name].needs_critic else None
    settings: dict[str, Any] = {"critic": critic, "num_epochs": 2, "num_minibatches": 2, "max_nonfinite_updates": 1}
    return learner_for(name, policy, **(settings | more))


def with_greedy(*attempts: Trajectory) -> Group:
    greedy = trajectory(step([1, 2], [3]), reward=0.25, name="greedy")
    return replace(group(*attempts), greedy=greedy)


def single_trajectory() -> list[Group]:
    return [with_greedy(trajectory(step([1, 2], [3, 4]), reward=1.0))]


def groups_of_one() -> list[Group]:
    return [with_greedy(trajectory(step([n, 2], [3, n]), reward=float(n % 2))) for n in range(1, 5)]


def no_variance() -> list[Group]:
    return [with_greedy(*[trajectory(step([n], [3, 4]), step([n, 5], [6]), reward=0.3)] * 3) for n in range(1, 3)]


def empty_responses() -> list[Group]:
    """Steps without tokens at the start, in the middle and at the end; one attempt in which nothing was sampled."""
    attempts = [
        trajectory(step([1], []), step([1, 2], [3]), reward=1.0),
        trajectory(step([1], [2]), step([1, 2, 3], []), step([1, 2, 3, 4], [5, 6])),
        trajectory(step([1], [2]), step([1, 2, 3], []), reward=0.5, stop=StopReason.MAX_STEPS),
        trajectory(step([1], [])),
    ]
    return [with_greedy(*attempts), with_greedy(attempts[3])]


def one_step_episodes() -> list[Group]:
    attempts = [trajectory(step([1, 2], [n]), reward=float(n == 3)) for n in range(3, 7)]
    return [with_greedy(*attempts)]


def long_episodes() -> list[Group]:
    rng = random.Random(0)
    made = [random_trajectory(rng, kind="append", name=f"long{n}", num_steps=200) for n in range(2)]
    return [with_greedy(replace(made[0], outcome_reward=1.0), replace(made[1], stop=StopReason.MAX_STEPS))]


def one_token_each() -> list[Group]:
    """The smallest that has anything to compare."""
    return [with_greedy(trajectory(step([1], [2]), reward=1.0), trajectory(step([1], [3])))]


def failures_only() -> list[Group]:
    return [with_greedy(trajectory(step([1], [2]), stop=StopReason.ERROR), trajectory(stop=StopReason.TIMEOUT))]


def huge_rewards() -> list[Group]:
    return [
        with_greedy(*(trajectory(step([1, 2], [n, 4]), reward=r * 1e6) for n, r in ((3, 1.0), (5, -1.0), (6, 0.0))))
    ]


def no_groups() -> list[Group]:
    return []


SHAPES: list[Callable[[], list[Group]]] = [
    single_trajectory,
    groups_of_one,
    no_variance,
    empty_responses,
    one_step_episodes,
    long_episodes,
    one_token_each,
    failures_only,
    huge_rewards,
    no_groups,
]


def assert_sound(learner: Learner, metrics: dict[str, float]) -> None:
    """Finite numbers, nothing skipped, finite weights; and an empty update has moved nothing."""
    bad = {key: value for key, value in metrics.items() if not math.isfinite(value)}
    assert bad == {}
    assert metrics["skipped_updates"] == metrics["nonfinite_updates"] == 0
    weights = dict(learner.weights())
    if learner.critic is not None:
        critic = learner.critic
        weights |= {f"head.{key}": tensor for key, tensor in critic.head.state_dict().items()}
        weights |= {f"critic.{key}": tensor for key, tensor in critic.backbone.weights().items()}
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    if metrics["empty_update"]:
        assert metrics["loss"] == metrics["grad_norm"] == metrics["optimizer_steps"] == 0
        assert all(torch.equal(tensor, MODEL.state_dict()[key]) for key, tensor in learner.weights().items())


@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_odd_shapes(name: str, shared: bool, shape: Callable[[], list[Group]]) -> None:
    learner = learner_of(name, shared)
    credited = credit_for(name, shape(), learner)
    assert all(math.isfinite(a) for item in credited for row in item.advantages for a in row)
    assert_sound(learner, learner.update(credited))


def ordinary(name: str, learner: Learner) -> list[CreditedTrajectory]:
    rng = random.Random(1)
    return credit_for(name, on_policy(random_groups(rng), learner.policy, rng, noise=0.1), learner)


@every_case
@pytest.mark.parametrize("off_by", [50.0, 1e4])
def test_old_logprobs_far_off(name: str, shared: bool, off_by: float) -> None:
    learner = learner_of(name, shared, kl_coef=0.1, reference=PolicyModel(MODEL).copy(), kl_estimator="k3_weighted")
    credited = ordinary(name, learner)
    for number, item in enumerate(credited):  # up and down in turn
        for made in item.trajectory.steps:
            made.response_logprobs[:] = [old + off_by * (-1) ** number for old in made.response_logprobs]
    assert_sound(learner, learner.update(credited))


@every_case
@pytest.mark.parametrize("size", [1e12, 1e-12])
def test_huge_and_tiny_advantages(name: str, shared: bool, size: float) -> None:
    learner = learner_of(name, shared)
    credited = [
        replace(item, advantages=[[size * a for a in row] for row in item.advantages])
        for item in ordinary(name, learner)
    ]
    assert_sound(learner, learner.update(credited))


@every_case
@pytest.mark.parametrize("level", ["token", "step"])
def test_everything_rejected(name: str, shared: bool, level: Any) -> None:
    # no weight is both at least 1.9 and at most 1.9001, so no token is left
    learner = learner_of(name, shared, correction=correction("reject", level=level, floor=1.9, cap=1.9001))
    metrics = learner.update(ordinary(name, learner))
    assert_sound(learner, metrics)
    assert metrics["importance_rejected"] == 1
    assert metrics.get("policy_loss", metrics["loss"]) == 0
    if not ALGORITHMS[name].needs_critic:
        assert metrics["grad_norm"] == 0
        assert all(torch.equal(tensor, MODEL.state_dict()[key]) for key, tensor in learner.weights().items())


@every_case
def test_every_penalty_at_once(name: str, shared: bool) -> None:
    learner = learner_of(
        name,
        shared,
        kl_coef=0.1,
        reference=PolicyModel(tiny_model(seed=8)),
        entropy_coef=0.01,
        correction=correction("truncate", level="step"),
    )
    metrics = learner.update(ordinary(name, learner))
    assert_sound(learner, metrics)
    assert {"kl_to_reference", "entropy", "mismatch_kl", "importance_mean"} <= metrics.keys()
