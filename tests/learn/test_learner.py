from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.errors import ConfigError, TrainingError
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.batch.minibatch import reshuffle
from agent_r1.learn.batch.packs import Pack, merge_steps, pack, split_evenly
from agent_r1.learn.credit import as_demonstrations, assign_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import supervised_loss
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import warmup
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import (
    credit_for,
    gradients_of,
    group,
    learner_for,
    on_policy,
    random_credited,
    random_groups,
    random_trajectory,
    step,
    tiny_model,
    trajectory,
)

GRPO = get_algorithm("grpo")


def make_learner(policy: PolicyModel | None = None, **overrides: Any) -> Learner:
    return learner_for("grpo", policy, **({"lr": 1e-2, "max_tokens_per_pack": 8192} | overrides))


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def batch(seed: int = 0, count: int = 6) -> list[CreditedTrajectory]:
    return random_credited(random.Random(seed), kind="mixed", count=count)


def idle(credited: list[CreditedTrajectory]) -> list[CreditedTrajectory]:
    return [replace(item, advantages=[[0.0] * len(row) for row in item.advantages]) for item in credited]


def with_old_logprob(item: CreditedTrajectory, value: float) -> CreditedTrajectory:
    first = item.trajectory.steps[0]
    bad = replace(first, response_logprobs=[value, *first.response_logprobs[1:]])
    return replace(item, trajectory=replace(item.trajectory, steps=[bad, *item.trajectory.steps[1:]]))


