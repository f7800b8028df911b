from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_r1.learn.advantages import (
    all_equal,
    discounted_return,
    gae,
    group_centered,
    leave_one_out,
    match_states,
    standardize,
)

rewards = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=1, max_size=8)
shares = st.sampled_from([0.0, 0.25, 0.9, 1.0])


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Groups.


def test_group_centered_by_hand() -> None:
    # mean of 0, 0, 1, 1 is 0.5; unbiased std is sqrt(4 * 0.25 / 3) = 0.57735
    got = group_centered(double(0, 0, 1, 1), divide_by_std=True)
    assert got.tolist() == pytest.approx([-0.8660, -0.8660, 0.8660, 0.8660], abs=1e-4)


def test_leave_one_out_by_hand() -> None:
    # others of 1: (4 + 7) / 2 = 5.5; of 4: (1 + 7) / 2 = 4; of 7: (1 + 4) / 2 = 2.5
    assert leave_one_out(double(1, 4, 7)).tolist() == pytest.approx([-4.5, 0.0, 4.5])


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_of_one_gets_zero_and_not_its_reward(divide_by_std: bool) -> None:
    assert group_centered(double(7), divide_by_std=divide_by_std).tolist() == [0.0]
    assert leave_one_out(double(7)).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_numbers_become_exactly_zero(dtype: torch.dtype, value: float, size: int) -> None:
    # the mean of three times 0.1 is not 0.1 in floating point; the residue must not become a signal
    same = torch.full((size,), value, dtype=dtype)
    for got in (
        group_centered(same, divide_by_std=True),
        group_centered(same, divide_by_std=False),
        leave_one_out(same),
        standardize(same),
    ):
        assert got.tolist() == [0.0] * size


@pytest.mark.parametrize("size", [1.0, 2.0**27])
def test_returns_that_differ_by_rounding_alone_are_equal(size: float) -> None:
    # 0.1 + 0.2 + 0.3 = 0.6000000000000001, the other way round it is 0.6; at 1e8 the residue is 1.5e-8
    forwards, backwards = (0.1 * size + 0.2 * size) + 0.3 * size, (0.3 * size + 0.2 * size) + 0.1 * size
    assert forwards != backwards
    same = double(forwards, backwards, forwards)
    assert all_equal(same)
    assert group_centered(same, divide_by_std=True).tolist() == [0.0] * 3
    assert leave_one_out(same).tolist() == [0.0] * 3
    assert standardize(same).tolist() == [0.0] * 3


def test_small_differences_are_still_differences() -> None:
    assert not all_equal(double(0, 1e-9))
    assert not all_equal(double(1e8, 1e8 + 0.01))
    # 0 and 1e-3: std 1e-3 / sqrt(2), above the floor of 1e-4, so the scale does not matter: 0.5e-3 / 0.7071e-3
    assert group_centered(double(0, 1e-3), divide_by_std=True)[1].item() == pytest.approx(0.7071, rel=1e-4)


def test_deviations_are_bounded_from_below() -> None:
    # 0 and 1e-6: std 0.7e-6 is below 1e-4, so 0.5e-6 / 1e-4 = 0.005 instead of 0.7071
    for got in (group_centered(double(0, 1e-6), divide_by_std=True), standardize(double(0, 1e-6))):
        assert got.tolist() == pytest.approx([-0.005, 0.005])


def test_values_carry_no_signal_if_all_returns_are_equal() -> None:
    values, returns = double(0.3, 0.1, -0.4), double(1, 1, 1)
    assert standardize(values, returns).tolist() == [0.0] * 3
    assert group_centered(values, divide_by_std=True, before_kl_G=returns).tolist() == [0.0] * 3
    # Without a division nothing is amplified, and the differences keep their size: the mean is 0.
    assert group_centered(values, divide_by_std=False, before_kl_G=returns).tolist() == pytest.approx([0.3, 0.1, -0.4])


@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values: list[float], divide_by_std: bool) -> None:
    assert abs(group_centered(double(*values), divide_by_std=divide_by_std).sum().item()) < 1e-8
    assert abs(leave_one_out(double(*values)).sum().item()) < 1e-8


