"""The learning rate over a run: warm-up, decay, and whose steps they count."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import Schedule, schedule, warmup
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import (
    credit_for,
    learner_for,
    new_critic,
    random_credited,
    random_groups,
    tiny_model,
)


def batch() -> list[CreditedTrajectory]:
    return random_credited(random.Random(0), kind="mixed", count=6)


def nothing() -> list[CreditedTrajectory]:
    return []


def make_learner(**overrides: Any) -> Learner:
    return learner_for("grpo", **overrides)


def test_the_learning_rate_rises_linearly_and_then_stays() -> None:
    learner = make_learner(lr=1e-2, schedule=warmup(3))
    assert [learner.update(batch())["lr"] for _ in range(6)] == [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]


def test_the_cosine_falls_to_its_floor_at_the_last_step() -> None:
    # 2 steps of warm-up (1/3, 2/3 of full), then half a cosine: half way between 1 and 0.1 in the middle
    scale = schedule("cosine", warmup_steps=2, total=10, floor=0.1)
    assert [scale(s, s) for s in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0], abs=0.04)
    assert scale(6, 6) == pytest.approx((1 + 0.1) / 2)
    assert scale(10, 10) == scale(50, 50) == pytest.approx(0.1)


def test_the_line_falls_to_its_floor_at_the_last_planned_step() -> None:
    # 2 steps of warm-up, then from 1 to 0.2 over 8 steps: 0.1 less with each
    scale = schedule("linear", warmup_steps=2, total=10, floor=0.2)
    assert [scale(s, s) for s in (1, 2, 3, 6, 9, 10, 11)] == pytest.approx([1 / 3, 2 / 3, 0.9, 0.6, 0.3, 0.2, 0.2])


def test_a_warmup_waits_for_steps_that_were_not_taken_and_a_decay_does_not() -> None:
    # 4 steps of 8 were planned and 1 of them was taken: half of the decay, the first of four steps of the warm-up
    assert schedule("linear", warmup_steps=0, total=8, floor=0.0)(1, 4) == 0.5
    assert schedule("constant", warmup_steps=3, total=8, floor=0.0)(1, 4) == 0.25
    learner = make_learner(lr=1.0e-2, schedule=schedule("linear", warmup_steps=0, total=8, floor=0.0), num_epochs=2)
    rates = [learner.update(part)["lr"] for part in (batch(), nothing(), batch(), batch())]
    # of the second step of each update; the empty one takes none, and counts
    assert rates == pytest.approx([0.01 * factor for factor in (6 / 8, 6 / 8, 2 / 8, 0.0)])


def test_the_critic_has_the_schedule_of_the_learner_unless_it_has_its_own() -> None:
    def rates(own: Schedule | None) -> list[float]:
        policy = PolicyModel(tiny_model("llama-tied"))
        critic = new_critic(policy, shared=False, lr=1.0e-2, warmup_updates=2, schedule=own)
        learner = learner_for("ppo", policy, critic=critic, schedule=warmup(3))
        credited = credit_for("ppo", random_groups(random.Random(1)), learner)
        made = []
        for _ in range(5):
            learner.update(credited)
            made += [tuple(optimizer.lr for optimizer in learner.optimizers.values())]
        assert [policy_lr for policy_lr, _ in made] == pytest.approx([0.0, 0.0, 2.5e-4, 5.0e-4, 7.5e-4])
        return [critic_lr for _, critic_lr in made]

    # the critic takes steps while the policy waits for it, so its warm-up is over earlier
    assert rates(None) == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates(warmup(1)) == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01])


def test_a_restored_learner_goes_on_with_the_schedule_where_it_was() -> None:
    falling = schedule("cosine", warmup_steps=1, total=8, floor=0.0)
    learner, restored = (make_learner(schedule=falling, num_epochs=2) for _ in range(2))
    learner.update(batch())
    learner.update(nothing())
    restored.load_state_dict(learner.state_dict())
    assert restored.update(nothing())["lr"] == learner.update(nothing())["lr"] > 0
    assert restored.update(batch())["lr"] == learner.update(batch())["lr"] == pytest.approx(0.0)
    older = learner.state_dict()
    del older["optimizer"]["planned"]  # as it was saved before there was a plan
    restored.load_state_dict(older)
    assert restored.optimizers["optimizer"].planned == learner.optimizer_steps
