"""The statistics behind eval and compare: by hand, as properties, and by drawing many panels."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.runs.statistics import PairedDifference, paired_difference, standard_error, t_quantile

ROWS = st.lists(st.tuples(*[st.floats(-100, 100)] * 2), min_size=2, max_size=40)


def test_standard_error_by_hand() -> None:
    # mean 2, squares 1 + 0 + 1, variance 2 / 2 = 1, of the mean 1 / 3
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(math.sqrt(1 / 3))
    assert standard_error([5.0]) == 0.0


@pytest.mark.parametrize(
    ("degrees", "quantile"),  # as printed in every table of Student's distribution
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (99, 1.984), (1000, 1.962)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=6e-4)


def test_with_many_rows_student_becomes_normal() -> None:
    assert t_quantile(20_000) == pytest.approx(1.95996, abs=2e-4)
    assert all(t_quantile(n) > t_quantile(n + 1) for n in range(1, 60))  # odd and even have formulas of their own


def test_a_paired_interval_by_hand() -> None:
    # differences 1, 0, 1, -1, 1: mean 0.4, squares .36 + .16 + .36 + 1.96 + .36 = 3.2, variance 0.8, error sqrt(.16)
    result = paired_difference([0, 1, 0, 1, 0], [1, 1, 1, 0, 1])
    assert (result.mean_a, result.mean_b) == (0.4, 0.8)
    assert result.difference == pytest.approx(0.4)
    assert result.low == pytest.approx(0.4 - 2.776 * 0.4, abs=1e-3)
    assert result.high == pytest.approx(0.4 + 2.776 * 0.4, abs=1e-3)
    assert (result.won, result.lost, result.tied) == (3, 1, 1)
    assert not result.is_shown


def test_pairing_finds_a_small_gain_on_rows_of_very_different_difficulty() -> None:
    easy_and_hard = [i / 100 for i in range(100)]
    better = [value + (0.03 if i % 2 else 0.01) for i, value in enumerate(easy_and_hard)]
    result = paired_difference(easy_and_hard, better)
    # differences 0.01 and 0.03 by turns: mean 0.02, deviation 0.01, error 0.001; each side alone has an error of 0.029
    assert result.difference == pytest.approx(0.02)
    assert result.high - result.low == pytest.approx(2 * 1.984 * 0.01 / math.sqrt(99), rel=1e-3)
    assert result.is_shown
    assert standard_error(easy_and_hard) > result.difference


def test_a_handful_of_rows_shows_nothing_however_much_they_agree() -> None:
    base = [0.0] * 200
    five, six = (paired_difference(base, [1.0] * n + [0.0] * (200 - n)) for n in (5, 6))
    assert five.low > 0  # by the interval alone it would count
    assert (five.too_few_differ, five.is_shown) == (True, False)
    assert (six.too_few_differ, six.is_shown) == (False, True)


@given(ROWS)
def test_swapping_the_sides_turns_everything_round(rows: list[tuple[float, float]]) -> None:
    a, b = zip(*rows, strict=True)
    one, other = paired_difference(a, b), paired_difference(b, a)
    assert other == PairedDifference(
        mean_a=one.mean_b,
        mean_b=one.mean_a,
        difference=-one.difference,
        low=-one.high,
        high=-one.low,
        won=one.lost,
        lost=one.won,
        tied=one.tied,
    )
    assert other.is_shown == one.is_shown


@given(ROWS)
def test_equal_runs_have_an_interval_of_no_width_and_show_nothing(rows: list[tuple[float, float]]) -> None:
    values = [first for first, _ in rows]
    result = paired_difference(values, values)
    assert (result.difference, result.low, result.high, result.tied) == (0.0, 0.0, 0.0, len(values))
    assert not result.is_shown


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[tuple[float, float]], rng: random.Random) -> None:
    shuffled = rng.sample(rows, len(rows))
    one, other = (paired_difference(*zip(*pairs, strict=True)) for pairs in (rows, shuffled))
    assert other == one


@given(ROWS, st.integers(1, 4))
def test_the_interval_contains_the_difference_and_every_row_is_counted(
    rows: list[tuple[float, float]], digits: int
) -> None:
    a, b = ([round(value, digits) for value in side] for side in zip(*rows, strict=True))
    result = paired_difference(a, b)
    assert result.low <= result.difference <= result.high
    assert result.won + result.lost + result.tied == len(rows)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_what_has_no_interval_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="a paired interval needs"):
        paired_difference(a, b)


@pytest.mark.parametrize(("gain", "samples"), [(0.0, 1), (0.1, 4)])
def test_the_interval_covers_the_truth_as_often_as_it_says(gain: float, samples: int) -> None:
    """Panels of 100 rows drawn anew. Success at a row is a coin with a bias of its own, `gain` higher for B."""
    rng, covered, panels = random.Random(7), 0, 2000
    for _ in range(panels):
        a, b = [], []
        for _ in range(100):
            chance = (1 - gain) * rng.betavariate(0.6, 0.6)  # most rows are nearly always or nearly never solved
            a.append(sum(rng.random() < chance for _ in range(samples)) / samples)
            b.append(sum(rng.random() < chance + gain for _ in range(samples)) / samples)
        result = paired_difference(a, b)
        covered += result.low <= gain <= result.high
    # 95 % of 2000, give or take three standard errors of sqrt(.95 * .05 / 2000) = 0.5 %
    assert covered / panels == pytest.approx(0.95, abs=0.015)


def test_equal_policies_are_called_different_in_about_one_of_twenty_cases_at_most() -> None:
    """Nearly equal policies: few rows differ, which is where an interval of differences is worst."""
    rng, called, panels = random.Random(3), 0, 2000
    for _ in range(panels):
        changed = [rng.choice((-1.0, 1.0)) if rng.random() < 0.04 else 0.0 for _ in range(200)]
        called += paired_difference([0.0] * 200, changed).is_shown
    assert called / panels < 0.065


def test_what_differs_by_rounding_alone_is_tied() -> None:
    # 0.1 + 0.2 is 0.30000000000000004: ten rows would be lost, all of them, by 5.6e-17
    result = paired_difference([0.1 + 0.2] * 10, [0.3] * 10)
    assert (result.won, result.lost, result.tied, result.difference) == (0, 0, 10, 0.0)
    assert not result.is_shown
    assert paired_difference([0.0] * 10, [1e-9] * 10).won == 10
