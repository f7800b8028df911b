from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from typing import cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
from agent_r1.learn.credit import Credit, Values, as_demonstrations, assign_credit, attempts_of, trainable
from agent_r1.learn.losses import Counts, LossInputs
from agent_r1.learn.rewards import ProcessScaling, RewardShaper, is_uniform
from agent_r1.types import Group, StopReason, Trajectory
from tests.learn.builders import group, steady_kl, step, trajectory
from tests.learn.episodes import Batch, batches, critic, episode, flat

GRPO = get_algorithm("grpo")


def inputs(logprobs: list[float], old: list[float], advantages: list[float], *, tokens: int) -> LossInputs:
    """One step of one trajectory, whose tokens may be part of a larger optimizer step."""
    sizes = torch.full((len(logprobs),), float(len(logprobs)))
    return LossInputs(
        logprobs_T=torch.tensor(logprobs),
        old_logprobs_T=torch.tensor(old),
        advantages_T=torch.tensor(advantages),
        importance_T=torch.ones(len(logprobs)),
        step_ids_T=torch.zeros(len(logprobs), dtype=torch.long),
        step_sizes_T=sizes,
        trajectory_sizes_T=sizes,
        counts=Counts(tokens=tokens, steps=1, trajectories=1),
    )


# The table.


def test_credit_and_loss_must_agree_on_the_default_of_a_setting_they_share() -> None:
    def shaped(groups: list[Group], *, clip_low: float = 0.1) -> list[list[Credit]]:
        raise NotImplementedError

    with pytest.raises(ConfigError, match=r"'clip_low' has two defaults, 0\.1 and 0\.2"):
        replace(GRPO, credit=shaped)


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: row.name)
def test_every_row_can_be_configured_completely(row: Algorithm) -> None:
    for function in (row.credit, row.loss):
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    names = [set(inspect.signature(f).parameters) - {"groups", "inputs"} for f in (row.credit, row.loss)]
    assert not names[0] & names[1], "one name must not be two settings"
    # its own values are settings it accepts, and setting them changes nothing
    assert row.with_settings(**row.settings).settings == row.settings


def test_settings_reach_the_function_they_belong_to() -> None:
    changed = get_algorithm("grpo", clip_high=0.5, scale="none", overlong_penalty=2)
    assert changed.settings == {
        "scale": "none",
        "clip_low": 0.2,
        "clip_high": 0.5,
        "dual_clip": None,
        "aggregation": "token",
        "horizon": 256,
        "sampling_rounds": 1,
        "overlong_buffer": 0.2,
        "overlong_penalty": 2.0,
    }
    pair = group(trajectory(step([1], [2]), reward=2.0), trajectory(step([1], [2])))
    assert [c.advantages for c in assign_credit([pair], changed)] == [[[1.0]], [[-1.0]]]
    # ratio 2 is clipped to 1.5
    assert changed.loss(inputs([0.0], [-math.log(2)], [1.0], tokens=1)).loss.item() == pytest.approx(-1.5)
    assert ALGORITHMS["grpo"].settings["clip_high"] == 0.2


