from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learn.advantages import group_centered

rewards = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=1, max_size=8)


def test_group_centered_by_hand() -> None:
    # mean of 0, 0, 1, 1 is 0.5; unbiased std is sqrt(4 * 0.25 / 3) = 0.57735
    got = group_centered(torch.tensor([0.0, 0.0, 1.0, 1.0]), divide_by_std=True)
    assert got.tolist() == pytest.approx([-0.8660, -0.8660, 0.8660, 0.8660], abs=1e-4)


def test_without_std_it_is_the_difference_from_the_mean() -> None:
    assert group_centered(torch.tensor([0.0, 3.0]), divide_by_std=False).tolist() == [-1.5, 1.5]


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_of_one_gets_zero_and_not_its_reward(divide_by_std: bool) -> None:
    assert group_centered(torch.tensor([7.0]), divide_by_std=divide_by_std).tolist() == [0.0]


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_without_variance_gets_exactly_zero(divide_by_std: bool, value: float, size: int) -> None:
    # the mean of three times 0.1 is not 0.1 in floating point; the residue must not become a signal
    got = group_centered(torch.full((size,), value, dtype=torch.float32), divide_by_std=divide_by_std)
    assert got.tolist() == [0.0] * size


@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values: list[float], divide_by_std: bool) -> None:
    got = group_centered(torch.tensor(values, dtype=torch.float64), divide_by_std=divide_by_std)
    assert abs(got.sum().item()) < 1e-8


@given(rewards, st.integers(-100, 100), st.booleans())
def test_a_constant_added_to_all_rewards_changes_nothing(values: list[float], shift: int, divide_by_std: bool) -> None:
    # multiples of 1/64 stay exact when an integer is added
    exact = torch.tensor([round(v * 64) / 64 for v in values], dtype=torch.float64)
    torch.testing.assert_close(
        group_centered(exact + shift, divide_by_std=divide_by_std),
        group_centered(exact, divide_by_std=divide_by_std),
        rtol=1e-6,
        atol=1e-9,
    )


@given(rewards, st.randoms(use_true_random=False), st.booleans())
def test_advantages_permute_with_the_group(values: list[float], rng: random.Random, divide_by_std: bool) -> None:
    order = list(range(len(values)))
    rng.shuffle(order)
    tensor = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        group_centered(tensor[order], divide_by_std=divide_by_std),
        group_centered(tensor, divide_by_std=divide_by_std)[order],
    )
