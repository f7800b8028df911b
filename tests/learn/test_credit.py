from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from agent_r1.learn.credit import Values, assign_credit
from agent_r1.learn.rewards import RewardShaper
from agent_r1.types import CreditedTrajectory, Group, PerToken, StopReason, Trajectory
from tests.learn.builders import group, steady_kl, step, trajectory
from tests.learn.episodes import SOUND, Batch, batches, critic, episode, flat

GROUP_ROWS = ["grpo", "dr_grpo", "gspo", "cispo", "rloo"]
quick = budget(max_examples=25, deadline=None)


def advantages(*groups: Group, algorithm: str, **settings: object) -> list[PerToken]:
    return [item.advantages for item in assign_credit(groups, get_algorithm(algorithm, **settings))]


def close(*rows: list[float]) -> list[object]:
    return [pytest.approx(row, abs=1e-5) for row in rows]


# By hand: one number per trajectory.


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dapo"])
def test_a_return_is_compared_with_those_of_its_group(name: str) -> None:
    # returns 0.5 + 0.5 = 1 and 0: mean 0.5, unbiased std 0.70711, so +-0.70711
    won, lost = episode([2, 0, 1], 0.5, rewards=[0.25, 0.25, 0.0]), episode([1], 0.0)
    first, second = advantages(group(won, lost), algorithm=name)
    assert first == close([0.70711, 0.70711], [], [0.70711])
    assert second == close([-0.70711])


def test_reinforce_plus_plus_with_baseline_whitens_over_tokens() -> None:
    # minus the group's mean: -1 on three tokens, 1 on one, and 0 for an attempt without others
    # mean -0.4, squares 3 * 0.36 + 1.96 + 0.16 = 3.2, std sqrt(3.2 / 4) = 0.89443
    got = advantages(
        group(episode([2, 1], 1.0), episode([1], 3.0)), group(episode([1], 5.0)), algorithm="reinforce++_baseline"
    )
    assert got == [close([-0.67082, -0.67082], [-0.67082]), close([1.56525]), close([0.44721])]


def test_advantages_are_scaled_by_group_by_batch_or_not_at_all() -> None:
    # returns 2, 0 and 5, 1. Differences from the group's mean: 1, -1 and 2, -2.
    # std: of the groups sqrt(2) and sqrt(8), of 2, 0, 5, 1 (mean 2, squares 0 + 4 + 9 + 1) sqrt(14 / 3)
    groups = [group(episode([1], 2.0), episode([1], 0.0)), group(episode([1], 5.0), episode([1], 1.0))]
    unit = (14 / 3) ** 0.5
    for scale, wanted in {
        "group": [0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)],
        "batch": [1 / unit, -1 / unit, 2 / unit, -2 / unit],
        "none": [1.0, -1.0, 2.0, -2.0],
    }.items():
        for name in ("grpo", "dr_grpo", "gspo", "cispo", "dapo"):
            assert advantages(*groups, algorithm=name, scale=scale) == [close([value]) for value in wanted]


def test_a_group_without_signal_gets_zero_in_a_batch_with_signal() -> None:
    # returns 1, 1 and 1, 0: mean 3/4, squares 3/16 + 9/16 = 3/4 over 3: std 1/2
    groups = [group(episode([1], 1.0), episode([1], 1.0)), group(episode([1], 1.0), episode([1], 0.0))]
    got = advantages(*groups, algorithm="grpo", scale="batch")
    assert got == [[[0.0]], [[0.0]], close([1.0]), close([-1.0])]
    assert advantages(groups[0], algorithm="grpo", scale="batch") == [[[0.0]], [[0.0]]]


def test_remax_subtracts_the_return_of_its_own_greedy_attempt() -> None:
    first = replace(group(episode([1, 1], 2.0, rewards=[1.0, 0.0]), episode([2], 0.0)), greedy=episode([1], 1.0))
    second = replace(group(episode([1], 1.0)), greedy=episode([3], 4.0, rewards=[0.5]))
    assert advantages(first, second, algorithm="remax") == [[[2.0], [2.0]], [[-1.0, -1.0]], [[-3.5]]]


