from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.errors import ConfigError, TrainingError
from agent_r1.learn import Learner, PolicyModel, as_demonstrations, assign_credit, get_algorithm, supervised_loss
from agent_r1.learn.batch import merge_steps, pack
from agent_r1.learn.learner import cosine, warmup
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import group, random_credited, random_trajectory, step, tiny_model, trajectory

GRPO = get_algorithm("grpo")


def make_learner(**overrides: Any) -> Learner:
    policy = overrides.pop("policy", None) or PolicyModel(tiny_model("llama-tied"))
    settings: dict[str, Any] = {
        "loss": GRPO.loss,
        "lr": 1e-2,
        "temperature": 1.0,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_tokens_per_pack": 8192,
        "max_nonfinite_updates": 3,
    }
    return Learner(policy, **(settings | overrides))


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def batch(seed: int = 0, count: int = 6) -> list[CreditedTrajectory]:
    return random_credited(random.Random(seed), kind="mixed", count=count)


def with_old_logprob(item: CreditedTrajectory, value: float) -> CreditedTrajectory:
    first = item.trajectory.steps[0]
    bad = replace(first, response_logprobs=[value, *first.response_logprobs[1:]])
    return replace(item, trajectory=replace(item.trajectory, steps=[bad, *item.trajectory.steps[1:]]))


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely() -> None:
    learner = make_learner()
    good, bad = trajectory(step([1, 2], [3]), reward=1.0), trajectory(step([1, 2], [4]))
    credited = assign_credit([group(good, bad)], GRPO)
    model: Any = learner.policy.model
    model.set_attn_implementation("eager")

    def margin() -> float:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
        return float(logits[3] - logits[4])

    before = margin()
    model.set_attn_implementation("agent_r1_segments")
    learner.update(credited)
    model.set_attn_implementation("eager")
    assert margin() > before


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
    (packed,) = pack(merge_steps(credited), 10_000)
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
    idle = [
        replace(item, advantages=[[0.0] * len(row) for row in item.advantages]) if index % 2 else item
        for index, item in enumerate(credited)
    ]
    learner = make_learner()
    metrics = learner.update(idle)
    assert metrics["tokens_trained"] < metrics["tokens"]
    # the plain way: a penalty so small that it rounds away forces every segment through the model
    policy = PolicyModel(tiny_model("llama-tied"))
    full = make_learner(policy=policy, kl_coef=1e-30, reference=policy.frozen_copy())
    assert full.update(idle)["tokens_trained"] == metrics["tokens"]
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


def test_odd_shapes_stay_finite() -> None:
    long = random_trajectory(random.Random(2), kind="append", name="long", num_steps=200)
    items = [
        CreditedTrajectory(trajectory=long, advantages=[[1.0] * len(s.response_ids) for s in long.steps]),
        CreditedTrajectory(trajectory=trajectory(step([1], [])), advantages=[[]]),
        CreditedTrajectory(trajectory=trajectory(), advantages=[]),
        with_old_logprob(batch()[0], -1e4),
        with_old_logprob(batch()[1], -math.inf),
    ]
    for part in (items, items[:1], items[1:2]):
        metrics = make_learner(max_tokens_per_pack=64).update(part)
        finite = {name: value for name, value in metrics.items() if name not in ("log_ratio_max", "mismatch_max")}
        assert all(math.isfinite(value) for value in finite.values())
        assert metrics["skipped_updates"] == 0


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
    with pytest.raises(TrainingError, match=r"3 optimizer steps in a row were not finite .* trajectories: t2\. "):
        learner.update(poisoned)
    assert learner.optimizer_steps == 1


def test_when_only_the_gradient_overflows_every_trajectory_is_a_suspect() -> None:
    learner = make_learner(max_nonfinite_updates=1)
    parameter = next(iter(learner.policy.model.parameters()))
    parameter.register_hook(lambda gradient: gradient * math.inf)
    before = snapshot(learner)
    with pytest.raises(TrainingError, match=r"trajectories: t0, t1\. "):
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


