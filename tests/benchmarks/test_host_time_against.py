"""Two versions that took turns are compared round by round."""

from __future__ import annotations

from benchmarks.host_time_against import Rows, summary


def rows(*milliseconds: float) -> Rows:
    return [
        {"name": "alfworld", "calls": 10, "cpu ms per call": each, "simulated seconds": 2 * each}
        for each in milliseconds
    ]


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    # medians of the repeats: 0.2, 0.4, 0.6 before and 0.1, 0.1, 0.2 now, so the ratios are 2, 4 and 3
    before = [rows(0.1, 0.2, 0.9), rows(0.4), rows(0.5, 0.7)]
    now = [rows(0.1), rows(0.1), rows(0.2)]
    found = summary(before, now)
    assert found["alfworld"]["calls"] == 10
    assert found["alfworld"]["cpu ms per call"] == {"before": 0.4, "now": 0.1, "ratio": 3.0}
    assert found["alfworld"]["simulated seconds"] == {"before": 0.8, "now": 0.2, "ratio": 3.0}
