from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.errors import ConfigError
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.critic import Critic, explained_variance, with_last_state
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.rewards import RunningMoments, zeros
from agent_r1.types import CreditedTrajectory, Group, StopReason, Trajectory
from tests.learn.builders import (
    credit_for,
    critic_of,
    gradients_of,
    group,
    learner_for,
    new_critic,
    on_policy,
    random_groups,
    step,
    tiny_model,
    trajectory,
)

CRITIC_ROWS = ["ppo", "steppo"]
both_kinds = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])


def value_of(critic: Critic, token_ids: list[int]) -> float:
    """V after these tokens, by definition: the whole sequence through the model's own body, then the head."""
    model: Any = copy.deepcopy(critic.backbone.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        hidden_ND = model.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        return float(critic.head(hidden_ND[-1].float()))


def setup(shared: bool, *, name: str = "ppo", seed: int = 1, **overrides: Any) -> tuple[Learner, list[Group]]:
    policy, rng = PolicyModel(tiny_model()), random.Random(seed)
    groups = on_policy(random_groups(rng, rows=3), policy, rng, noise=0.1)
    return learner_for(name, policy, critic=critic_of(policy, shared=shared, **overrides)), groups


def critic_in(learner: Learner) -> Critic:
    assert learner.critic is not None
    return learner.critic


def attempts_of(groups: list[Group]) -> list[Trajectory]:
    return [attempt for each in groups for attempt in each.trajectories]


@both_kinds
def test_values_are_read_before_each_token_as_one_forward_per_token_would(shared: bool) -> None:
    learner, groups = setup(shared)
    attempts = attempts_of(groups)
    for attempt, values in zip(attempts, learner.values(attempts), strict=True):
        for made, row in zip(attempt.steps, values.per_token, strict=True):
            expected = [
                value_of(critic_in(learner), made.prompt_ids + made.response_ids[:n])
                for n in range(len(made.response_ids))
            ]
            assert row == pytest.approx(expected, abs=1e-5)


def test_truncated_episodes_are_completed_with_the_value_of_the_state_they_stopped_in() -> None:
    learner, _ = setup(True)

    def bootstrap(attempt: Trajectory) -> float | None:
        (values,) = learner.values([attempt])
        assert [len(row) for row in values.per_token] == [len(s.response_ids) for s in attempt.steps]
        return values.bootstrap

    def value(*token_ids: int) -> Any:
        return pytest.approx(value_of(critic_in(learner), list(token_ids)), abs=1e-5)

    attempt = trajectory(step([1, 2], [3]), step([1, 2, 3, 4], [5, 6]))
    assert bootstrap(attempt) is None  # it terminated
    assert bootstrap(replace(attempt, stop=StopReason.PARSE_LIMIT, next_prompt_ids=[1, 2])) is None
    assert bootstrap(replace(attempt, stop=StopReason.MAX_TOKENS)) is None  # cut off, and what was next is not known
    out_of_steps = replace(attempt, stop=StopReason.MAX_STEPS, next_prompt_ids=[1, 2, 3, 4, 5, 6, 7, 8])
    assert bootstrap(out_of_steps) == value(1, 2, 3, 4, 5, 6, 7, 8)
    rewritten = replace(attempt, stop=StopReason.MAX_STEPS, next_prompt_ids=[9, 9])  # the env rewrote history
    assert bootstrap(rewritten) == value(9, 9)


def test_the_step_added_for_the_last_state_is_seen_by_the_critic_alone() -> None:
    cut = replace(trajectory(step([1], [2, 3]), stop=StopReason.MAX_STEPS), next_prompt_ids=[1, 2, 3, 4])
    extended = with_last_state(cut)
    assert extended.steps[:-1] == cut.steps
    assert extended.steps[-1].prompt_ids == [1, 2, 3, 4]
    assert with_last_state(trajectory(step([1], [2]))).steps == [step([1], [2])]
    learner, _ = setup(True)
    (item,) = credit_for("ppo", [group(cut)], learner)
    assert item.trajectory is cut


def gradient_by_hidden(learner: Learner, credited: list[CreditedTrajectory]) -> list[tuple[Any, Tensor]]:
    """Per pack of one update: (pack, gradient of the loss by every hidden state of the critic's backbone)."""
    seen: list[tuple[Any, Tensor]] = []
    backbone, original = critic_in(learner).backbone, critic_in(learner).backbone._hidden

    def watched(pack: Any) -> Tensor:
        hidden_ND = original(pack)
        if hidden_ND.requires_grad:
            hidden_ND.retain_grad()
            seen.append((pack, hidden_ND))
        return hidden_ND

    backbone._hidden = watched  # type: ignore[method-assign]
    learner.update(credited)
    return [(pack, hidden_ND.grad) for pack, hidden_ND in seen if hidden_ND.grad is not None]


@pytest.mark.parametrize("name", CRITIC_ROWS)
def test_the_value_loss_reaches_exactly_the_positions_where_values_are_asked(name: str) -> None:
    # A separate critic has no other loss: ppo asks before every response token, steppo at the last prompt token alone.
    learner, groups = setup(False, name=name)
    credited = credit_for(name, groups, learner)
    wanted = sum(1 for item in credited for rows in item.value_targets or [] for t in rows if t is not None)
    steps = sum(1 for attempt in attempts_of(groups) for s in attempt.steps if s.response_ids)
    assert wanted == (steps if name == "steppo" else sum(a.num_response_tokens for a in attempts_of(groups)))
    reached = 0
    for pack, gradient_ND in gradient_by_hidden(learner, credited):
        first_T = torch.ones_like(pack.step_ids_T, dtype=torch.bool)
        first_T[1:] = pack.step_ids_T[1:] != pack.step_ids_T[:-1]
        asked = set((pack.sources_T[first_T] if name == "steppo" else pack.sources_T).tolist())
        touched = set(gradient_ND.abs().sum(-1).nonzero()[:, 0].tolist())
        assert touched == asked
        reached += len(touched)
    assert reached == wanted


@pytest.mark.parametrize("name", CRITIC_ROWS)
def test_a_separate_critic_does_not_touch_the_policys_gradient(name: str) -> None:
    gradients = []
    for value_coef in (1.0, 50.0):
        learner, groups = setup(False, name=name, value_coef=value_coef)
        learner.update(credit_for(name, groups, learner))
        gradients.append({k: v for k, v in gradients_of(learner).items() if not k.startswith("critic.")})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


def test_a_shared_critic_shapes_the_body_and_leaves_the_output_head_alone() -> None:
    gradients = []
    for value_coef in (0.0, 1.0):
        learner, groups = setup(True, value_coef=value_coef)
        learner = replace(learner, max_grad_norm=float("inf"))
        learner.update(credit_for("ppo", groups, learner))
        gradients.append(gradients_of(learner))
    without, with_value = gradients
    body = {key for key in without if key.startswith("model.")}
    assert all(not torch.equal(without[key], with_value[key]) for key in body)
    assert torch.equal(without["lm_head.weight"], with_value["lm_head.weight"])
    assert with_value["critic.head.weight"].any()


@pytest.mark.parametrize("name", CRITIC_ROWS)
@both_kinds
def test_warming_up_trains_the_critic_and_not_a_bit_of_the_policy(shared: bool, name: str) -> None:
    learner, groups = setup(shared, name=name, warmup_updates=2)
    before = {key: tensor.clone() for key, tensor in learner.weights().items()}
    head = critic_in(learner).head.weight.detach().clone()
    credited = credit_for(name, groups, learner)
    for number in range(3):
        metrics = learner.update(credited)
        warming_up = number < 2
        assert metrics["critic_warming_up"] == float(warming_up)
        assert all(torch.equal(before[key], tensor) for key, tensor in learner.weights().items()) == warming_up
        assert (metrics["grad_norm"] == 0) == warming_up
        assert metrics["critic_grad_norm"] > 0
        assert metrics["optimizer_steps"] == float(not warming_up)
        policy_gradients = [k for k in gradients_of(learner) if not k.startswith("critic.")]
        assert bool(policy_gradients) != warming_up
        if warming_up and not shared:
            assert any(k.startswith("critic.body.") for k in gradients_of(learner))
    assert not torch.equal(head, critic_in(learner).head.weight)


@both_kinds
def test_a_critic_learns_from_trajectories_that_teach_the_policy_nothing(shared: bool) -> None:
    # Advantages 0 on one of two: the critic is asked at 1 + 2 tokens all the same. V = 0, targets 1: loss 1 / 2.
    policy = PolicyModel(tiny_model())
    learner = learner_for("ppo", policy, critic=new_critic(policy, shared=shared))
    items = [
        CreditedTrajectory(
            trajectory=trajectory(step([1], response)),
            advantages=[[advantage] * len(response)],
            values=[[0.0] * len(response)],
            value_targets=[[1.0] * len(response)],
        )
        for response, advantage in (([2], 1.0), ([3, 4], 0.0))
    ]
    metrics = learner.update(items)
    assert metrics["tokens_trained"] == 3
    assert metrics["value_loss"] == pytest.approx(0.5)
    assert learner.update(items[1:])["critic_grad_norm"] > 0


@pytest.mark.parametrize("name", CRITIC_ROWS)
def test_a_batch_without_signal_leaves_the_policy_alone_also_after_one_with_signal(name: str) -> None:
    """Adam's momentum alone would move it by most of a step."""
    learner = learner_for(name, lr=1e-2, num_minibatches=2)
    credited = credit_for(name, random_groups(random.Random(1), rows=3), learner)
    learner.update(credited)
    before = {key: tensor.clone() for key, tensor in learner.weights().items()}
    critic = critic_in(learner).head.weight.clone()
    metrics = learner.update([replace(item, advantages=zeros(item.trajectory)) for item in credited])
    assert all(torch.equal(tensor, before[key]) for key, tensor in learner.weights().items())
    assert not torch.equal(critic_in(learner).head.weight, critic)
    assert (metrics["grad_norm"], metrics["optimizer_steps"]) == (0.0, 2.0)


@both_kinds
def test_a_critic_learns_which_prompts_are_worth_something(shared: bool) -> None:
    # The return is 1 after prompt [1], 0 after prompt [2]; the policy waits.
    policy = PolicyModel(tiny_model())
    learner = learner_for("steppo", policy, critic=new_critic(policy, shared=shared, lr=0.05, warmup_updates=100))
    groups = [group(*[trajectory(step([prompt], [3]), reward=reward)] * 2) for prompt, reward in ((1, 1.0), (2, 0.0))]
    metrics = [learner.update(credit_for("steppo", groups, learner)) for _ in range(60)]
    assert metrics[0]["explained_variance"] < 0.5 < 0.95 < metrics[-1]["explained_variance"]
    assert metrics[-1]["value_loss"] < 0.05 < metrics[0]["value_loss"]
    good, bad = (learner.values([trajectory(step([prompt], [3]))])[0].per_token[0][0] for prompt in (1, 2))
    assert good == pytest.approx(1.0, abs=0.15)
    assert bad == pytest.approx(0.0, abs=0.15)


def test_explained_variance_by_hand() -> None:
    def explained(values: list[float], targets: list[float]) -> float:
        return explained_variance(torch.tensor(values), torch.tensor(targets))

    # targets 0, 1, 2, 3: unbiased variance 5/3. Values 0, 1, 2, 2: errors 0, 0, 0, 1 with variance 1/4. 1 - 3/20
    assert explained([0, 1, 2, 2], [0, 1, 2, 3]) == pytest.approx(1 - 3 / 20)
    assert explained([0, 1, 2, 3], [0, 1, 2, 3]) == 1.0
    assert explained([7, 7, 7, 7], [0, 1, 2, 3]) == pytest.approx(0.0)  # a constant explains nothing
    assert explained([3, 2, 1, 0], [0, 1, 2, 3]) == pytest.approx(-3.0)  # errors twice as spread: 1 - 4
    assert explained([5.0, 1.0], [2.0, 2.0]) == 0.0  # nothing to explain
    assert explained([], []) == explained([1.0], [0.0]) == 0.0


def test_the_metrics_say_how_good_the_values_were() -> None:
    item = CreditedTrajectory(
        trajectory=trajectory(step([1], [2, 3]), step([4], [5])),
        advantages=[[1.0, 1.0], [1.0]],
        values=[[0.5, 9.0], [1.5]],
        value_targets=[[1.0, None], [3.0]],
    )
    metrics = setup(True)[0].update([item])
    # asked twice: values 0.5 and 1.5, targets 1 and 3; errors 0.5, 1.5 vary by 1/2, targets by 2: 1 - 1/4
    assert metrics["explained_variance"] == pytest.approx(0.75)
    assert metrics["value_mean"] == pytest.approx(1.0)
    assert metrics["value_target_mean"] == pytest.approx(2.0)


def round_trip(family: str, shared: bool) -> tuple[Learner, Learner, Callable[[Learner], list[CreditedTrajectory]]]:
    policy, rng = PolicyModel(tiny_model(family)), random.Random(4)
    groups = on_policy(random_groups(rng), policy, rng, noise=0.1)

    def fresh(seed: int) -> Learner:
        own = PolicyModel(tiny_model(family, seed=seed))
        critic = critic_of(own, shared=shared, seed=seed, warmup_updates=1)
        return learner_for("ppo", own, critic=critic, num_minibatches=2, weight_decay=0.1)

    first = fresh(0)
    for _ in range(2):  # one of the critic alone, one of both
        first.update(credit_for("ppo", groups, first))
    file = io.BytesIO()
    torch.save({"weights": first.policy.model.state_dict(), "learner": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = fresh(9)
    second.policy.model.load_state_dict(saved["weights"])
    second.load_state_dict(saved["learner"])
    return first, second, lambda learner: credit_for("ppo", groups, learner)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@both_kinds
def test_a_restored_learner_and_critic_go_on_bit_for_bit(shared: bool, family: str) -> None:
    first, second, credit = round_trip(family, shared)
    for _ in range(2):
        credited = credit(first)
        assert credit(second) == credited  # the values are the same
        assert second.update(credited) == first.update(credited)
    states = [{**dict(each.weights()), **critic_in(each).head.state_dict()} for each in (first, second)]
    if not shared:
        for state, each in zip(states, (first, second), strict=True):
            state |= {f"critic.{key}": tensor for key, tensor in critic_in(each).backbone.weights().items()}
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@both_kinds
def test_a_value_clip_is_for_the_second_update_of_a_batch_and_those_after_it(shared: bool) -> None:
    def trained(value_clip: float | None, num_epochs: int) -> Tensor:
        learner, groups = setup(shared, value_clip=value_clip, lr=0.05)
        learner.num_epochs = num_epochs
        learner.update(credit_for("ppo", groups, learner))
        return critic_in(learner).head.weight.detach().clone()

    torch.testing.assert_close(trained(1e-3, 1), trained(None, 1))  # the values are still those the clip is around
    assert not torch.allclose(trained(1e-3, 3), trained(None, 3))


def normalizing(policy: PolicyModel, *, shared: bool, **overrides: Any) -> Learner:
    critic = new_critic(policy, shared=shared, normalize_returns=True, **overrides)
    return learner_for("steppo", policy, critic=critic)


def worth(prompt: int, target: float, value: float = 0.0) -> CreditedTrajectory:
    """One token, which teaches the policy nothing and the critic this target."""
    return CreditedTrajectory(
        trajectory=trajectory(step([prompt], [3])), advantages=[[0.0]], values=[[value]], value_targets=[[target]]
    )


def test_running_moments_are_those_of_all_numbers_at_once() -> None:
    numbers, moments = torch.tensor([3.0, -1.0, 4.0, 1.0, 5.0]), RunningMoments()
    assert (moments.mean, moments.std(correction=0)) == (0.0, 1.0)
    for part in (*numbers.split([2, 3]), torch.empty(0)):
        moments.add(part.tolist())
    assert moments.count == 5
    assert moments.mean == pytest.approx(float(numbers.mean()))
    for correction in (0, 1):
        assert moments.std(correction=correction) == pytest.approx(float(numbers.std(correction=correction)))
    equal = RunningMoments()
    equal.add([7.0] * 3)
    assert (equal.mean, equal.std(correction=1)) == (7.0, 1.0)  # there is no unit to measure in


def test_normalised_targets_move_the_unit_and_not_the_values() -> None:
    policy = PolicyModel(tiny_model())
    learner = normalizing(policy, shared=False)
    critic, attempts = critic_in(learner), [trajectory(step([1, 2], [3, 4])), trajectory(step([5], [6]))]
    with torch.no_grad():
        critic.head.weight.copy_(
            0.3 * torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    before = learner.values(attempts)
    critic.note_targets([worth(1, 90.0), worth(2, 110.0)])
    assert critic.returns is not None
    assert (critic.returns.mean, critic.returns.std(correction=0)) == (100.0, 10.0)
    for old, new in zip(before, learner.values(attempts), strict=True):
        assert new.per_token[0] == pytest.approx(old.per_token[0], abs=1e-4)
    # V = 100 + 10 * head, also by definition
    assert learner.values(attempts[1:])[0].per_token[0][0] == pytest.approx(100 + 10 * value_of(critic, [5]), abs=1e-4)


def test_the_normalised_value_loss_by_hand() -> None:
    # V = 0, targets 90 and 110: mean 100, std 10. Head -10, targets -1 and 1: (81 + 121) / 2 / 2
    learner = normalizing(PolicyModel(tiny_model()), shared=False)
    assert learner.update([worth(1, 90.0), worth(2, 110.0)])["value_loss"] == pytest.approx(50.5, rel=1e-5)


@both_kinds
def test_a_normalising_critic_does_not_depend_on_the_unit_of_rewards(shared: bool) -> None:
    def learned(scale: float) -> list[float]:
        policy = PolicyModel(tiny_model())
        learner = normalizing(policy, shared=shared, lr=0.02)
        for _ in range(20):
            learner.update([worth(1, scale), worth(2, 0.0)])
        return [learner.values([trajectory(step([prompt], [3]))])[0].per_token[0][0] / scale for prompt in (1, 2)]

    small, large = learned(1.0), learned(1000.0)
    assert small == pytest.approx(large, rel=1e-3, abs=1e-3)
    assert small[0] - small[1] > 0.5  # it has learned to tell them apart


def test_a_normalising_critic_is_restored_bit_for_bit() -> None:
    policy = PolicyModel(tiny_model())
    first, second = (normalizing(policy.copy(), shared=False) for _ in range(2))
    for target in (5.0, 9.0):
        first.update([worth(1, target), worth(2, 1.0)])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert critic_in(second).returns == critic_in(first).returns
    for each in (first, second):
        each.update([worth(1, 7.0), worth(2, -1.0)])
    assert critic_in(second).returns == critic_in(first).returns
    assert torch.equal(critic_in(second).head.weight, critic_in(first).head.weight)
    plain = learner_for("steppo", policy, critic=new_critic(policy, shared=False))
    with pytest.raises(ConfigError, match=r"critic\.normalize_returns differs"):
        plain.load_state_dict(first.state_dict())
    older = plain.state_dict()
    del older["critic"]["returns"]  # as it was saved before there was any
    plain.load_state_dict(older)