def test_settings_can_be_changed_twice_and_whole_numbers_stand_for_fractions() -> None:
    twice = get_algorithm("ppo", gamma=1, clip_low=0.1, dual_clip=3).with_settings(gamma=0.25)
    changed = {name: twice.settings[name] for name in ("gamma", "clip_low", "lam", "dual_clip")}
    assert changed == {"gamma": 0.25, "clip_low": 0.1, "lam": 1.0, "dual_clip": 3.0}
    assert isinstance(twice.settings["dual_clip"], float)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        *[("ppo", "gamma", value) for value in (True, "0.9", None, math.nan, 1.01)],
        ("ppo", "dual_clip", math.inf),
        ("steppo", "lam", -0.1),
        ("ppo", "whiten_batch", 1),
        ("grpo", "scale", "std"),
        ("grpo", "clip_low", -0.2),
        ("grpo", "clip_low", 1.5),
        ("grpo", "dual_clip", 1),
        ("grpo", "horizon", 0),
        ("grpo", "horizon", 8.0),
        ("grpo", "aggregation", "tokens"),
        ("cispo", "weight_cap", 0),
        ("dapo", "sampling_rounds", 0),
        ("dapo", "overlong_buffer", 1.5),
        ("dapo", "overlong_penalty", -1),
        ("gigpo", "anchor", "text"),
        ("gigpo", "similarity", 2),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(name: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algorithm {name!r}: setting {setting}={value!r}")):
        ALGORITHMS[name].with_settings(**{setting: value})


@pytest.mark.parametrize(("name", "setting"), [("rloo", "scale"), ("grpo", "clip_hihg"), ("grpo", "inputs")])
def test_a_setting_that_a_row_does_not_have_is_refused(name: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} has no setting {setting!r}"):
        ALGORITHMS[name].with_settings(**{setting: 0.3})


def test_the_error_for_an_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'grp'.*'grpo'"):
        get_algorithm("grp")


def test_grpo_refuses_groups_it_cannot_learn_from() -> None:
    with pytest.raises(ConfigError, match=r"grpo .*got 1\. Set group_size >= 2"):
        GRPO.require_group_size(1)
    GRPO.require_group_size(2)


# Which trajectories count.


def test_trajectories_in_which_nothing_was_sampled_are_left_out() -> None:
    nothing = trajectory(reward=5.0, stop=StopReason.MAX_TOKENS)
    silent = trajectory(step([1], []), reward=5.0)
    pair = [trajectory(step([1], [2]), reward=1.0), trajectory(step([1], [2]))]
    assert assign_credit([group(nothing, *pair, silent)], GRPO) == assign_credit([group(*pair)], GRPO)
    assert assign_credit([group(nothing), group()], GRPO) == []


@pytest.mark.parametrize("name", ["grpo", "remax"])
def test_a_reward_that_is_not_a_number_is_refused_by_name(name: str) -> None:
    bad = group(trajectory(step([1], [2]), reward=math.nan, name="x"))
    with pytest.raises(DataError, match=r"trajectory 'x' .* reward nan"):
        assign_credit([replace(bad, greedy=episode([1]))], get_algorithm(name))


def test_uniform_groups_are_those_without_two_different_returns_that_count() -> None:
    one, other = episode([1], 1.0), episode([1], 0.0)
    assert not is_uniform(group(one, other))
    assert is_uniform(group(one, one))
    assert is_uniform(group(one))
    assert is_uniform(group())
    # 0.1 + 0.2 and 0.3 differ in the last bit
    assert is_uniform(group(episode([1, 1], rewards=[0.1, 0.2]), episode([1], 0.3)))
    # neither a failure nor an attempt without a token has a say
    assert is_uniform(group(one, episode([1], 0.0, stop=StopReason.ERROR), episode([0], 0.0), episode([], 0.0)))


def test_dynamic_sampling_leaves_uniform_groups_out() -> None:
    varied = group(episode([1], 1.0, name="a"), episode([1], 0.0, name="b"))
    uniform = group(episode([1], 1.0), episode([1], 1.0))
    assert trainable([uniform, varied], get_algorithm("dapo")) == [varied]
    assert [c.trajectory.trajectory_id for c in assign_credit([uniform, varied], get_algorithm("dapo"))] == ["a", "b"]
    assert len(assign_credit([uniform, varied], get_algorithm("dapo", sampling_rounds=1))) == 4


def kept_by_dynamic_sampling(played: Group, shaper: RewardShaper) -> bool:
    return assign_credit([played], get_algorithm("dapo"), shaper=shaper) != []


def test_dynamic_sampling_looks_at_what_is_trained_on() -> None:
    by_process = group(episode([1], rewards=[0.3]), episode([1], rewards=[0.1]))
    by_outcome = group(episode([1], 0.0, rewards=[1.0]), episode([1], 1.0, rewards=[0.0]))  # paid 1 and 1
    expected = {"raw": (True, False), "ignored": (False, True), "largest_return": (True, True)}
    for process, kept in expected.items():
        shaper = RewardShaper(process=cast(ProcessScaling, process))
        assert tuple(kept_by_dynamic_sampling(one, shaper) for one in (by_process, by_outcome)) == kept
        assert tuple(not is_uniform(one, shaper) for one in (by_process, by_outcome)) == kept
    # 0.5 * 1 against 1
    assert kept_by_dynamic_sampling(by_outcome, RewardShaper(process_weight=0.5))


@given(batch=batches(), process=st.sampled_from(get_args(ProcessScaling)), weight=st.sampled_from([0.5, 1.0]))
@budget(max_examples=200, deadline=None)
def test_dynamic_sampling_keeps_the_groups_that_have_a_gradient(
    batch: Batch, process: ProcessScaling, weight: float
) -> None:
    for drawn in batch.groups:
        # right or wrong, so that attempts often differ in process rewards alone
        judged = [replace(one, outcome_reward=float(one.outcome_reward > 0)) for one in drawn.trajectories]
        played = replace(drawn, trajectories=judged)
        everything = assign_credit([played], GRPO, shaper=RewardShaper(process=process, process_weight=weight))
        has_gradient = any(advantage for item in everything for advantage in flat(item.advantages))
        assert kept_by_dynamic_sampling(played, RewardShaper(process=process, process_weight=weight)) == has_gradient


def test_penalties_alone_do_not_make_a_group_trainable() -> None:
    alike = group(episode([1], 1.0), episode([4], 1.0))
    assert not kept_by_dynamic_sampling(alike, RewardShaper(overlong_limit=4, overlong_penalty=1.0))
    # KLs always differ: by them every group would
    rloo, shaper = get_algorithm("rloo", sampling_rounds=2), RewardShaper(kl=steady_kl(0.5))
    assert assign_credit([alike], rloo, shaper=shaper, kl=[]) == []


def test_demonstrations_have_advantage_one_on_every_response_token() -> None:
    ok = trajectory(step([1], [2, 3]), step([9], [4]))
    failed = trajectory(step([1], [2]), stop=StopReason.ERROR)
    assert [c.advantages for c in as_demonstrations([ok, failed])] == [[[1.0, 1.0], [1.0]]]


# What is asked, and of whom.


def test_values_are_required_if_and_only_if_there_is_a_critic() -> None:
    with pytest.raises(ConfigError, match=r"'grpo'.*critic"):
        assign_credit([], GRPO, values=critic())
    with pytest.raises(ConfigError, match=r"'ppo'.*critic"):
        assign_credit([], get_algorithm("ppo"))


def test_values_and_kl_belong_to_the_trajectories_that_count() -> None:
    groups = [
        group(episode([1], name="a"), episode([1], name="failed", stop=StopReason.ERROR)),
        group(episode([0], name="silent")),
        group(episode([2], name="b")),
    ]
    ppo, shaper = get_algorithm("ppo", whiten_batch=False), RewardShaper(kl=steady_kl(1.0))
    assert [one.trajectory_id for one in attempts_of(trainable(groups, ppo, shaper))] == ["a", "b"]
    kl, values = [[[0.5]], [[0.0, 2.0]]], critic([[1.0]], [[3.0, 5.0]])
    a, b = assign_credit(groups, ppo, shaper=shaper, values=values, kl=kl)
    # a: 0 - 0.5 - 1; b: returns -2, -2 less the values 3 and 5
    assert (a.advantages, b.advantages) == ([[-1.5]], [[-5.0, -7.0]])
    for fewer_values, fewer_kl in ((values[:1], kl), (values, kl[:1])):
        with pytest.raises(ValueError, match="each of 2 trajectories, not 1"):
            assign_credit(groups, ppo, shaper=RewardShaper(kl=steady_kl(1.0)), values=fewer_values, kl=fewer_kl)


def test_a_greedy_attempt_pays_no_kl_and_shares_the_scale_of_process_rewards() -> None:
    played = replace(group(episode([1], 1.0, rewards=[2.0])), greedy=episode([1], 1.0, rewards=[4.0]))
    shaper = RewardShaper(process="largest_return", kl=steady_kl(0.5))
    (got,) = assign_credit([played], get_algorithm("remax"), shaper=shaper, kl=[[[1.0]]])
    # divided by 4: 1 + 0.5 - 0.5 * 1 = 1 against 1 + 1 = 2
    assert got.advantages == [[pytest.approx(-1.0, abs=1e-5)]]
    assert shaper.metrics["reward_kl"] == 1.0


def test_a_greedy_attempt_matters_only_to_algorithms_that_compare_with_it() -> None:
    pair = group(episode([1], 1.0, rewards=[1.0]), episode([1], 0.0))
    shaper = RewardShaper(process="largest_return")
    assign_credit([replace(pair, greedy=episode([1], rewards=[100.0]))], GRPO, shaper=shaper)
    assert shaper.metrics["process_scale"] == pytest.approx(1.0, abs=1e-5)


def test_equal_greedy_attempts_of_two_groups_are_not_confused() -> None:
    first = replace(group(episode([1], 3.0)), greedy=episode([1], 1.0))
    second = replace(group(episode([1], 3.0)), greedy=episode([1], 1.0, stop=StopReason.ERROR))
    third = replace(group(episode([1], 3.0)), greedy=episode([1], 1.0))
    got = assign_credit([first, second, third], get_algorithm("remax"))
    assert [flat(item.advantages) for item in got] == [[2.0], [0.0], [2.0]]


def test_remax_without_greedy_attempts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 of 2 groups .*Group\.greedy"):
        assign_credit([group(episode([1])), replace(group(episode([1])), greedy=episode([1]))], get_algorithm("remax"))


# Nothing breaks. Odd shapes go through the whole learner in tests/numerics/test_edge_cases.py.

BATCHES: dict[str, list[list[Trajectory]]] = {
    "one trajectory": [[episode([3], 1.0)]],
    "groups of one": [[episode([2], 1.0)], [episode([1, 2], 0.0)]],
    "no variance": [[episode([2], 1.0), episode([1, 1], 1.0)], [episode([1], 1.0)]],
    "all zero": [[episode([2]), episode([1, 1])]],
    "huge": [[episode([2], 1e8), episode([2], -1e8, rewards=[1e8])], [episode([1], 1e8), episode([1], 1e8 + 1e-6)]],
    "tiny": [[episode([2], 1e-12), episode([2], 0.0)], [episode([1], 1.0), episode([1], 1.0 + 1e-15)]],
    "astronomic": [[episode([2], 1e150), episode([1], -1e150)]],
    "cut off": [[episode([2, 1], 1.0, stop=StopReason.MAX_STEPS), episode([1], 0.0, stop=StopReason.MAX_TOKENS)]],
}


@pytest.mark.parametrize("attempts", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_row_breaks_on_an_odd_batch(name: str, attempts: list[list[Trajectory]]) -> None:
    row = ALGORITHMS[name]
    groups: list[Group] = [replace(group(*each), greedy=episode([1], 0.5)) for each in attempts]
    values = [
        Values(per_token=[[0.5] * len(s.response_ids) for s in one.steps], bootstrap=0.25)
        for one in attempts_of(trainable(groups))
    ]
    for item in assign_credit(groups, row, values=values if row.needs_critic else None):
        assert all(map(math.isfinite, flat(item.advantages)))
        assert all(target is None or math.isfinite(target) for target in flat(item.value_targets or []))
        assert [len(numbers) for numbers in item.advantages] == [len(s.response_ids) for s in item.trajectory.steps]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++_baseline", "gigpo"])
@pytest.mark.parametrize("odd", ["one trajectory", "groups of one", "no variance", "all zero"])
def test_rows_that_compare_learn_nothing_where_nothing_differs(name: str, odd: str) -> None:
    # GiGPO without discounting: with it, equal outcomes are worth less the later they come
    row = get_algorithm(name, gamma=1.0) if name == "gigpo" else ALGORITHMS[name]
    for item in assign_credit([group(*each) for each in BATCHES[odd]], row):
        assert set(flat(item.advantages)) == {0.0}