def test_the_learning_rate_rises_linearly_and_then_stays() -> None:
    learner = make_learner(lr=1e-2, schedule=warmup(3))
    assert [learner.update(batch())["lr"] for _ in range(6)] == [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]


def test_the_cosine_falls_to_its_floor_at_the_last_step() -> None:
    # 2 steps of warm-up (1/3, 2/3 of full), then half a cosine: half way between 1 and 0.1 in the middle
    scale = cosine(2, 10)
    assert [scale(s) for s in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0], abs=0.04)
    assert scale(6) == pytest.approx((1 + 0.1) / 2)
    assert scale(10) == scale(50) == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    # no gradient worth mentioning, so one step multiplies what decays by 1 - lr * weight_decay = 0.9
    policy = PolicyModel(tiny_model())
    learner = make_learner(policy=policy, lr=0.1, weight_decay=1.0, entropy_coef=1e-30)
    zero = [replace(item, advantages=[[0.0] * len(row) for row in item.advantages]) for item in batch()]
    before = snapshot(learner)
    learner.update(zero)
    for name, tensor in learner.weights().items():
        factor = 0.9 if tensor.ndim >= 2 else 1.0
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_the_norm_asked_for() -> None:
    learner = make_learner(max_grad_norm=0.01)
    metrics = learner.update(batch())
    assert metrics["grad_norm"] > 0.01  # reported before clipping
    norms = [p.grad.norm() for p in learner.policy.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_minibatches_and_epochs_each_take_an_optimizer_step() -> None:
    learner = make_learner(num_minibatches=3, num_epochs=2)
    assert learner.update(batch(count=6))["optimizer_steps"] == 6
    assert learner.update(batch(count=2))["optimizer_steps"] == 6 + 2 * 2  # two trajectories: two mini-batches


def test_the_kl_penalty_pulls_the_policy_back_to_the_reference() -> None:
    policy = PolicyModel(tiny_model("llama-tied"))
    reference = policy.frozen_copy()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    zero = [replace(item, advantages=[[0.0] * len(row) for row in item.advantages]) for item in batch()]
    for estimator in ("k2", "k3"):
        learner = make_learner(
            policy=policy, lr=1e-3, kl_coef=1.0, reference=reference, kl_estimator=estimator, num_epochs=4
        )
        first, *_, last = [learner.update(zero)["kl_to_reference"] for _ in range(4)]
        assert 0 < last < first


def test_the_entropy_bonus_raises_the_entropy() -> None:
    learner = make_learner(lr=1e-3, entropy_coef=1.0)
    zero = [replace(item, advantages=[[0.0] * len(row) for row in item.advantages]) for item in batch()]
    first, *_, last = [learner.update(zero)["entropy"] for _ in range(5)]
    assert last > first


def test_supervised_training_learns_to_repeat_the_demonstration() -> None:
    learner = make_learner(loss=supervised_loss, lr=3e-2)
    demonstrations = as_demonstrations([trajectory(step([1, 2], [3, 4, 5]), step([1, 2, 3, 4, 5, 6], [7]))])
    first = learner.update(demonstrations)
    for _ in range(30):
        last = learner.update(demonstrations)
    assert first["loss"] == pytest.approx(first["nll"])
    assert last["nll"] < 0.1 < first["nll"]
    assert "mismatch_kl" not in last  # demonstrations have no sampler to disagree with


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "Learner.lr must be positive, got 0.0"),
        ({"temperature": 0.0}, "Learner.temperature must be positive, got 0.0"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1 but the reference model is missing"),
        ({"kl_estimator": "k1"}, "unknown KL estimator 'k1'.*gradient is zero on average"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**settings)


def test_a_reference_without_a_penalty_is_refused() -> None:
    policy = PolicyModel(tiny_model())
    with pytest.raises(ConfigError, match=r"kl_coef is 0\.0 but the reference model is given"):
        make_learner(policy=policy, reference=policy.frozen_copy())
