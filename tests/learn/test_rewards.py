from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from agent_r1.learn.rewards import (
    KLInReward,
    RewardShaper,
    RunningMoments,
    outcome_rewards,
    overlong_penalties,
    process_rewards,
    process_scale,
)
from agent_r1.types import PerToken, ToolCallRecord, Trajectory
from tests.learn.builders import steady_kl, step, trajectory
from tests.learn.episodes import SOUND, Batch, batches, call, episode, flat


def one_step(size: int, reward: float, *calls: ToolCallRecord) -> Trajectory:
    return trajectory(replace(step([1], range(size)), reward=reward, calls=calls))


# Placement.


def test_a_process_reward_sits_on_the_last_token_of_its_call() -> None:
    # tokens 0..5; calls are [1, 3) and [3, 5); the step was paid 0.5 + 0.25 for them and 1 beside
    paid = one_step(6, 1.75, call(0.5, (1, 3)), call(0.25, (3, 5)))
    assert process_rewards(paid) == [[0, 0, 0.5, 0, 0.25, 1.0]]


@pytest.mark.parametrize("span", [None, (0, 0), (2, 4), (5, 9)])
def test_a_call_without_a_place_in_the_response_pays_its_last_token(span: tuple[int, int] | None) -> None:
    assert process_rewards(one_step(3, 0.5, call(0.5, span))) == [[0, 0, 0.5]]


def test_call_rewards_beyond_the_step_reward_are_subtracted_at_its_end() -> None:
    # the step was paid nothing, its call claims 0.5: they add up to what the env paid
    assert process_rewards(one_step(3, 0.0, call(0.5, (0, 1)))) == [[0.5, 0, -0.5]]


def test_a_step_without_tokens_pays_the_last_token_before_it() -> None:
    paid = episode([2, 0, 1, 0, 0], rewards=[1.0, 2.0, 4.0, 8.0, 16.0])
    assert process_rewards(paid) == [[0, 3.0], [], [28.0], [], []]


def test_a_call_in_a_step_without_tokens_pays_the_last_token_before_it() -> None:
    silent = replace(step([2], []), reward=0.5, calls=(call(0.5, (0, 1)),))
    assert process_rewards(trajectory(step([1], [7, 8]), silent)) == [[0, 0.5], []]


def test_rewards_before_the_first_token_are_dropped() -> None:
    assert process_rewards(episode([0, 2], rewards=[1.0, 2.0])) == [[], [0, 2.0]]


def test_the_outcome_sits_on_the_last_token_of_the_trajectory() -> None:
    assert outcome_rewards(episode([2, 1], 3.0)) == [[0, 0], [3.0]]
    assert outcome_rewards(episode([2, 1, 0], 3.0)) == [[0, 0], [3.0], []]


def test_a_trajectory_without_tokens_has_nowhere_to_put_rewards() -> None:
    assert outcome_rewards(episode([0, 0], 3.0, rewards=[1.0, 1.0])) == [[], []]
    assert outcome_rewards(episode([], 3.0)) == []
    assert process_rewards(episode([0], rewards=[1.0])) == [[]]


@given(batches(stops=SOUND))
@budget(max_examples=60, deadline=None)
def test_placed_rewards_add_up_to_the_return(batch: Batch) -> None:
    for one in batch.groups[0].trajectories:
        placed = sum(flat(process_rewards(one))) + sum(flat(outcome_rewards(one)))
        first = next((k for k, s in enumerate(one.steps) if s.response_ids), None)
        early = sum(s.reward for s in one.steps[:first])  # before anything was sampled
        assert placed == (0.0 if first is None else one.total_reward - early)


# Overlong responses.


def test_the_overlong_penalty_grows_linearly_to_the_limit() -> None:
    # limit 10, buffer 0.4: free up to 6 tokens, then a quarter of the penalty per token
    for length, wanted in {5: 0, 6: 0, 7: -0.5, 9: -1.5, 10: -2.0, 12: -2.0}.items():
        (placed,) = overlong_penalties(episode([length]), limit=10, buffer=0.4, penalty=2.0)
        assert placed == pytest.approx([0.0] * (length - 1) + [wanted])


