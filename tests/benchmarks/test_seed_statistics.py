"""Intervals over training seeds and evaluation rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agent_r1.runs.statistics import paired_difference, t_quantile
from benchmarks.seed_statistics import crossed_mean


def test_two_seeds_on_two_rows_by_hand() -> None:
    # mean 2.5; seeds 1 and 4: MS = 2 * (1.5^2 + 1.5^2) / 1 = 9; rows 2 and 3: MS = 2 * (0.5^2 + 0.5^2) / 1 = 1
    # rest: each entry differs by 0.5 from seed + row - mean, MS = 4 * 0.25 / 1 = 1; combined 9 + 1 - 1 = 9
    # degrees 81 / (81 + 1 + 1) = 0.98, at least seeds - 1 = 1
    found = crossed_mean([[0.0, 2.0], [4.0, 4.0]])
    half = t_quantile(1) * math.sqrt(9 / 4)
    assert (found.mean, found.seeds) == (2.5, 2)
    assert [found.low, found.high] == pytest.approx([2.5 - half, 2.5 + half])
    assert not found.excludes_zero


def test_one_seed_is_the_paired_interval_over_rows() -> None:
    before, after = [0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 1.0]
    paired = paired_difference(before, after)
    found = crossed_mean([[b - a for a, b in zip(before, after, strict=True)]])
    expected = [paired.difference, paired.low, paired.high]
    assert [found.mean, found.low, found.high] == pytest.approx(expected)


def test_seeds_that_differ_widen_the_interval() -> None:
    alike = crossed_mean([[0.1, 0.3, 0.2, 0.2]] * 3)
    apart = crossed_mean([[0.1, 0.3, 0.2, 0.2], [0.5, 0.7, 0.6, 0.6], [-0.3, -0.1, -0.2, -0.2]])
    assert alike.mean == pytest.approx(apart.mean)
    assert apart.high - apart.low > 3 * (alike.high - alike.low)


@pytest.mark.parametrize(("by_seed", "by_row"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.5), (0.1, 0.5)])
def test_the_interval_covers_the_true_mean_as_often_as_it_says(by_seed: float, by_row: float) -> None:
    rng, covered, trials = np.random.default_rng(0), 0, 400
    for _ in range(trials):
        table = rng.normal(size=(3, 1)) * by_seed + rng.normal(size=(1, 40)) * by_row + rng.normal(size=(3, 40)) * 0.4
        found = crossed_mean(table.tolist())
        covered += found.low <= 0 <= found.high
    assert covered / trials > 0.92  # 95 %, three standard errors of 400 trials below


@pytest.mark.parametrize("table", [[], [[1.0]], [[1.0, math.nan]]], ids=["empty", "one row", "not finite"])
def test_tables_without_an_interval_are_refused(table: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="got shape"):
        crossed_mean(table)
