"""Tables of algorithms over several training seeds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.over_seeds import at_equal_steps, at_equal_time, difference, gain, seeds_table, views
from benchmarks.recipes import add


def evaluation(step: int, seconds: float | None, success: str) -> dict[str, Any]:
    return {"step": step, "seconds": seconds, "by_row": {"success": success, "reward_part/recall": success}}


def run(name: str, seed: int, *evaluations: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "seed": seed, "held_out": list(evaluations)}


SLOW = [  # each step takes 60 s
    run("grpo", seed, evaluation(0, 0, "0 0 0 1"), evaluation(10, 600, "1 0 0 1"), evaluation(20, 1200, "1 1 0 1"))
    for seed in (0, 1)
]
FAST = [  # each step takes 30 s
    run("ppo", seed, evaluation(0, 0, "0 0 0 1"), evaluation(10, 300, "0 0 0 1"), evaluation(20, 600, "1 1 1 1"))
    for seed in (0, 1)
]


def test_runs_are_compared_after_as_many_steps_or_after_as_much_time() -> None:
    (steps, by_steps), (minutes, by_time) = at_equal_steps(SLOW + FAST), at_equal_time(SLOW + FAST)
    assert (steps, minutes) == ("after 20 steps", "after 10.0 minutes")
    assert [by_steps(each)["step"] for each in SLOW + FAST] == [20, 20, 20, 20]
    assert [by_time(each)["step"] for each in SLOW + FAST] == [10, 10, 20, 20]


def test_runs_without_times_are_compared_after_as_many_steps_only() -> None:
    untimed = [run(name, 0, evaluation(0, None, "0 1"), evaluation(5, None, "1 1")) for name in ("grpo", "ppo")]
    assert [title for title, _ in views(untimed)] == ["after 5 steps"]


def test_gains_and_differences_by_hand() -> None:
    choose = at_equal_steps(SLOW + FAST)[1]
    assert gain(SLOW, choose, "success").mean == 0.5  # rows 1 and 2 of 4
    against = difference(FAST, SLOW, choose, "recall")
    assert against is not None
    assert against.mean == 0.25  # row 3 of 4
    assert difference(FAST[:1], SLOW[1:], choose, "success") is None  # no seed in common


def test_the_table_has_a_view_for_steps_and_one_for_time() -> None:
    steps, time, how = seeds_table({"runs": SLOW + FAST}).split("\n\n")
    assert steps.splitlines()[0] == "| after 20 steps | seeds | success | gain | against `grpo` |"
    assert steps.splitlines()[2].startswith("| `grpo` | 2 | 75.0% | +50.0 (")
    assert steps.splitlines()[3].startswith("| `ppo` | 2 | 100.0% | +75.0 (")
    assert time.splitlines()[3].startswith("| `ppo` | 2 | 100.0% | +75.0 (")
    assert time.splitlines()[2].startswith("| `grpo` | 2 | 50.0% | +25.0 (")
    assert "seeds" in how


def test_an_error_that_falls_is_a_change_below_zero() -> None:
    def of(seed: int, before: str, after: str) -> dict[str, Any]:
        rows = [
            {"step": step, "seconds": step, "by_row": {"reward_part/mase": row}}
            for step, row in ((0, before), (9, after))
        ]
        return run("grpo", seed, *rows)

    # seed 0: -0.5, -0.5, 0 of 3 rows; seed 1: -0.5, -0.25, -0.25: -1/3 each; after: (0.5 + 1 + 1) / 3 and the same
    runs = [of(0, "1 1.5 1", "0.5 1 1"), of(1, "1 1.25 1.25", "0.5 1 1")]
    table, how = seeds_table({"runs": runs}, ["mase"]).split("\n\n")
    head, _, line = table.splitlines()
    assert head == "| after 9 steps | seeds | mase | change (lower is better) |"
    assert line.startswith("| `grpo` | 2 | 0.833 | -0.333 (")
    assert how in seeds_table({"runs": SLOW}, ["success", "recall"])


def test_there_is_one_view_if_steps_and_time_agree_and_none_for_single_seeds_or_older_results() -> None:
    assert len(seeds_table({"runs": SLOW}).split("\n\n")) == 2  # a table and how to read it
    assert seeds_table({"runs": [SLOW[0], FAST[0]]}) == ""
    older = [{**each, "held_out": [{"step": 0, "seconds": 0}]} for each in SLOW]
    assert seeds_table({"runs": older}) == ""


def test_runs_are_added_to_earlier_ones_and_replace_those_they_repeat() -> None:
    def results(command: str, runs: list[dict[str, Any]], panel: str = "p") -> dict[str, Any]:
        return {"command": command, "runs": [{**each, "panel": panel} for each in runs]}

    again = {**SLOW[1], "again": True}
    both = add(results("first", SLOW), results("second", [FAST[0], again]))
    assert [(each["name"], each["seed"], "again" in each) for each in both["runs"]] == [
        ("grpo", 0, False),
        ("grpo", 1, True),
        ("ppo", 0, False),
    ]
    assert (both["command"], both["earlier"]) == ("second", ["first"])
    with pytest.raises(SystemExit, match="evaluated on panel p, these on other"):
        add(results("first", SLOW), results("second", FAST, panel="other"))
