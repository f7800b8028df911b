"""Several updates on one batch: how trajectories are reshuffled between epochs, and when the rest is dropped."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.errors import ConfigError
from agent_r1.learn.batch.minibatch import reshuffle
from agent_r1.learn.batch.packs import merge_steps, nested, pack, step_sizes
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import LossInputs, LossOutput
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Support
from tests.learn.builders import (
    VOCABULARY,
    correction,
    learner_for,
    new_critic,
    on_packs,
    random_credited,
    step,
    tiny_model,
    trajectory,
)

POLICY = PolicyModel(tiny_model())


def batch(count: int = 8) -> list[CreditedTrajectory]:
    return random_credited(random.Random(0), kind="mixed", count=count)


def sampled_by(policy: PolicyModel, credited: list[CreditedTrajectory]) -> list[CreditedTrajectory]:
    """The same trajectories with this policy's own log-probs as those of the sampler."""
    attempts = [item.trajectory for item in credited]
    packs = pack(merge_steps(attempts), 10_000)
    with torch.no_grad():
        own_R = on_packs(packs, lambda part: policy.logprobs(part, temperature=1.0)[0], step_sizes(attempts))
    rows = nested(own_R, attempts)
    return [
        replace(
            item,
            trajectory=replace(
                item.trajectory,
                steps=[
                    replace(s, response_logprobs=logprobs)
                    for s, logprobs in zip(item.trajectory.steps, heard, strict=True)
                ],
            ),
        )
        for item, heard in zip(credited, rows, strict=True)
    ]


def weights_after(credited: list[CreditedTrajectory], **settings: Any) -> dict[str, torch.Tensor]:
    learner = learner_for("grpo", POLICY.copy(), num_minibatches=2, **settings)
    learner.update(credited)
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def of_row(row: str, name: str) -> CreditedTrajectory:
    made = replace(trajectory(step([1], [2]), name=name), row_id=row)
    return CreditedTrajectory(trajectory=made, advantages=[[1.0]])


def test_rows_are_shuffled_and_their_attempts_stay_together() -> None:
    credited = [of_row(f"row{i // 3}", f"t{i}") for i in range(24)]
    order = reshuffle(credited, "a")
    assert sorted(order) == list(range(24))
    rows = [position // 3 for position in order]
    assert all(len(set(rows[start : start + 3])) == 1 for start in range(0, 24, 3))
    assert rows != sorted(rows)
    assert any(order[start : start + 3] != sorted(order[start : start + 3]) for start in range(0, 24, 3))
    assert reshuffle(credited, "a") == order != reshuffle(credited, "b")


@pytest.mark.parametrize("other", [{"seed": 1}, {"updates": 1}])
def test_the_order_depends_on_seed_and_update(other: dict[str, int]) -> None:
    def orders(**settings: int) -> list[list[str]]:
        learner = learner_for("grpo", POLICY, num_minibatches=2, num_epochs=3, seed=settings.get("seed", 0))
        learner.updates = settings.get("updates", 0)
        parts = [learner._prepare(credited, range(start, start + 4)) for start in (0, 4)]
        return [part.trajectory_names for part in learner._passes(credited, parts)]

    credited = batch()
    first = orders()
    names = [item.trajectory.trajectory_id for item in credited]
    assert first[0] + first[1] == names  # the first epoch is in the order given
    assert sorted(first[2] + first[3]) == sorted(first[4] + first[5]) == sorted(names)
    assert first[2:4] != first[0:2] != first[4:6] != first[2:4]
    assert orders() == first
    assert orders(**other)[:2] == first[:2]
    assert orders(**other)[2:] != first[2:]


def test_one_mini_batch_is_laid_out_once_for_all_epochs() -> None:
    learner, credited = learner_for("grpo", POLICY, num_epochs=3), batch()
    whole = learner._prepare(credited, range(8))
    assert [part is whole for part in learner._passes(credited, [whole])] == [True] * 3


def test_reshuffled_epochs_train_on_what_was_known_before_the_first() -> None:
    # With its own old log-probs, a learner does what one does whose sampler said exactly these.
    own = weights_after(batch(), num_epochs=3, own_old_logprobs=True, lr=1e-2)
    told = weights_after(sampled_by(POLICY, batch()), num_epochs=3, lr=1e-2)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, told[name], rtol=0, atol=1e-5)
    # The invented log-probs of the batch are far from them, so that old log-probs of the wrong kind would show.
    other = weights_after(batch(), num_epochs=3, lr=1e-2)
    assert max((own[name] - other[name]).abs().max().item() for name in own) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": correction("truncate", cap=1.5)},
        {"kl_coef": 0.5, "reference": PolicyModel(tiny_model(seed=3))},
    ],
    ids=["correction", "reference"],
)
def test_weights_and_reference_follow_their_trajectories(settings: dict[str, Any]) -> None:
    """Every trajectory alone in its mini-batch: then the order of an epoch says which column belongs to which."""
    credited = batch(4)
    learner = learner_for("grpo", POLICY.copy(), num_minibatches=4, num_epochs=2, **settings)
    first = [learner._with_old_logprobs(learner._prepare(credited, [position])) for position in range(4)]
    *_, a, b, c, d = learner._passes(credited, first)
    by_name = {part.trajectory_names[0]: part for part in first}
    assert [part.trajectory_names for part in (a, b, c, d)] != [part.trajectory_names for part in first]
    for part in (a, b, c, d):
        known = by_name[part.trajectory_names[0]].columns
        for name in ("old_logprobs_R", "importance_R", "advantages_R", "reference_logprobs_R"):
            expected, got = getattr(known, name), getattr(part.columns, name)
            assert (expected is None) == (got is None)
            assert expected is None or torch.equal(expected, got)


