"""Updates on verl's workers equal those of our own learner, for every algorithm and every option."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from agent_r1.backends.verl.inside.losses import PolicyLoss, ValueLoss
from agent_r1.backends.verl.learner import RemoteCritic, RemoteModel, VerlLearner
from agent_r1.errors import TrainingError
from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.credit import attempts_of, trainable
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import schedule
from agent_r1.types import CreditedTrajectory, Group
from tests.backends.in_process import InProcessWorkers
from tests.learn.builders import correction, credit_for, critic_of, learner_for, on_policy, random_groups, tiny_model

# What a backend may lay out differently: rows instead of packs.
LAYOUT = {"packs", "packing_efficiency", "tokens_computed"}


def pair(name: str, *, workers: int = 2, **overrides: Any) -> tuple[Learner, VerlLearner, InProcessWorkers]:
    """Our own learner and one on workers, with the same weights and settings."""
    network = tiny_model("llama-tied")
    policy = PolicyModel(deepcopy(network))
    critic = critic_of(policy, shared=False, **overrides.pop("critic_settings", {}))
    if overrides.get("kl_coef") or overrides.pop("reference", False):
        overrides["reference"] = PolicyModel(deepcopy(network))
    if not ALGORITHMS[name].needs_critic:
        critic = None  # type: ignore[assignment]
    settings: dict[str, Any] = {
        "own_old_logprobs": ALGORITHMS[name].own_old_logprobs,
        "weight_decay": 0.1,
        "critic": critic,
    }
    ours = learner_for(name, policy, **(settings | overrides))
    behind = InProcessWorkers(
        network,
        size=workers,
        head=None if critic is None else critic.head,
        lr=0.0,
        betas=ours.betas,
        weight_decay=ours.weight_decay,
        eps=ours.adam_eps,
    )
    own = {each.name: getattr(ours, each.name) for each in fields(Learner) if each.init and each.name != "policy"}
    own["reference"] = None if ours.reference is None else RemoteModel()
    if critic is not None:
        own["critic"] = RemoteCritic(
            values=lambda rows: behind.values(rows.token_columns(), {}),
            lr=critic.lr,
            schedule=critic.schedule or ours.schedule,
            value_clip=critic.value_clip,
            warmup_updates=critic.warmup_updates,
        )
        behind.value_loss = ValueLoss(clip=critic.value_clip)
    theirs = VerlLearner(RemoteModel(), workers=behind, **own)  # type: ignore[arg-type]
    behind.policy_loss = PolicyLoss(
        loss=ours.loss, kl_coef=ours.kl_coef, kl_estimator=ours.kl_estimator, entropy_coef=ours.entropy_coef
    )
    return ours, theirs, behind


def batches(ours: Learner, count: int = 2, kind: str = "mixed", size: int = 4) -> list[list[Group]]:
    rng = random.Random(3)
    return [
        on_policy(random_groups(rng, rows=3, size=size, kind=kind), ours.policy, rng, noise=0.1) for _ in range(count)
    ]


def assert_same(mine: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    assert set(mine) - LAYOUT == set(theirs) - LAYOUT
    for name in set(mine) - LAYOUT:
        assert theirs[name] == pytest.approx(mine[name], rel=2e-4, abs=2e-6), name


def assert_same_weights(ours: Learner, behind: InProcessWorkers) -> None:
    for name, tensor in ours.policy.model.state_dict().items():
        torch.testing.assert_close(behind.network.state_dict()[name], tensor, atol=2e-6, rtol=2e-4)


def train_both(name: str, *, kind: str = "mixed", **overrides: Any) -> tuple[Learner, VerlLearner, InProcessWorkers]:
    ours, theirs, behind = pair(name, **overrides)
    for groups in batches(ours, kind=kind):
        mine, other = credit_for(name, groups, ours), credit_for(name, groups, theirs)
        for a, b in zip(mine, other, strict=True):
            for x, y in zip(a.advantages, b.advantages, strict=True):
                assert y == pytest.approx(x, abs=1e-6, rel=1e-5)  # the second batch: weights differ by rounding
        assert_same(ours.update(mine), theirs.update(other))
    assert_same_weights(ours, behind)
    return ours, theirs, behind


@pytest.mark.parametrize("kind", ["append", "mixed"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_the_same_steps(name: str, kind: str) -> None:
    train_both(name, kind=kind)


@pytest.mark.parametrize("name", ["grpo", "gigpo", "ppo", "steppo", "gspo"])
def test_mini_batches_are_made_of_whole_trajectories_and_reshuffled_alike(name: str) -> None:
    train_both(name, num_minibatches=2, num_epochs=2)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_any_number_of_workers_takes_the_same_step(workers: int) -> None:
    train_both("grpo", workers=workers)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+", "k1_weighted", "k3_weighted"])
def test_a_kl_in_the_loss_is_the_same(estimator: str) -> None:
    _, _, behind = train_both("grpo", kl_coef=0.3, kl_estimator=estimator)
    assert behind.calls.count("reference") == 2  # once per update


@pytest.mark.parametrize("level", ["token", "step"])
def test_a_correction_weights_the_same_tokens(level: str) -> None:
    train_both("grpo", correction=correction("truncate", level=level), num_minibatches=2)


def test_an_entropy_bonus_is_the_same() -> None:
    train_both("grpo", entropy_coef=0.1)


def test_temperature_reaches_the_workers() -> None:
    train_both("grpo", temperature=0.7)


def test_rates_follow_the_schedule() -> None:
    rates = schedule("cosine", warmup_steps=2, total=8, floor=0.1)
    ours, theirs, _ = train_both("grpo", schedule=rates, num_minibatches=2)
    assert theirs.optimizer_steps == ours.optimizer_steps == 4


def test_the_critic_warms_up_alone() -> None:
    _, _, behind = train_both("ppo", critic_settings={"warmup_updates": 1})
    assert behind.calls.count("critic") == 2
    assert behind.calls.count("policy") == 1


def test_a_policy_that_moved_too_far_drops_the_rest_of_an_update() -> None:
    _, theirs, behind = train_both("grpo", num_epochs=4, target_kl=1e-9, lr=0.1)
    assert theirs.optimizer_steps == 2  # the first step of each update
    assert behind.calls.count("policy") == 2


def test_a_batch_without_advantages_sends_nothing() -> None:
    ours, theirs, behind = pair("grpo")
    groups = [
        replace(group, trajectories=[replace(t, outcome_reward=1.0, steps=_unpaid(t)) for t in group.trajectories])
        for group in batches(ours)[0]
    ]
    assert_same(ours.update(credit_for("grpo", groups, ours)), theirs.update(credit_for("grpo", groups, theirs)))
    assert behind.calls == []


def _unpaid(trajectory: Any) -> list[Any]:
    return [replace(step, reward=0.0) for step in trajectory.steps]


def broken(credited: list[CreditedTrajectory]) -> list[CreditedTrajectory]:
    first = replace(credited[0], advantages=[[float("nan")] * len(row) for row in credited[0].advantages])
    return [first, *credited[1:]]


def test_an_advantage_that_is_not_finite_is_never_sent() -> None:
    ours, theirs, behind = pair("grpo")
    credited = broken(credit_for("grpo", batches(ours)[0], ours))
    mine, other = ours.update(credited), theirs.update(credited)
    assert mine["skipped_updates"] == other["skipped_updates"] == 1
    assert mine["nonfinite_updates"] == other["nonfinite_updates"] == 1
    assert "policy" not in behind.calls
    assert_same_weights(ours, behind)


def test_several_steps_in_a_row_that_are_not_finite_end_the_run() -> None:
    ours, theirs, _ = pair("grpo", max_nonfinite_updates=2)
    credited = broken(credit_for("grpo", batches(ours)[0], ours))
    theirs.update(credited)
    with pytest.raises(TrainingError, match="2 optimizer steps in a row were not finite"):
        theirs.update(credited)


def test_a_kl_in_the_reward_is_the_same() -> None:
    ours, theirs, behind = pair("grpo", reference=True)
    groups = batches(ours)[0]
    with torch.no_grad():
        for network, scale in ((behind.network, 1.01), (ours.policy.model, 1.01)):
            for parameter in network.parameters():
                parameter.mul_(scale)  # away from the reference
    attempts = attempts_of(trainable(groups))
    for mine, other in zip(ours.kl_to_reference(attempts), theirs.kl_to_reference(attempts), strict=True):
        for a, b in zip(mine, other, strict=True):
            assert b == pytest.approx(a, abs=1e-5)


def test_values_and_bootstraps_are_those_of_the_same_positions() -> None:
    ours, theirs, _ = pair("ppo")
    attempts = attempts_of(trainable(batches(ours)[0]))
    for mine, other in zip(ours.values(attempts), theirs.values(attempts), strict=True):
        assert (mine.bootstrap is None) == (other.bootstrap is None)
        if mine.bootstrap is not None:
            assert other.bootstrap == pytest.approx(mine.bootstrap, abs=1e-6)
        for a, b in zip(mine.per_token, other.per_token, strict=True):
            assert b == pytest.approx(a, abs=1e-6)


def test_a_restored_learner_goes_on_with_the_same_rates() -> None:
    _, theirs, _ = train_both("ppo", schedule=schedule("linear", warmup_steps=1, total=9, floor=0.0))
    _, fresh, _ = pair("ppo", schedule=schedule("linear", warmup_steps=1, total=9, floor=0.0))
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == theirs.state_dict()
    assert fresh.updates == 2
