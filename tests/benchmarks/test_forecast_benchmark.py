"""Policies without a language model, scored on a few series of the forecasting task."""

from __future__ import annotations

import json

import pytest

from agent_r1.config import RECIPES
from agent_r1.recipes.forecast import synthetic, task
from benchmarks.forecast import OUT, measure, policies, table
from benchmarks.machine import RESULTS
from benchmarks.over_seeds import at_equal_steps, by_name, gain, seeds_table
from benchmarks.recipes import ROOT


def test_the_baseline_earns_a_half_and_hindsight_is_not_beaten() -> None:
    rows = task.rows("train", 20)
    scored = {name: measure(rows, choose, 0.6) for name, choose in policies().items()}
    assert scored["`seasonal_naive`"]["reward"] == pytest.approx(0.5)
    assert scored["`seasonal_naive`"]["success"] == 0.0
    assert all(scored["best in hindsight"]["reward"] >= found["reward"] for found in scored.values())
    assert scored["smallest hold-out error"]["reward"] > scored["`mean`"]["reward"]
    shown = table({"test": scored, "real_test": scored})
    assert len(shown.splitlines()) == 2 + len(policies())
    assert "| `seasonal_naive` | 0.0% | 0.500 ± 0.000 |" in shown


def test_lines_without_noise_are_found_on_the_holdout_window() -> None:
    found = measure(synthetic.rows("test", 3), policies()["smallest hold-out error"], 1.0)
    assert (found["success"], found["reward"], found["mase"], found["rows"]) == (1.0, 1.0, 0.0, 3)


def test_the_page_shows_the_recorded_scores() -> None:
    recorded = json.loads(OUT.read_text(encoding="utf-8"))
    page = (RECIPES / "forecast" / "README.md").read_text(encoding="utf-8")
    assert table(recorded["results"]) in page
    assert recorded["commit"] in page


def test_the_pages_show_the_error_over_seeds_and_it_falls_with_both_algorithms() -> None:
    runs = json.loads((RESULTS / "forecast.json").read_text(encoding="utf-8"))["runs"]
    for page in (RECIPES / "forecast" / "README.md", ROOT / "docs" / "results.md"):
        assert seeds_table({"runs": runs}, ["mase"]).rpartition("\n\n")[0] in page.read_text(encoding="utf-8")
    choose = at_equal_steps(runs)[1]
    assert {name: gain(own, choose, "mase").high < 0 for name, own in by_name(runs).items()} == {
        "grpo": True,
        "ppo": True,
    }