def test_the_longest_response_pays_the_overlong_penalty_of_the_episode() -> None:
    # 7 costs 0.5, 9 costs 1.5 twice: the first 9 pays, the others do not add to it
    placed = overlong_penalties(episode([7, 9, 3, 9]), limit=10, buffer=0.4, penalty=2.0)
    assert [row[-1] for row in placed] == pytest.approx([0, -1.5, 0, 0])


def test_a_response_that_the_context_cut_pays_the_whole_overlong_penalty() -> None:
    played = episode([7, 3])
    cut = replace(played, steps=[played.steps[0], replace(played.steps[1], is_cut=True)])
    placed = overlong_penalties(cut, limit=10, buffer=0.4, penalty=2.0)
    assert [row[-1] for row in placed] == pytest.approx([0, -2.0])


def test_without_a_buffer_only_responses_at_the_limit_are_punished() -> None:
    placed = overlong_penalties(episode([3, 4, 5, 0]), limit=4, buffer=0.0, penalty=1.0)
    assert [sum(row) for row in placed] == [0, -1.0, 0, 0]
    assert flat(overlong_penalties(episode([3]), limit=4, buffer=0.0, penalty=1.0)) == [0.0] * 3


def test_without_a_penalty_no_response_is_too_long() -> None:
    assert flat(overlong_penalties(episode([9]), limit=1, buffer=0.0, penalty=0.0)) == [0.0] * 9


# Scaling.


def test_the_published_scale_is_the_largest_absolute_sum_to_the_end() -> None:
    # to the end from each token: 1 - 3 + 1 = -1, -2, 1 and 2, 2; the largest without sign is 2
    def scale(*batch: PerToken) -> float:
        return process_scale("largest_return", batch, RunningMoments())

    assert scale([[1.0, -3.0], [1.0]], [[0.0, 2.0]]) == pytest.approx(1 / 2)
    assert scale([[1.0, -4.0], [1.0]], [[0.0, 2.0]]) == pytest.approx(1 / 3)
    assert scale() == scale([[]]) == 1e6  # no rewards to scale


def test_scaling_touches_process_rewards_alone() -> None:
    first, second = episode([1, 1], 10.0, rewards=[1.0, 3.0]), episode([2], 5.0, rewards=[-2.0])
    shaper = RewardShaper(process="largest_return", process_weight=0.5)
    # sums to the end: 4, 3 and -2, -2: divided by 4 (plus 1e-6), times 0.5
    assert shaper([first, second]) == [
        [[pytest.approx(0.125)], [pytest.approx(10.375)]],
        [[0.0, pytest.approx(4.75)]],
    ]
    assert shaper.metrics == {"process_scale": pytest.approx(0.125)}
    assert RewardShaper(process="ignored")([first]) == [[[0.0], [10.0]]]
    assert RewardShaper()([first]) == [[[1.0], [13.0]]]
    assert RewardShaper(process_weight=2.0)([first]) == [[[2.0], [16.0]]]


def test_a_batch_without_process_rewards_is_not_scaled_and_reports_no_scale() -> None:
    shaper = RewardShaper(process="largest_return")
    assert shaper([episode([2], 1.0)]) == [[[0.0, 1.0]]]
    assert shaper.metrics == {}


def test_the_running_scale_is_one_over_the_deviation_of_all_sums_to_the_end() -> None:
    shaper = RewardShaper(process="running_std")
    # sums to the end 1 (both tokens); nothing varies yet, so nothing is scaled
    assert shaper([episode([2], rewards=[1.0])]) == [[[0.0, 1.0]]]
    # now 1, 1, 4, 4: mean 2.5, unbiased std sqrt(4 * 2.25 / 3) = sqrt(3)
    assert shaper([episode([2], rewards=[4.0])]) == [[[0.0, pytest.approx(4 / math.sqrt(3))]]]
    assert shaper.metrics == {"process_scale": pytest.approx(1 / math.sqrt(3))}


def test_the_running_deviation_survives_a_large_offset() -> None:
    # the textbook sum of squares minus squared mean would give 0 or NaN here
    running = RunningMoments()
    running.add([1e9, 1e9 + 1, 1e9 + 2])
    assert running.std(correction=1) == pytest.approx(1.0)


