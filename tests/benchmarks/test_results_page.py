"""The page of results shows what the result files hold."""

from __future__ import annotations

import json

from benchmarks.machine import RESULTS
from benchmarks.results_page import PAGE, TASKS, lines_of, write_page


def test_the_page_is_the_one_that_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run: python -m benchmarks.results_page"


def test_every_task_has_a_picture_and_a_page_with_results() -> None:
    for task in TASKS:
        assert (PAGE.parent / task.picture).is_file()
        assert "\n## Results" in (PAGE.parent / task.readme).read_text(encoding="utf-8")


def test_runs_without_rows_show_one_interval_each() -> None:
    results = json.loads((RESULTS / "webshop.json").read_text(encoding="utf-8"))
    assert [(line.name, line.seeds, line.gain.count(" to ")) for line in lines_of(results)] == [
        ("grpo", 2, 2),
        ("gigpo", 2, 2),
        ("steppo", 2, 2),
    ]


def test_a_quickstart_shows_its_lowest_and_highest_seed() -> None:
    runs = [{"before": 0.5, "after": after} for after in (0.75, 1.0, 0.875)]
    [line] = lines_of({"runs": runs})
    assert (line.before, line.after, line.gain) == (0.5, 0.875, "+37.5 (+25.0 to +50.0)")