def test_metrics_say_what_was_trained() -> None:
    # append-only, two steps each: one segment of 1+2+1+1 = 5 tokens per trajectory, 3 of them trained
    pair = [trajectory(step([1], [2, 3]), step([1, 2, 3, 4], [5]), reward=r) for r in (0.0, 1.0)]
    metrics = make_learner(max_tokens_per_pack=20).update(assign_credit([group(*pair)], GRPO))
    assert metrics["trajectories"] == 2
    assert metrics["tokens"] == metrics["tokens_trained"] == 6
    assert metrics["tokens_computed"] == 10
    assert metrics["segments"] == 2
    assert metrics["steps_per_segment"] == 2
    assert metrics["packs"] == 1
    assert metrics["packing_efficiency"] == 10 / 20
    assert metrics["optimizer_steps"] == 1
    assert metrics["empty_update"] == metrics["skipped_updates"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_with_the_samplers_own_logprobs_the_mismatch_is_zero() -> None:
    learner = make_learner()
    credited = batch()
    (packed,) = pack(merge_steps(item.trajectory for item in credited), 10_000)
    with torch.no_grad():
        logprobs = iter(learner.policy.logprobs(packed, temperature=1.0)[0].tolist())
    exact = []
    for item in credited:
        steps = [replace(s, response_logprobs=[next(logprobs) for _ in s.response_ids]) for s in item.trajectory.steps]
        exact.append(replace(item, trajectory=replace(item.trajectory, steps=steps)))
    metrics = learner.update(exact)
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["mismatch_kl"] < 1e-6
    assert metrics["clip_fraction"] == 0
    # after one step the policy has moved: the second epoch is off-policy, the mismatch is still that of the first
    metrics = make_learner(num_epochs=3).update(exact)
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["approx_kl"] > 1e-6


def test_segments_without_advantage_are_counted_but_not_computed() -> None:
    credited = batch()
    some_idle = [item for pair in zip(credited[::2], idle(credited[1::2]), strict=True) for item in pair]
    learner = make_learner()
    metrics = learner.update(some_idle)
    assert metrics["tokens_trained"] < metrics["tokens"]
    # the plain way: a penalty so small that it rounds away forces every segment through the model
    policy = PolicyModel(tiny_model("llama-tied"))
    full = make_learner(policy=policy, kl_coef=1e-30, reference=policy.copy())
    assert full.update(some_idle)["tokens_trained"] == metrics["tokens"]
    for name, tensor in full.weights().items():
        torch.testing.assert_close(tensor, learner.weights()[name], rtol=0, atol=1e-6)


def test_a_batch_with_nothing_to_learn_changes_nothing() -> None:
    learner = make_learner(weight_decay=0.1)
    learner.update(batch())
    before, state = snapshot(learner), learner.optimizer_steps
    same_reward = assign_credit([group(*(random_trajectory(random.Random(1), kind="append", name="a"),) * 3)], GRPO)
    for nothing in ([], same_reward):
        metrics = learner.update(nothing)
        assert metrics["empty_update"] == 1
        assert metrics["loss"] == metrics["grad_norm"] == 0
        assert all(math.isfinite(value) for value in metrics.values())
    assert same(snapshot(learner), before)
    assert learner.optimizer_steps == state


def test_a_nonfinite_update_is_skipped_and_several_in_a_row_name_the_culprit() -> None:
    learner = make_learner(max_nonfinite_updates=3)
    good = batch()
    poisoned = [*good[:2], with_old_logprob(good[2], math.nan), *good[3:]]
    before = snapshot(learner)
    for count in (1, 2):
        metrics = learner.update(poisoned)
        assert (metrics["skipped_updates"], metrics["nonfinite_updates"]) == (1, count)
        assert {name for name, value in metrics.items() if not math.isfinite(value)} == {"loss", "grad_norm"}
    assert same(snapshot(learner), before)
    learner.update(good)  # a finite one in between: the row of failures starts again
    learner.update(poisoned)
    learner.update(poisoned)
    with pytest.raises(TrainingError, match=r"^3 optimizer steps .* trajectories t2, or"):
        learner.update(poisoned)
    assert learner.optimizer_steps == 1


def test_when_only_the_gradient_overflows_every_trajectory_is_a_suspect() -> None:
    learner = make_learner(max_nonfinite_updates=1)
    parameter = next(iter(learner.policy.model.parameters()))
    parameter.register_hook(lambda gradient: gradient * math.inf)
    before = snapshot(learner)
    with pytest.raises(TrainingError, match="trajectories t0, t1, or"):
        learner.update(batch(count=2))
    assert same(snapshot(learner), before)


def test_a_restored_learner_takes_bit_for_bit_the_same_next_step() -> None:
    settings: dict[str, Any] = {"weight_decay": 0.1, "schedule": warmup(10), "num_minibatches": 2, "num_epochs": 2}
    learner = make_learner(**settings)
    learner.update(batch(0))
    file = io.BytesIO()
    torch.save({"weights": learner.policy.model.state_dict(), "learner": learner.state_dict()}, file)
    expected = learner.update(batch(1))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    restored = make_learner(**settings, policy=PolicyModel(tiny_model("llama-tied", seed=9)))
    restored.policy.model.load_state_dict(saved["weights"])
    restored.load_state_dict(saved["learner"])
    assert restored.update(batch(1)) == expected
    assert same(snapshot(restored), snapshot(learner))


def test_matrices_decay_and_vectors_do_not() -> None:
    # no gradient worth mentioning, so one step multiplies what decays by 1 - lr * weight_decay = 0.9
    policy = PolicyModel(tiny_model())
    learner = make_learner(policy=policy, lr=0.1, weight_decay=1.0, entropy_coef=1e-30)
    zero = idle(batch())
    before = snapshot(learner)
    learner.update(zero)
    for name, tensor in learner.weights().items():
        factor = 0.9 if tensor.ndim >= 2 else 1.0
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_max_grad_norm() -> None:
    learner = make_learner(max_grad_norm=0.01)
    metrics = learner.update(batch())
    assert metrics["grad_norm"] > 0.01  # reported before clipping
    norms = [p.grad.norm() for p in learner.policy.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_entropy_bonus_has_the_gradient_of_the_mean_entropy() -> None:
    policy, zero = PolicyModel(tiny_model("llama-tied")), idle(batch())
    packs = pack(merge_steps(item.trajectory for item in zero), 10_000)
    learner = make_learner(policy=policy.copy(), max_grad_norm=math.inf, entropy_coef=0.5, max_tokens_per_pack=16)
    assert learner.update(zero)["loss"] == pytest.approx(-0.5 * learner_entropy(policy, packs).item(), rel=1e-5)
    (-0.5 * learner_entropy(policy, packs)).backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients_of(learner)[name], parameter.grad, rtol=1e-4, atol=1e-6)


def learner_entropy(policy: PolicyModel, packs: list[Pack]) -> torch.Tensor:
    """Mean over response tokens of -sum p log p, from the logits of the model itself."""
    total, count = torch.zeros(()), 0
    for packed in packs:
        logits_NV = policy._logits(policy._hidden(packed))
        logp_TV = logits_NV[packed.sources_T].log_softmax(-1)
        total, count = total - (logp_TV.exp() * logp_TV).sum(), count + packed.num_trained
    return total / count


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce", "ppo", "steppo"])
def test_epochs_and_minibatches_are_the_same_steps_taken_by_hand(name: str) -> None:
    policy, rng = PolicyModel(tiny_model()), random.Random(2)
    groups = on_policy(random_groups(rng, rows=2, size=3), policy, rng, noise=0.1)
    learner = learner_for(name, policy.copy(), num_minibatches=2, num_epochs=3, weight_decay=0.1, schedule=warmup(3))
    by_hand = learner_for(name, policy.copy(), weight_decay=0.1, schedule=warmup(3))
    credited = credit_for(name, groups, learner)
    learner.update(credited)
    # Mini-batches are whole trajectories: in the order given, the first 3 of 6 and then the others; then reshuffled.
    orders = [list(range(len(credited))), *(reshuffle(credited, f"epoch:0:0:{epoch}") for epoch in (1, 2))]
    assert all(sorted(order) == orders[0] for order in orders)
    for order in orders:
        parts = split_evenly([credited[position] for position in order], 2)
        assert [len(part) for part in parts] == [len(credited) // 2, len(credited) - len(credited) // 2]
        for part in parts:
            by_hand.update(part)
    assert learner.optimizer_steps == by_hand.optimizer_steps == 6
    assert same(snapshot(learner), snapshot(by_hand))
    if learner.critic is not None and by_hand.critic is not None:
        assert same(learner.critic.head.state_dict(), by_hand.critic.head.state_dict())
        assert same(dict(learner.critic.backbone.weights()), dict(by_hand.critic.backbone.weights()))


@pytest.mark.parametrize("own_old_logprobs", [False, True])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "reinforce", "ppo"])
def test_every_kind_of_loss_reports_the_mismatch_with_the_sampler(name: str, own_old_logprobs: bool) -> None:
    policy, rng = PolicyModel(tiny_model()), random.Random(2)
    learner = learner_for(name, policy, lr=1e-2, num_minibatches=2, own_old_logprobs=own_old_logprobs)
    groups = on_policy(random_groups(rng, rows=4), policy, rng, noise=0.1)
    metrics = learner.update(credit_for(name, groups, learner))
    # noise of 0.1 on each log-prob: e^d - d - 1 is about d^2 / 2 = 0.005
    assert metrics["mismatch_kl"] == pytest.approx(0.005, rel=0.5)
    assert 0.1 < metrics["mismatch_max"] < 0.5