def test_the_ids_that_tokens_were_sampled_from_follow_their_trajectories() -> None:
    def kept(token: int) -> list[int]:
        return sorted({token, (token + 1) % VOCABULARY})

    credited = [
        replace(
            item,
            trajectory=replace(
                item.trajectory,
                steps=[
                    replace(s, temperature=1.0, top_p=1.0, top_k=2, support=Support.of(map(kept, s.response_ids)))
                    for s in item.trajectory.steps
                ],
            ),
        )
        for item in batch()
    ]
    learner = learner_for("grpo", POLICY.copy(), num_minibatches=2, num_epochs=3)
    parts = [learner._prepare(credited, range(start, start + 4)) for start in (0, 4)]
    packs = [packed for part in learner._passes(credited, parts) for packed in part.packs]
    assert sum(packed.num_trained for packed in packs) == 3 * sum(i.trajectory.num_response_tokens for i in credited)
    for packed in packs:
        assert packed.supports is not None
        ids_TK = packed.supports.chunk(slice(0, packed.num_trained), torch.device("cpu"))
        assert ids_TK.tolist() == [kept(target) for target in packed.targets_T.tolist()]


def too_far(target_kl: float | None, **settings: Any) -> tuple[Learner, dict[str, float]]:
    credited = sampled_by(POLICY, batch(4))
    learner = learner_for("grpo", POLICY.copy(), lr=1e-3, num_epochs=6, target_kl=target_kl, **settings)
    return learner, learner.update(credited)


def test_the_rest_of_an_update_is_dropped_when_the_policy_has_moved_too_far() -> None:
    # The KL before each of the six steps, from learners that stop after one more step each.
    kls: list[float] = []
    for epochs in range(1, 7):
        learner = learner_for("grpo", POLICY.copy(), lr=1e-3, num_epochs=epochs)
        means = learner.update(sampled_by(POLICY, batch(4)))
        kls.append(epochs * means["approx_kl"] - sum(kls))  # a mean over all steps so far
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls == sorted(kls)
    target = (kls[2] + kls[3]) / 2
    learner, metrics = too_far(target)
    assert metrics["optimizer_steps"] == 3  # the fourth would have started beyond it
    assert metrics["kl_dropped_updates"] == 3
    assert metrics["approx_kl"] == pytest.approx(sum(kls[:3]) / 3, rel=1e-4)  # of the steps taken
    by_hand = learner_for("grpo", POLICY.copy(), lr=1e-3, num_epochs=3)
    by_hand.update(sampled_by(POLICY, batch(4)))
    assert all(torch.equal(tensor, by_hand.weights()[name]) for name, tensor in learner.weights().items())


