"""Credit by role: a role earns the shared outcome and its own process rewards, and is compared with itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget

from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from agent_r1.learn.batch.packs import merge_steps, nested, pack
from agent_r1.learn.batch.support import supports_of
from agent_r1.learn.credit import Values, assign_credit, trainable
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.rewards import KLInReward, RewardShaper, is_uniform, overlong_penalties
from agent_r1.types import Group, PerToken, Trajectory
from tests.learn.builders import group, step, tiny_model, trajectory
from tests.learn.episodes import Batch, batches, critic

Acts = Sequence[tuple[str, int, float]]  # role, response tokens, process reward


def played(name: str, acts: Acts, outcome: float) -> Trajectory:
    steps = [replace(step([1, k], range(size)), role=role, reward=paid) for k, (role, size, paid) in enumerate(acts)]
    return trajectory(*steps, reward=outcome, name=name)


A = played("a", [("plan", 1, 0.0), ("work", 2, 0.5)], 1.0)
B = played("b", [("plan", 1, 0.0), ("work", 2, 0.5)], 0.0)
C = played("c", [("plan", 1, 0.0), ("work", 1, 0.0)], 0.0)
# The worker acts before and after the planner.
MIXED = played("m", [("work", 1, 0.5), ("plan", 2, 0.25), ("work", 1, 0.0)], 1.0)


def credit(*groups: Group, name: str, by_role: bool = True, **settings: object) -> list[PerToken]:
    shaper = RewardShaper(by_role=by_role)
    return [item.advantages for item in assign_credit(groups, get_algorithm(name, **settings), shaper=shaper)]


def about(*steps: list[float]) -> list[object]:
    return [pytest.approx(each, abs=1e-5) for each in steps]


def test_without_credit_by_role_all_steps_of_an_attempt_share_its_return() -> None:
    # returns 1.5, 0.5 and 0, mean 2/3
    assert credit(group(A, B, C), name="dr_grpo", by_role=False) == [
        about([5 / 6], [5 / 6, 5 / 6]),
        about([-1 / 6], [-1 / 6, -1 / 6]),
        about([-2 / 3], [-2 / 3]),
    ]


def test_each_role_has_its_own_returns_and_its_own_baseline() -> None:
    # planner: 1, 0, 0 with mean 1/3; worker: 1.5, 0.5, 0 with mean 2/3
    assert credit(group(A, B, C), name="dr_grpo") == [
        about([2 / 3], [5 / 6, 5 / 6]),
        about([-1 / 3], [-1 / 6, -1 / 6]),
        about([-1 / 3], [-2 / 3]),
    ]


def test_each_role_is_divided_by_its_own_standard_deviation() -> None:
    # planner: 2/3, -1/3, -1/3, squares 2/3, std sqrt(1/3) = 0.57735
    # worker: 5/6, -1/6, -2/3, squares 7/6, std sqrt(7/12) = 0.76376
    assert credit(group(A, B, C), name="grpo") == [
        about([1.15470], [1.09109, 1.09109]),
        about([-0.57735], [-0.21822, -0.21822]),
        about([-0.57735], [-0.87287]),
    ]


def test_the_standard_deviation_of_a_batch_is_that_of_one_role_too() -> None:
    # planner: returns 1, 0 and 3, 3 of two rows; differences 0.5, -0.5, 0, 0; std of 1, 0, 3, 3 (mean 1.75) is 1.5
    first = group(played("a", [("plan", 1, 0)], 1.0), played("b", [("plan", 1, 0)], 0.0))
    plans = [("plan", 1, 0.0), ("work", 1, 100.0)]
    other = group(played("c", plans, 3.0), played("d", plans, 3.0))
    got = credit(first, other, name="grpo", scale="batch")
    assert [each[0] for each in got] == about([1 / 3], [-1 / 3], [0.0], [0.0])


def test_a_role_is_compared_only_with_attempts_in_which_it_acted() -> None:
    # the critic acted in two of three attempts: returns 1.25 and 0, so +-0.625; leave-one-out: +-1.25
    some = [
        played("a", [("draft", 1, 0.0), ("critic", 1, 0.25)], 1.0),
        played("b", [("draft", 1, 0.0)], 1.0),
        played("c", [("draft", 1, 0.0), ("critic", 1, 0.0)], 0.0),
    ]
    # draft: 1, 1, 0 with mean 2/3
    assert credit(group(*some), name="dr_grpo") == [about([1 / 3], [0.625]), about([1 / 3]), about([-2 / 3], [-0.625])]
    # draft, without itself: 1 - 0.5, 1 - 0.5, 0 - 1
    assert credit(group(*some), name="rloo") == [about([0.5], [1.25]), about([0.5]), about([-1.0], [-1.25])]


def test_the_return_from_a_step_on_counts_the_role_s_own_steps_alone() -> None:
    # worker: 0.5 + 0.5 * 1 = 1 at its first step, 1 at its last; planner: 0.25 + 1
    got = credit(group(MIXED), name="reinforce", gamma=0.5, whiten_batch=False)
    assert got == [about([1.0], [1.25, 1.25], [1.0])]
    # together: 0.5 + 0.5 * (0.25 + 0.5 * 1), 0.25 + 0.5 * 1, 1
    got = credit(group(MIXED), name="reinforce", gamma=0.5, whiten_batch=False, by_role=False)
    assert got == [about([0.875], [0.75, 0.75], [1.0])]


def test_step_gae_runs_over_the_steps_of_one_role() -> None:
    # worker: V 0.4 and 0.3, deltas 0.5 + 0.3 - 0.4 = 0.4 and 1 - 0.3 = 0.7, first advantage 0.4 + 0.5 * 0.7 = 0.75
    # planner: V 0.2, advantage 0.25 + 1 - 0.2 = 1.05. Targets are advantage plus value.
    algorithm = get_algorithm("steppo", lam=0.5, whiten_batch=False)
    values = critic([[0.4], [0.2, 9.0], [0.3]])
    [got] = assign_credit([group(MIXED)], algorithm, values=values, shaper=RewardShaper(by_role=True))
    assert got.advantages == about([0.75], [1.05, 1.05], [0.7])
    assert got.value_targets == [[pytest.approx(1.15)], [pytest.approx(1.25), None], [pytest.approx(1.0)]]
    assert got.values == [[0.4], [0.2, 9.0], [0.3]]


def test_token_gae_runs_over_the_tokens_of_one_role() -> None:
    # planner: tokens with V 0.2 and 0.6; rewards 0 and 0.25 + 1. Deltas 0.6 - 0.2 = 0.4 and 1.25 - 0.6 = 0.65,
    # first advantage 0.4 + 0.5 * 0.65 = 0.725. Worker as above: the other role's values do not enter.
    algorithm = get_algorithm("ppo", lam=0.5, whiten_batch=False)
    values = critic([[0.4], [0.2, 0.6], [0.3]])
    [got] = assign_credit([group(MIXED)], algorithm, values=values, shaper=RewardShaper(by_role=True))
    assert got.advantages == about([0.75], [0.725, 0.65], [0.7])


def test_shared_credit_treats_the_roles_as_one_policy_in_turn() -> None:
    # gamma and lam 1: the return from the step on, minus V. Rewards 0.5, 0.25, 1 of the outcome
    algorithm = get_algorithm("steppo", whiten_batch=False)
    [got] = assign_credit([group(MIXED)], algorithm, values=critic([[0.4], [0.2, 9.0], [0.3]]))
    assert got.advantages == about([1.35], [1.05, 1.05], [0.7])


@pytest.mark.parametrize("by_role", [False, True])
def test_gigpo_never_compares_steps_of_different_roles(by_role: bool) -> None:
    # Both roles see the same prompt. Steps: planner 1 and 0, so +-0.5; worker 0 and 0. Episodes +-0.5, or by role the
    # planner's returns 1 and 0, and the worker's 0 and 0.
    first, second = (
        trajectory(
            replace(step([7], [1]), role="plan", reward=paid), replace(step([7], [2]), role="work"), name=str(paid)
        )
        for paid in (1.0, 0.0)
    )
    got = credit(group(first, second), name="gigpo", scale="none", by_role=by_role)
    shared = 0.0 if by_role else 0.5
    assert got == [about([1.0], [shared]), about([-1.0], [-shared])]


def test_gigpo_does_not_take_the_answer_to_another_role_for_a_state() -> None:
    # The workers see different prompts after the same reply to the planner, so only the episodes are compared: +-0.5.
    def attempt(prompt: int, outcome: float) -> Trajectory:
        plan = replace(step([7], [1]), role="plan", feedback="noted")
        return trajectory(plan, replace(step([prompt], [2]), role="work"), reward=outcome, name=str(prompt))

    got = credit(group(attempt(8, 1.0), attempt(9, 0.0)), name="gigpo", scale="none", by_role=False)
    assert got == [about([1.0], [0.5]), about([-1.0], [-0.5])]  # the planners share a state
    # Nor if the other one has no name.
    unnamed = [
        replace(each, steps=[each.steps[0], replace(each.steps[1], role="")])
        for each in (attempt(8, 1.0), attempt(9, 0.0))
    ]
    assert credit(group(*unnamed), name="gigpo", scale="none", by_role=False) == got


@pytest.mark.parametrize("by_role", [False, True])
def test_gigpo_compares_unnamed_steps_by_prompt_while_a_role_acts_between_them(by_role: bool) -> None:
    # Both attempts begin in one state (+-0.5), get the same reply, and then see what their helpers said: other prompts,
    # so their last steps have no comparison beside that of the episodes (+-0.5).
    def attempt(prompt: int, outcome: float) -> Trajectory:
        first, last = replace(step([7], [1]), feedback="noted"), step([prompt], [3])
        helper = replace(step([prompt, 6], [2]), role="helper")
        return trajectory(first, helper, last, reward=outcome, name=str(prompt))

    groups = group(attempt(8, 1.0), attempt(9, 0.0))
    got = credit(groups, name="gigpo", scale="none", anchor="observation", by_role=by_role)
    assert got == [about([1.0], [0.5], [0.5]), about([-1.0], [-0.5], [-0.5])]


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"remax"}))
@given(batch=batches())
@budget(max_examples=10, deadline=None)
def test_with_a_single_role_credit_by_role_is_that_of_the_episode(name: str, batch: Batch) -> None:
    plain = batch.credit(name, kl=None)
    apart = batch.credit(name, shaper=RewardShaper(by_role=True))
    assert [(one.advantages, one.value_targets) for one in apart] == [
        (one.advantages, one.value_targets) for one in plain
    ]


def test_a_kl_in_the_reward_is_paid_by_the_role_whose_tokens_differ() -> None:
    # The planner earns 1.25 and pays a tenth of 1 + 1 from its first token on; the worker earns 1.5 and pays 0.3.
    shaper = RewardShaper(by_role=True, kl=KLInReward(coef=0.1, target=None, horizon=1))
    algorithm = get_algorithm("reinforce", whiten_batch=False)
    [got] = assign_credit([group(MIXED)], algorithm, shaper=shaper, kl=[[[3.0], [1.0, 1.0], [0.0]]])
    assert got.advantages == about([1.2], [1.05, 1.05], [1.0])


def test_a_coefficient_of_the_kl_adapts_to_attempts_however_many_roles_they_have() -> None:
    # A KL of 5 / 4 per token is 0.25 above the target, clipped to 0.2; one trajectory of a horizon of 10.
    for by_role in (False, True):
        shaper = RewardShaper(by_role=by_role, kl=KLInReward(coef=0.1, target=1.0, horizon=10))
        assign_credit([group(MIXED)], get_algorithm("reinforce"), shaper=shaper, kl=[[[3.0], [1.0, 1.0], [0.0]]])
        assert shaper.state_dict()["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 / 10))


def test_a_group_is_uniform_only_if_it_is_for_every_role() -> None:
    # The episodes earn 1.5 each, but their roles do not.
    one = played("a", [("plan", 1, 0.5), ("work", 1, 0.0)], 1.0)
    two = played("b", [("plan", 1, 0.0), ("work", 1, 0.5)], 1.0)
    by_role, dapo = RewardShaper(by_role=True), get_algorithm("dapo")
    assert is_uniform(group(one, two))
    assert not is_uniform(group(one, two), by_role)
    assert is_uniform(group(one, one), by_role)
    # A role that said nothing earned nothing, and is not compared.
    silent = played("c", [("plan", 1, 0.5), ("work", 0, 0.0)], 1.0)
    assert is_uniform(group(one, silent), by_role)
    assert trainable([group(one, two)], dapo) == []
    assert len(trainable([group(one, two)], dapo, by_role)) == 1


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [("remax", {}, "greedy"), ("steppo", {"bootstrap_truncated": True}, "bootstrap_truncated=false")],
)
def test_algorithms_that_judge_the_whole_episode_refuse_credit_by_role(
    name: str, settings: dict[str, object], problem: str
) -> None:
    algorithm = get_algorithm(name, **settings)
    values = [Values(per_token=[[0.0], [0.0, 0.0], [0.0]])] if algorithm.needs_critic else None
    with pytest.raises(ConfigError, match=problem):
        assign_credit([group(MIXED)], algorithm, values=values, shaper=RewardShaper(by_role=True))


def test_the_overlong_penalty_grows_to_the_limit_of_the_role() -> None:
    # limit 4 for the critic: free up to 2, so 3 tokens pay half; limit 10 for the other: 3 tokens are free
    for role, penalty in (("critic", -1.0), ("draft", 0.0)):
        limits = {"": 10, "critic": 4}
        placed = overlong_penalties(played("a", [(role, 3, 0.0)], 0.0), limit=limits, buffer=0.5, penalty=2.0)
        assert placed == [[0.0, 0.0, penalty]]


def sampled(role: str, temperature: float | None, response: list[int]) -> Trajectory:
    return trajectory(replace(step([1, 2, 3], response), role=role, temperature=temperature), name=role)


def test_log_probs_are_those_of_each_step_s_own_temperature() -> None:
    policy = PolicyModel(tiny_model())
    warm, cool = sampled("plan", 2.0, [4, 5]), sampled("work", 0.5, [6, 7, 8])
    segments = merge_steps([warm, cool])
    [together] = pack(segments, 64)
    logprobs_T, entropy_T = policy.logprobs(together, temperature=1.0)
    got = torch.zeros(5).index_put((together.columns_T,), logprobs_T.detach())
    for each, numbers in zip((warm, cool), nested(got, [warm, cool]), strict=True):
        plain = replace(each, steps=[replace(each.steps[0], temperature=None)])
        [alone] = pack(merge_steps([plain]), 64)
        expected, _ = policy.logprobs(alone, temperature=each.steps[0].temperature or 1.0)
        assert numbers == [pytest.approx(expected.tolist(), abs=1e-6)]
    slopes = torch.autograd.grad(logprobs_T.sum(), list(policy.model.parameters()), allow_unused=True)
    assert all(bool(slope.isfinite().all()) for slope in slopes if slope is not None)
    assert entropy_T.isfinite().all()


def test_the_learner_refuses_a_step_of_another_temperature_than_its_role_s() -> None:
    temperatures = {"": 1.0, "plan": 2.0}
    supports_of([sampled("plan", 2.0, [4]), sampled("work", 1.0, [4])], temperature=temperatures)
    for wrong in (sampled("plan", 1.0, [4]), sampled("work", 2.0, [4])):
        with pytest.raises(DataError, match="use the same temperature"):
            supports_of([wrong], temperature=temperatures)