@given(rewards)
def test_leave_one_out_is_centering_times_n_over_n_minus_1(values: list[float]) -> None:
    n = len(values)
    centered = group_centered(double(*values), divide_by_std=False)
    torch.testing.assert_close(leave_one_out(double(*values)), centered * n / max(1, n - 1))


# Sequences.


def test_discounted_return_by_hand() -> None:
    # 4; 2 + 4 / 2 = 4; 1 + 4 / 2 = 3
    assert discounted_return(double(1, 2, 4), gamma=0.5).tolist() == [3.0, 4.0, 4.0]


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5, rewards 1, 0, 2, values 2, 4, 1, then 6
    # deltas: 1 + 2 - 2 = 1;  0 + 0.5 - 4 = -3.5;  2 + 3 - 1 = 4
    # backwards: 4;  -3.5 + 0.25 * 4 = -2.5;  1 + 0.25 * -2.5 = 0.375
    got = gae(double(1, 0, 2), double(2, 4, 1), bootstrap=6.0, gamma=0.5, lam=0.5)
    assert got.tolist() == [0.375, -2.5, 4.0]


def test_no_decisions_have_no_advantages() -> None:
    assert gae(double(), double(), bootstrap=3.0, gamma=1.0, lam=1.0).tolist() == []
    assert discounted_return(double(), gamma=0.9).tolist() == []
    assert standardize(double()).tolist() == []


@given(rewards, st.integers(0, 2**32), st.floats(-5, 5))
def test_gae_without_discounting_is_return_minus_value(values: list[float], seed: int, bootstrap: float) -> None:
    paid = double(*values)
    critic = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = gae(paid, critic, bootstrap=bootstrap, gamma=1.0, lam=1.0)
    to_go = [sum(values[k:]) + bootstrap for k in range(len(values))]
    assert got.tolist() == pytest.approx([g - v for g, v in zip(to_go, critic.tolist(), strict=True)], abs=1e-9)


@given(rewards, st.integers(0, 2**32), st.floats(-5, 5), shares)
def test_gae_with_lam_0_is_the_one_step_error(values: list[float], seed: int, bootstrap: float, gamma: float) -> None:
    critic = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    got = gae(double(*values), double(*critic), bootstrap=bootstrap, gamma=gamma, lam=0.0)
    after = [*critic[1:], bootstrap]
    wanted = [r + gamma * n - v for r, n, v in zip(values, after, critic, strict=True)]
    assert got.tolist() == pytest.approx(wanted, abs=1e-12)


# Whitening.


def test_whiten_by_hand() -> None:
    # 1, 2, 3: mean 2, unbiased std 1
    assert standardize(double(1, 2, 3)).tolist() == pytest.approx([-1.0, 0.0, 1.0])


# States.


def test_equal_states_get_the_same_number() -> None:
    states = [(1, 2), (3,), (1, 2), (), (3,), ()]
    assert match_states(states, similarity=None) == [0, 1, 0, 2, 1, 2]


def test_similar_states_join_the_first_group_whose_first_member_is_alike() -> None:
    # ratio = 2 * matching / total letters: abcd and abcx 6 / 8, abxx and abcd 4 / 8, abxx and abcx 6 / 8
    states = ["abcd", "abcx", "abxx", "abcx"]
    assert match_states(states, similarity=0.75) == [0, 0, 1, 0]  # abcx is no first member, so abxx founds a group
    assert match_states(states, similarity=0.5) == [0, 0, 0, 0]
    assert match_states(states, similarity=0.8) == [0, 1, 2, 1]
    assert match_states(states, similarity=None) == [0, 1, 2, 1]


def test_frequent_elements_count_in_long_states() -> None:
    # difflib would ignore elements that make up over 1 % of a sequence of 200: all of these
    states = [(3, *[1, 2] * 150), (4, *[1, 2] * 150)]
    assert match_states(states, similarity=0.95) == [0, 0]


def test_a_prompt_and_a_text_are_never_the_same_state() -> None:
    assert match_states([(1, 2), "12", (1, 2)], similarity=0.5) == [0, 1, 0]
