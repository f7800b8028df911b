from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.algorithms import ALGORITHMS, as_demonstrations, assign_credit, get_algorithm, supervised_loss
from agent_r1.learn.losses import Counts, LossInputs
from agent_r1.types import StopReason
from tests.learn.builders import group, step, trajectory

GRPO = get_algorithm("grpo")


def inputs(logprobs: list[float], old: list[float], advantages: list[float], *, tokens: int) -> LossInputs:
    ids = torch.zeros(len(logprobs), dtype=torch.long)
    return LossInputs(
        logprobs_T=torch.tensor(logprobs),
        old_logprobs_T=torch.tensor(old),
        advantages_T=torch.tensor(advantages),
        step_ids_T=ids,
        trajectory_ids_T=ids,
        counts=Counts(tokens=tokens, steps=1, trajectories=1),
    )


def test_every_token_of_every_step_gets_the_advantage_of_its_trajectory() -> None:
    two_steps = trajectory(step([1], [2, 3]), step([4], [5]), reward=1.0)
    one_step = trajectory(step([1], [2]), reward=0.0)
    won, lost = assign_credit([group(two_steps, one_step)], GRPO)
    # rewards 1 and 0: mean 0.5, unbiased std 1/sqrt(2), so the advantages are +-0.5 * sqrt(2)
    a = pytest.approx(0.7071, abs=1e-4)
    assert won.advantages == [[a, a], [a]]
    assert lost.advantages == [[-won.advantages[0][0]]]


def test_process_rewards_count_towards_the_return() -> None:
    with_process = trajectory(replace(step([1], [2]), reward=0.25), reward=0.5)
    plain = trajectory(step([1], [2]), reward=0.75)
    # 0.25 + 0.5 equals 0.75, so nobody is better
    assert [c.advantages for c in assign_credit([group(with_process, plain)], GRPO)] == [[[0.0]], [[0.0]]]


def test_failed_trajectories_enter_neither_the_statistics_nor_the_result() -> None:
    good, bad = trajectory(step([1], [2]), reward=1.0, name="good"), trajectory(step([1], [2]), name="bad")
    broken = trajectory(step([1], [2]), reward=math.nan, name="broken", stop=StopReason.ERROR)
    late = trajectory(step([1], [2]), reward=-50.0, name="late", stop=StopReason.TIMEOUT)
    with_failures = assign_credit([group(good, broken, bad, late)], GRPO)
    assert with_failures == assign_credit([group(good, bad)], GRPO)


def test_groups_are_compared_only_with_themselves() -> None:
    high = group(trajectory(step([1], [2]), reward=100.0), trajectory(step([1], [2]), reward=101.0))
    low = group(trajectory(step([1], [2]), reward=0.0), trajectory(step([1], [2]), reward=1.0))
    values = [c.advantages[0][0] for c in assign_credit([high, low], GRPO)]
    assert values[0] == pytest.approx(values[2])
    assert values[1] == pytest.approx(values[3])


def test_trajectories_in_which_nothing_was_sampled_are_left_out() -> None:
    nothing = trajectory(reward=5.0, stop=StopReason.MAX_TOKENS)
    silent = trajectory(step([1], []), reward=5.0)
    pair = [trajectory(step([1], [2]), reward=1.0), trajectory(step([1], [2]))]
    assert assign_credit([group(nothing, *pair, silent)], GRPO) == assign_credit([group(*pair)], GRPO)
    assert assign_credit([group(nothing), group()], GRPO) == []


def test_a_group_of_one_and_a_group_without_variance_get_zero() -> None:
    alone = group(trajectory(step([1], [2, 3]), reward=1.0))
    same = group(*(trajectory(step([1], [2]), reward=0.1) for _ in range(3)))
    assert [c.advantages for c in assign_credit([alone, same], GRPO)] == [[[0.0, 0.0]], [[0.0]], [[0.0]], [[0.0]]]


def test_a_reward_that_is_not_a_number_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"trajectory 'x' .* reward nan"):
        assign_credit([group(trajectory(step([1], [2]), reward=math.nan, name="x"))], GRPO)


def test_critic_values_must_come_exactly_when_they_are_used() -> None:
    with pytest.raises(ConfigError, match="does not use a critic, but values are given"):
        assign_credit([], GRPO, values={})


def test_demonstrations_have_advantage_one_on_every_response_token() -> None:
    ok = trajectory(step([1], [2, 3]), step([9], [4]))
    failed = trajectory(step([1], [2]), stop=StopReason.ERROR)
    assert [c.advantages for c in as_demonstrations([ok, failed])] == [[[1.0, 1.0], [1.0]]]


def test_unknown_algorithms_and_settings_say_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'gpro'\. Did you mean 'grpo'\?"):
        get_algorithm("gpro")
    with pytest.raises(ConfigError, match=r"algorithm 'grpo' has no setting 'clip_hihg'\. Did you mean 'clip_high'\?"):
        get_algorithm("grpo", clip_hihg=0.3)


def test_settings_reach_the_function_they_belong_to() -> None:
    changed = get_algorithm("grpo", clip_high=0.5, divide_by_std=False)
    assert changed.settings == {"divide_by_std": False, "clip_low": 0.2, "clip_high": 0.5}
    pair = group(trajectory(step([1], [2]), reward=2.0), trajectory(step([1], [2])))
    assert [c.advantages for c in assign_credit([pair], changed)] == [[[1.0]], [[-1.0]]]
    # ratio 2 is clipped to 1.5
    assert changed.loss(inputs([0.0], [-math.log(2)], [1.0], tokens=1)).loss.item() == pytest.approx(-1.5)
    assert ALGORITHMS["grpo"].settings["clip_high"] == 0.2


def test_grpo_refuses_groups_it_cannot_learn_from() -> None:
    with pytest.raises(ConfigError, match=r"grpo needs at least 2 trajectories per row, got 1\. Set group_size >= 2"):
        GRPO.require_group_size(1)
    GRPO.require_group_size(2)


def test_losses_divide_by_the_count_of_the_whole_step() -> None:
    batch = inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0], tokens=8)
    assert GRPO.loss(batch).loss.item() == pytest.approx(-2 / 8)
    assert supervised_loss(batch).loss.item() == pytest.approx(3 / 8)