def test_remax_learns_nothing_from_returns_that_differ_by_rounding_alone() -> None:
    same = replace(
        group(episode([1, 1, 1], rewards=[0.1, 0.2, 0.3])), greedy=episode([1, 1, 1], rewards=[0.3, 0.2, 0.1])
    )
    assert same.trajectories[0].total_reward != same.greedy.total_reward  # type: ignore[union-attr]
    assert advantages(same, algorithm="remax") == [[[0.0], [0.0], [0.0]]]


# By hand: one number per step.


def test_reinforce_discounts_from_step_to_step() -> None:
    # step rewards 1 and 2 + 2 = 4: 1 + 4 / 2 = 3, then 4
    paid = episode([1, 2], 2.0, rewards=[1.0, 2.0])
    assert advantages(group(paid), algorithm="reinforce", gamma=0.5, whiten_batch=False) == [[[3.0], [4.0, 4.0]]]


def test_reinforce_whitens_over_steps_whatever_their_length() -> None:
    # 3, 4 and 2: mean 3, std 1
    paid = episode([1, 2], 2.0, rewards=[1.0, 2.0])
    got = advantages(group(paid), group(episode([7], 2.0)), algorithm="reinforce", gamma=0.5)
    assert got == [close([0.0], [1.0, 1.0]), close([-1.0] * 7)]


@pytest.mark.parametrize(
    ("stop", "wanted", "targets"),
    [
        # gamma = lam = 0.5; step rewards 1 and 2, values 2 and 4 (of the last prompt tokens: 99 is never read)
        # ended: deltas 1 + 2 - 2 = 1 and 2 - 4 = -2; backwards -2, then 1 + 0.25 * -2 = 0.5; plus the values 2.5, 2
        (StopReason.ANSWERED, [[0.5, 0.5], [-2.0]], [[2.5, None], [2.0]]),
        # cut off where V = 6: the last delta is 2 + 3 - 4 = 1; then 1 + 0.25 = 1.25; plus the values 3.25, 5
        (StopReason.MAX_STEPS, [[1.25, 1.25], [1.0]], [[3.25, None], [5.0]]),
    ],
)
def test_steppo_by_hand(stop: StopReason, wanted: PerToken, targets: object) -> None:
    paid = episode([2, 1], 2.0, rewards=[1.0, 0.0], stop=stop)
    algorithm = get_algorithm("steppo", gamma=0.5, lam=0.5, whiten_batch=False, bootstrap_truncated=True)
    said = critic([[2.0, 99.0], [4.0]], bootstrap=[6.0])
    (got,) = assign_credit([group(paid)], algorithm, values=said)
    assert (got.advantages, got.value_targets) == (wanted, targets)
    assert got.values == [[2.0, 99.0], [4.0]]


@pytest.mark.parametrize(
    ("stop", "wanted", "targets"),
    [
        # lam = 0.5, gamma = 0.5 where a step ends and 1 inside it; token rewards 0, 1, 2, values 2, 4, 1
        # deltas 0 + 4 - 2 = 2, 1 + 0.5 * 1 - 4 = -2.5, 2 - 1 = 1; backwards 1, -2.5 + 0.25 * 1 = -2.25,
        # 2 + 0.5 * -2.25 = 0.875; plus the values 2.875, 1.75, 2
        (StopReason.ANSWERED, [[0.875, -2.25], [1.0]], [[2.875, 1.75], [2.0]]),
        # cut off where V = 6: the last delta is 2 + 0.5 * 6 - 1 = 4; then -2.5 + 0.25 * 4 = -1.5, 2 - 0.5 * 1.5 = 1.25
        (StopReason.MAX_STEPS, [[1.25, -1.5], [4.0]], [[3.25, 2.5], [5.0]]),
    ],
)
def test_ppo_by_hand(stop: StopReason, wanted: PerToken, targets: object) -> None:
    paid = episode([2, 1], 2.0, rewards=[1.0, 0.0], stop=stop)
    algorithm = get_algorithm("ppo", gamma=0.5, lam=0.5, whiten_batch=False, bootstrap_truncated=True)
    (got,) = assign_credit([group(paid)], algorithm, values=critic([[2.0, 4.0], [1.0]], bootstrap=[6.0]))
    assert (got.advantages, got.value_targets) == (wanted, targets)