def test_a_saved_shaper_goes_on_as_if_never_stopped() -> None:
    def make() -> RewardShaper:
        return RewardShaper(process="running_std", kl=KLInReward(coef=0.5, target=0.1, horizon=10))

    first, second = [episode([1, 2], rewards=[1.0, 3.0])], [episode([2], 1.0, rewards=[7.0])]
    ratios = [[[0.5], [0.25, 0.0]]]
    straight = make()
    straight(first, ratios)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert straight(second, [[[0.5, 0.5]]]) == resumed(second, [[[0.5, 0.5]]])
    assert straight.state_dict() == resumed.state_dict()
    assert straight.metrics == resumed.metrics


def test_a_coefficient_saved_with_another_setup_is_left_alone() -> None:
    without = RewardShaper().state_dict()
    shaper = RewardShaper(kl=steady_kl(0.5))
    shaper.load_state_dict(without)
    assert shaper.kl is not None
    assert shaper.kl.coef == 0.5
    RewardShaper().load_state_dict(shaper.state_dict())


# KL.


def test_every_token_pays_for_its_own_log_ratio() -> None:
    shaper = RewardShaper(kl=steady_kl(0.5))
    # 0 - 0.5 * 2, 0 - 0.5 * -1, then 1 - 0.5 * 4
    assert shaper([episode([2, 1], 1.0)], [[[2.0, -1.0], [4.0]]]) == [[[-1.0, 0.5], [-1.0]]]
    # (2 - 1 + 4) / 3 tokens
    assert shaper.metrics == {"reward_kl": pytest.approx(5 / 3), "reward_kl_coef": 0.5}


def test_a_trajectory_that_was_not_sampled_pays_no_kl_and_enters_no_mean() -> None:
    shaper = RewardShaper(kl=KLInReward(coef=0.5, target=1.0, horizon=10))
    assert shaper([episode([1], 1.0), episode([1], 1.0)], [[[2.0]], None]) == [[[0.0]], [[1.0]]]
    # the mean KL is 2, twice the target: the error is capped at 0.2, and one trajectory of 10 moves by 0.02
    assert shaper.metrics["reward_kl"] == 2.0
    assert shaper.kl is not None
    assert shaper.kl.coef == pytest.approx(0.5 * 1.02)


def test_an_adaptive_coefficient_follows_its_target() -> None:
    kl = KLInReward(coef=1.0, target=0.1, horizon=100)
    kl.adapt(0.11, 10)  # 10 % above: 1 + 0.1 * 10 / 100
    assert kl.coef == pytest.approx(1.01)
    kl.adapt(5.0, 10)  # far above: the error is capped at 0.2
    assert kl.coef == pytest.approx(1.01 * 1.02)
    kl.adapt(-5.0, 10)  # far below, as the estimate of a small KL may be: capped at -0.2
    assert kl.coef == pytest.approx(1.01 * 1.02 * 0.98)
    kl.adapt(0.1, 10)
    assert kl.coef == pytest.approx(1.01 * 1.02 * 0.98)


@given(st.floats(-10, 10), st.integers(0, 10**6), st.integers(1, 10**4))
def test_an_adaptive_coefficient_stays_positive_and_moves_by_a_fifth_at_most(kl: float, n: int, horizon: int) -> None:
    controller = KLInReward(coef=1.0, target=0.1, horizon=horizon)
    controller.adapt(kl, n)
    assert 0.8 - 1e-12 <= controller.coef <= 1.2 + 1e-12


def test_the_coefficient_that_was_reported_is_the_one_that_was_used() -> None:
    shaper = RewardShaper(kl=KLInReward(coef=1.0, target=1.0, horizon=1))
    shaper([episode([1])], [[[2.0]]])
    assert shaper.metrics["reward_kl_coef"] == 1.0
    # 1 + 0.2 * 1 / 1 from then on
    assert shaper([episode([1])], [[[2.0]]]) == [[[pytest.approx(-2.4)]]]


def test_log_ratios_are_required_if_and_only_if_the_kl_is_in_the_reward() -> None:
    with pytest.raises(ValueError, match="if and only if the KL is in the reward"):
        RewardShaper(kl=steady_kl(0.1))([episode([1])])
    with pytest.raises(ValueError, match="if and only if the KL is in the reward"):
        RewardShaper()([episode([1])], [[[0.0]]])


def test_an_empty_batch_has_no_rewards() -> None:
    assert RewardShaper(process="running_std", kl=steady_kl(0.1))([], []) == []