def test_far_targets_change_nothing_and_the_first_step_is_always_taken() -> None:
    free, metrics = too_far(None)
    assert "kl_dropped_updates" not in metrics
    loose, metrics = too_far(1e6)
    assert metrics["kl_dropped_updates"] == 0
    assert all(torch.equal(tensor, free.weights()[name]) for name, tensor in loose.weights().items())
    # Before the first step the KL is what sampler and learner disagree by: no reason to learn nothing at all.
    learner = learner_for("grpo", POLICY.copy(), num_epochs=6, target_kl=1e-9)
    metrics = learner.update(batch(4))  # with invented log-probs
    assert (metrics["optimizer_steps"], metrics["kl_dropped_updates"]) == (1, 5)
    assert learner.update(batch(4))["optimizer_steps"] == 2


def test_dropped_steps_count_in_the_schedule_and_a_waiting_policy_cannot_move_too_far() -> None:
    learner, _ = too_far(1e-9)
    assert (learner.optimizers["optimizer"].steps, learner.optimizers["optimizer"].planned) == (1, 6)
    policy = POLICY.copy()
    waiting = learner_for(
        "ppo", policy, critic=new_critic(policy, shared=False, warmup_updates=1), num_epochs=2, target_kl=1e-9
    )
    targets = [[list[float | None](row) for row in item.advantages] for item in batch(4)]
    metrics = waiting.update(
        [replace(i, values=i.advantages, value_targets=t) for i, t in zip(batch(4), targets, strict=True)]
    )
    assert metrics["kl_dropped_updates"] == 0
    assert waiting.optimizers["critic_optimizer"].steps == 2


def test_target_kl_needs_a_loss_that_reports_approx_kl() -> None:
    def silent(inputs: LossInputs) -> LossOutput:
        return LossOutput(loss=-(inputs.advantages_T * inputs.logprobs_T).sum())

    with pytest.raises(ConfigError, match="target_kl needs a loss that reports approx_kl"):
        learner_for("grpo", POLICY.copy(), loss=silent, num_epochs=2, target_kl=0.1).update(batch(4))


def test_ratio_and_entropy_of_every_token_are_noted() -> None:
    credited = batch()
    # Log-probs of the sampler that are ln 2 below the policy's: every token became twice as likely.
    lower = [
        replace(s, response_logprobs=[logprob - math.log(2) for logprob in s.response_logprobs])
        for item in sampled_by(POLICY, credited)
        for s in item.trajectory.steps
    ]
    steps = iter(lower)
    credited = [
        replace(item, trajectory=replace(item.trajectory, steps=[next(steps) for _ in item.trajectory.steps]))
        for item in credited
    ]
    learner = learner_for("grpo", POLICY.copy(), entropy_coef=0.01)  # so that tokens without advantage are computed too
    metrics = learner.update(credited)
    assert list(learner.noted) == [item.trajectory.trajectory_id for item in credited]
    notes = [learner.noted[item.trajectory.trajectory_id] for item in credited]
    ratios = [ratio for each in notes for row in each["ratios"] for ratio in row]
    entropies = [entropy for each in notes for row in each["entropies"] for entropy in row]
    assert ratios == pytest.approx([2.0] * len(ratios), rel=1e-4)
    assert sum(entropies) / len(entropies) == pytest.approx(metrics["entropy"], rel=1e-4)
    for item, each in zip(credited, notes, strict=True):
        assert [len(row) for row in each["ratios"]] == [len(s.response_ids) for s in item.trajectory.steps]


def test_the_last_pass_over_a_token_is_noted_and_none_where_nothing_is_learned() -> None:
    first, *others = sampled_by(POLICY, batch())
    idle = replace(first, advantages=[[0.0] * len(row) for row in first.advantages])
    learner = learner_for("grpo", POLICY.copy(), num_minibatches=2, num_epochs=3, lr=1e-2)
    learner.update([idle, *others])
    notes = learner.noted.pop(first.trajectory.trajectory_id)
    assert all(math.isnan(ratio) for row in notes["ratios"] for ratio in row)
    known = [ratio for each in learner.noted.values() for row in each["ratios"] for ratio in row]
    assert max(abs(ratio - 1) for ratio in known) > 0.01  # the first pass would have been within rounding of 1
    learner.update([])
    assert learner.noted == {}