@pytest.mark.parametrize("name", ["ppo", "steppo"])
@pytest.mark.parametrize("stop", [StopReason.MAX_TOKENS, StopReason.MAX_STEPS])
def test_an_episode_without_a_next_prompt_does_not_bootstrap(name: str, stop: StopReason) -> None:
    # one step of two tokens, values 2 and 4, reward 1, gamma = lam = 1: nothing comes after it, so 1 - 2 and, for PPO,
    # 1 - 4 at the second token
    cut = episode([2], 1.0, stop=stop)
    row = get_algorithm(name, gamma=1.0, whiten_batch=False)
    (got,) = assign_credit([group(cut)], row, values=[Values(per_token=[[2.0, 4.0]])])
    assert got.advantages == ([[-1.0, -3.0]] if name == "ppo" else [[-1.0, -1.0]])
    assert got.value_targets is not None
    assert got.value_targets[0][0] == 1.0


@pytest.mark.parametrize("name", ["ppo", "steppo"])
@given(hope=st.floats(0.0, 1.0), paid=st.floats(0.0, 1.0), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_running_over_a_budget_is_never_better_than_stopping(
    name: str, hope: float, paid: float, gamma: float, lam: float
) -> None:
    # However much the critic hopes for: an action that ends the episode with some pay, and a response that never ends.
    row = get_algorithm(name, gamma=gamma, lam=lam, whiten_batch=False)
    took, ran_over = episode([1], paid), episode([1], 0.0, stop=StopReason.MAX_TOKENS)
    said = [Values(per_token=[[hope]]), Values(per_token=[[hope]])]
    first, second = assign_credit([group(took, ran_over)], row, values=said)
    assert second.advantages[0][0] <= first.advantages[0][0]


@pytest.mark.parametrize("name", ["ppo", "steppo"])
def test_value_targets_are_not_whitened(name: str) -> None:
    one, other = group(episode([1], 8.0)), group(episode([1], 2.0))
    said = critic([[1.0]], [[1.0]])
    first, second = assign_credit([one, other], get_algorithm(name), values=said)
    # advantages 7 and 1: whitened +-0.70711; the critic should have said 8 and 2
    assert [first.advantages, second.advantages] == [close([0.70711]), close([-0.70711])]
    assert [first.value_targets, second.value_targets] == [[[8.0]], [[2.0]]]


# Signal.


@pytest.mark.parametrize("name", ["ppo", "steppo"])
def test_critic_error_alone_gives_no_advantage(name: str) -> None:
    # All attempts earned 1. Whitened, a critic that is off by 1e-7 would give advantages of size 0.7.
    same = group(episode([2], 1.0), episode([1], 1.0))
    said = critic([[0.5, 0.5 + 1e-7]], [[0.5 - 1e-7]])
    credited = assign_credit([same], get_algorithm(name), values=said)
    assert flat([flat(each.advantages) for each in credited]) == [0.0] * 3
    assert credited[0].value_targets is not None
    assert credited[0].value_targets[0][0] == pytest.approx(1.0)  # the critic still learns


@pytest.mark.parametrize("name", ["grpo", "gigpo", "reinforce", "reinforce++", "reinforce++_baseline", "ppo", "steppo"])
def test_a_kl_penalty_alone_is_not_blown_up_to_a_full_size_advantage(name: str) -> None:
    def size(outcomes: tuple[float, float]) -> float:
        played = group(episode([2], outcomes[0]), episode([2], outcomes[1]))
        algorithm = get_algorithm(name)
        credited = assign_credit(
            [played],
            algorithm,
            shaper=RewardShaper(kl=steady_kl(1e-3)),
            kl=[[[0.1, 0.3]], [[-0.2, 0.5]]],
            values=[Values(per_token=[[0.0, 0.0]])] * 2 if algorithm.needs_critic else None,
        )
        return max(abs(value) for each in credited for row in each.advantages for value in row)

    assert size((1.0, 1.0)) == 0.0
    assert size((1.0, 0.0)) > 0.5


@pytest.mark.parametrize("name", ["ppo", "steppo"])
def test_with_lam_below_1_values_are_a_signal_of_their_own(name: str) -> None:
    # Both attempts earned nothing, but the second went from a state worth 0.1 to one worth 0.9 before it failed.
    same = group(episode([1, 1], 0.0), episode([1, 1], 0.0))
    said = critic([[0.5], [0.5]], [[0.1], [0.9]])
    first, second = assign_credit([same], get_algorithm(name, lam=0.0), values=said)
    assert second.advantages[0][0] > first.advantages[0][0]


@pytest.mark.parametrize("name", ["ppo", "steppo"])
def test_by_default_the_step_budget_is_part_of_the_task(name: str) -> None:
    # Out of steps with nothing earned: 0 - 0.5, whatever the critic hopes for afterwards. The gain of an answer, 1 -
    # 0.5, is not discounted by the step before it.
    cut, solved = episode([1], 0.0, stop=StopReason.MAX_STEPS), episode([1, 1], 1.0)
    said = critic([[0.5]], [[0.5], [0.5]], bootstrap=[0.9, 0.0])
    first, second = assign_credit([group(cut, solved)], get_algorithm(name, whiten_batch=False), values=said)
    assert (first.advantages, second.advantages) == ([[-0.5]], [[0.5], [0.5]])


def test_every_algorithm_has_the_same_discount() -> None:
    assert {row.settings["gamma"] for row in ALGORITHMS.values() if "gamma" in row.settings} == {1.0}


def test_gigpo_compares_observations_by_default() -> None:
    # Prompts that grow are never equal after the first step; what the env showed is.
    def played(name: int, outcome: float) -> Trajectory:
        steps = [step([1], [name]), step([1, name, 7], [2])]
        return replace(episode([1, 1], outcome), steps=[replace(steps[0], feedback="hall"), steps[1]])

    got = advantages(group(played(3, 1.0), played(4, 0.0)), algorithm="gigpo", scale="none")
    assert got == [[[1.0], [1.0]], [[-1.0], [-1.0]]]  # 0.5 of the episode and 0.5 of each state


# By hand: GiGPO.


def test_gigpo_adds_a_comparison_of_equal_states() -> None:
    # returns 4 and 1: +-1.5 around the mean. The first prompt is the same: from there 0.5 * 4 = 2 and 1, so +-0.5, half
    # of which counts. The second step was reached once: nothing to compare with.
    long, short = episode([1, 2], 4.0), episode([1], 1.0)
    got = advantages(group(long, short), algorithm="gigpo", scale="none", step_weight=0.5, gamma=0.5)
    assert got == [[[1.75], [1.5, 1.5]], [[-1.75]]]


def visits(*places: str, outcome: float, start: int, named: bool = False) -> Trajectory:
    """One token per step; each prompt is a new one. The env shows where it leads, or names where it was."""
    steps = [step([start, k], [1]) for k in range(len(places) + 1)]
    if named:
        steps = [replace(s, feedback=f"{start} {k}") for k, s in enumerate(steps)]
        steps[1:] = [replace(s, info={"anchor": place}) for s, place in zip(steps[1:], places, strict=True)]
    else:
        steps[:-1] = [replace(s, feedback=place) for s, place in zip(steps[:-1], places, strict=True)]
    return trajectory(*steps, reward=outcome, name=str(start))


def test_gigpo_uses_the_anchor_of_the_first_state() -> None:
    first, last = (replace(step([k], [1]), info={"anchor": "hall"}, feedback="dark") for k in range(2))
    alone = group(trajectory(first, last, reward=4.0))
    # gamma 0.5: from the first visit of the hall on 2, from the second 4
    settings = {"scale": "none", "gamma": 0.5, "anchor": "observation"}
    assert advantages(alone, algorithm="gigpo", **settings) == [[[-1.0], [1.0]]]


@pytest.mark.parametrize("named", [False, True])
def test_gigpo_compares_observations_or_named_anchors(named: bool) -> None:
    pair = group(
        visits("cellar", "attic", outcome=3.0, start=1, named=named),
        visits("cellar", outcome=1.0, start=2, named=named),
    )
    settings = {"scale": "none", "gamma": 1.0, "anchor": "observation"}
    # returns 3 and 1: +-1 for all. In the cellar 3 and 1 are ahead: +-1 more. The first prompts differ
    assert advantages(pair, algorithm="gigpo", **settings) == [[[1.0], [2.0], [1.0]], [[-1.0], [-2.0]]]
    # by exact prompt nothing meets
    by_prompt = settings | {"anchor": "prompt"}
    assert advantages(pair, algorithm="gigpo", **by_prompt) == [[[1.0], [1.0], [1.0]], [[-1.0], [-1.0]]]


def test_gigpo_compares_two_visits_of_one_attempt() -> None:
    # gamma 0.5, outcome 4 after cellar, cellar: from the first visit on 2, from the second 4; +-1 around 3
    alone = group(visits("cellar", "cellar", outcome=4.0, start=1))
    settings = {"scale": "none", "gamma": 0.5, "anchor": "observation"}
    assert advantages(alone, algorithm="gigpo", **settings) == [[[0.0], [-1.0], [1.0]]]


def test_gigpo_joins_similar_states_when_asked() -> None:
    pair = group(
        visits("the cellar, lamp on", outcome=3.0, start=1), visits("the cellar, lamp off", outcome=1.0, start=2)
    )
    settings = {"scale": "none", "gamma": 1.0, "anchor": "observation"}
    assert advantages(pair, algorithm="gigpo", **settings) == [[[1.0], [1.0]], [[-1.0], [-1.0]]]
    assert advantages(pair, algorithm="gigpo", similarity=0.9, **settings) == [[[1.0], [2.0]], [[-1.0], [-2.0]]]


def test_gigpo_compares_prompts_if_there_is_no_feedback() -> None:
    # an env without feedback: "" is not a place that everybody has been to
    pair = group(visits("", "", outcome=3.0, start=1), visits("", outcome=1.0, start=2))
    settings = {"scale": "none", "gamma": 1.0, "anchor": "observation"}
    assert advantages(pair, algorithm="gigpo", **settings) == [[[1.0], [1.0], [1.0]], [[-1.0], [-1.0]]]


# By hand: one number per token.


def test_reinforce_plus_plus_sums_token_rewards_across_steps_and_discounts_between_them() -> None:
    # token rewards 0, 1 | 0, 4 in two steps, gamma 0.5: 1 + 0.5 * 4 = 3 at both tokens of the first, 4 at those of the
    # second; mean 3.5, std sqrt(4 * 0.25 / 3) = 0.57735
    paid = episode([2, 2], 4.0, rewards=[1.0, 0.0])
    got = advantages(group(paid), algorithm="reinforce++", gamma=0.5)
    assert got == [close([-0.86603, -0.86603], [0.86603, 0.86603])]


# Properties.


def by_name(credited: list[CreditedTrajectory]) -> dict[str, list[float]]:
    return {item.trajectory.trajectory_id: flat(item.advantages) for item in credited}


def same(a: list[CreditedTrajectory], b: list[CreditedTrajectory], tolerance: float = 1e-9) -> None:
    first, second = by_name(a), by_name(b)
    assert first.keys() == second.keys()
    for name, numbers in first.items():
        assert numbers == pytest.approx(second[name], abs=tolerance, rel=tolerance)


def changed(groups: list[Group], change: Callable[[Trajectory], Trajectory]) -> list[Group]:
    return [replace(each, trajectories=[change(one) for one in each.trajectories]) for each in groups]


@given(batch=batches())
@quick
def test_the_step_part_of_gigpo_sums_to_zero_over_the_decisions_of_a_group(batch: Batch) -> None:
    for each in batch.groups:
        whole = batch.credit(get_algorithm("gigpo", step_weight=0.0), [each])
        same(whole, batch.credit("grpo", [each]))
        both = batch.credit("gigpo", [each])
        parts = [
            b[0] - a[0]
            for x, y in zip(whole, both, strict=True)
            for a, b in zip(x.advantages, y.advantages, strict=True)
            if a
        ]
        assert sum(parts) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", [*GROUP_ROWS, "reinforce++_baseline", "gigpo"])
@given(batch=batches(), constant=st.integers(-50, 50))
@quick
def test_a_constant_added_to_all_outcomes_changes_nothing(name: str, batch: Batch, constant: int) -> None:
    # of GiGPO without discounting: with it, the constant is worth more to a state nearer to the end
    row = get_algorithm(name, gamma=1.0) if name == "gigpo" else ALGORITHMS[name]
    raised = changed(batch.groups, lambda one: replace(one, outcome_reward=one.outcome_reward + constant))
    same(batch.credit(row), batch.credit(row, raised))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(batch=batches(), rng=st.randoms(use_true_random=False))
@quick
def test_advantages_do_not_depend_on_the_order_of_attempts_and_groups(
    name: str, batch: Batch, rng: random.Random
) -> None:
    shuffled = [replace(g, trajectories=rng.sample(g.trajectories, len(g.trajectories))) for g in batch.groups]
    same(batch.credit(name), batch.credit(name, rng.sample(shuffled, len(shuffled))))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(batch=batches())
@quick
def test_what_tools_write_between_steps_changes_no_advantage(name: str, batch: Batch) -> None:
    def talkative(one: Trajectory) -> Trajectory:
        steps = [replace(s, prompt_ids=[*s.prompt_ids, 9, *s.prompt_ids] + [7] * 50) for s in one.steps]
        return replace(one, steps=steps)

    same(batch.credit(name), batch.credit(name, changed(batch.groups, talkative)), 0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(batch=batches(stops=SOUND), bad=st.sampled_from([math.nan, 1e9, -5.0]))
@quick
def test_failed_attempts_change_no_advantage(name: str, batch: Batch, bad: float) -> None:
    failed = episode([3, 1], bad, rewards=[bad, 0.0], stop=StopReason.TIMEOUT, name="failed")
    crowded = [replace(g, trajectories=[failed, *g.trajectories, failed]) for g in batch.groups]
    lost = replace(batch.groups[0], trajectories=[failed])
    same(batch.credit(name), batch.credit(name, [*crowded, lost]), 0.0)


@pytest.mark.parametrize("name", ["ppo", "steppo"])
@given(batch=batches(), bootstrap_truncated=st.booleans(), shift=st.sampled_from([-3.0, 0.5]))
@quick
def test_only_truncated_episodes_read_the_value_of_the_state_after_them(
    name: str, batch: Batch, bootstrap_truncated: bool, shift: float
) -> None:
    algorithm = get_algorithm(name, whiten_batch=False, bootstrap_truncated=bootstrap_truncated, gamma=0.5, lam=0.0)
    moved = {k: Values(per_token=v.per_token, bootstrap=(v.bootstrap or 0.0) + shift) for k, v in batch.values.items()}
    other = replace(batch, values=moved)
    for before, after in zip(batch.credit(algorithm), other.credit(algorithm), strict=True):
        cut_off = before.trajectory.stop in (StopReason.MAX_STEPS, StopReason.MAX_TOKENS)
        gain = 0.5 * shift if cut_off and bootstrap_truncated else 0.0  # gamma times the shift, at the last decision
        assert flat(after.advantages)[-1] == pytest.approx(flat(before.advantages)[-1] + gain)


@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 1.0]), lam=st.sampled_from([0.0, 0.5, 1.0]))
@quick
def test_steppo_is_ppo_where_every_response_is_one_token(batch: Batch, gamma: float, lam: float) -> None:
    def clipped(one: Trajectory) -> Trajectory:
        return replace(one, steps=[replace(step(s.prompt_ids, [1]), reward=s.reward) for s in one.steps])

    said = {k: replace(v, per_token=[row[:1] or [1.5] for row in v.per_token]) for k, v in batch.values.items()}
    short = replace(batch, groups=changed(batch.groups, clipped), values=said)
    settings = {"gamma": gamma, "lam": lam}
    steppo, ppo = short.credit(get_algorithm("steppo", **settings)), short.credit(get_algorithm("ppo", **settings))
    same(steppo, ppo)
    assert [item.value_targets for item in steppo] == [item.value_targets for item in ppo]


@pytest.mark.parametrize(
    ("name", "per_step"), [("reinforce", True), ("steppo", True), ("ppo", False), ("reinforce++", False)]
)
@given(batch=batches())
@quick
def test_whitened_credit_has_mean_0_and_std_1(name: str, per_step: bool, batch: Batch) -> None:
    rows = [row for item in batch.credit(name) for row in item.advantages if row]
    numbers = [row[0] for row in rows] if per_step else flat(rows)
    if numbers and any(numbers):
        assert mean(numbers) == pytest.approx(0.0, abs=1e-9)
        assert stdev(numbers) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "gigpo"])
@given(batch=batches())
@quick
def test_the_unit_of_rewards_does_not_matter_up_to_eps(name: str, batch: Batch) -> None:
    def dearer(one: Trajectory) -> Trajectory:
        steps = [
            replace(s, reward=8 * s.reward, calls=tuple(replace(c, reward=8 * c.reward) for c in s.calls))
            for s in one.steps
        ]
        return replace(one, steps=steps, outcome_reward=8 * one.outcome_reward)

    row = get_algorithm(name, gamma=1.0) if name == "gigpo" else ALGORITHMS[name]
    same(batch.credit(row), batch.credit(row, changed(batch.groups, dearer)), 1e-3)