def test_supervised_training_learns_to_repeat_the_demonstration() -> None:
    learner = make_learner(loss=supervised_loss, lr=3e-2)
    demonstrations = as_demonstrations([trajectory(step([1, 2], [3, 4, 5]), step([1, 2, 3, 4, 5, 6], [7]))])
    first = learner.update(demonstrations)
    for _ in range(30):
        last = learner.update(demonstrations)
    assert first["loss"] == pytest.approx(first["nll"])
    assert last["nll"] < 0.1 < first["nll"]
    assert "mismatch_kl" not in last  # demonstrations have no sampler to disagree with


@pytest.mark.parametrize("missing", ["reference", "kl_estimator"])
def test_a_kl_penalty_needs_a_reference_and_an_estimator(missing: str) -> None:
    settings: dict[str, Any] = {"reference": PolicyModel(tiny_model()), "kl_estimator": "k3", missing: None}
    with pytest.raises(ConfigError, match="kl_coef"):
        make_learner(kl_coef=0.1, **settings)


def test_the_kl_for_a_reward_is_the_learners_logprob_minus_the_references() -> None:
    reference = PolicyModel(tiny_model(seed=4))
    attempts = [item.trajectory for item in batch()]
    policy = PolicyModel(tiny_model(seed=5))
    got = make_learner(policy=policy, reference=reference, max_tokens_per_pack=8).kl_to_reference(attempts)
    for attempt, rows in zip(attempts, got, strict=True):
        for made, row in zip(attempt.steps, rows, strict=True):
            if not made.response_ids:
                assert row == []
                continue
            (packed,) = pack(merge_steps([trajectory(made)]), 1)
            with torch.no_grad():
                own, other = (model.logprobs(packed, temperature=1.0)[0] for model in (policy, reference))
            assert row == pytest.approx((own - other).tolist(), abs=1e-5)


def test_ratios_to_the_learners_own_logprobs_start_at_one_and_report_the_mismatch() -> None:
    noisy = make_learner(own_old_logprobs=True, num_epochs=1).update(batch())  # the sampler's log-probs are invented
    assert noisy["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert noisy["clip_fraction"] == 0.0
    assert noisy["mismatch_max"] == pytest.approx(make_learner().update(batch())["mismatch_max"], rel=1e-4)
    assert noisy["importance_mean"] == 1.0


@pytest.mark.parametrize("name", ["gspo", "steppo", "grpo"])
def test_a_clip_around_the_learners_own_logprobs_is_for_the_second_update_of_a_batch(name: str) -> None:
    def clipped(num_epochs: int) -> dict[str, float]:
        narrow = get_algorithm(name, clip_low=1e-4, clip_high=1e-4)
        learner = learner_for(name, lr=1e-2, loss=narrow.loss, own_old_logprobs=True, num_epochs=num_epochs)
        return learner.update(credit_for(name, random_groups(random.Random(1), rows=3), learner))

    assert clipped(1)["clip_fraction"] == 0.0
    assert clipped(2)["clip_fraction"] > 0.0


def test_values_that_are_not_finite_are_refused() -> None:
    learner = learner_for("ppo")
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match="critic values are not finite"):
        learner.values([item.trajectory for item in batch()])


def test_a_policy_equal_to_its_reference_has_no_kl() -> None:
    policy = PolicyModel(tiny_model(seed=5))
    rows = make_learner(policy=policy, reference=policy.copy()).kl_to_reference([item.trajectory for item in batch()])
    assert {value for per_token in rows for row in per_token for value in row} == {0.0}


@pytest.mark.parametrize(("saved", "own"), [("ppo", "grpo"), ("grpo", "ppo")])
def test_a_state_with_a_critic_does_not_fit_a_learner_without_one(saved: str, own: str) -> None:
    with pytest.raises(ConfigError, match="critic"):
        learner_for(own).load_state_dict(learner_for(saved).state_dict())
