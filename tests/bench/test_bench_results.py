"""Rows are stored, read back, merged, compared and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.bench.command import fill_page, find_rival, results_folder, show
from agent_r1.bench.machine import checkout
from agent_r1.bench.results import Results, Row, as_markdown, as_tables, comparison, fill_in
from agent_r1.errors import ConfigError, DataError

FAST = Row(
    name="decode/8 sequences",
    settings={"prompt": 5},
    headline="tokens_per_second",
    repeats=[{"tokens_per_second": 100.0, "floor_share": 0.5}, {"tokens_per_second": 300.0, "floor_share": 0.7}],
    once={"start_up_seconds": 2.0},
    commit="abc",
)
SLOW = Row(name="soak/all", settings={}, headline="seconds", repeats=[], once={"seconds": 4.0})


def results(*rows: Row) -> Results:
    return Results(command="agent-r1 bench engine", machine={"commit": "abc"}, accelerator="A", rows=list(rows))


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    results(FAST, SLOW).write(path)
    assert Results.read(path) == results(FAST, SLOW)
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["rows"][0]["figures"] == {"tokens_per_second": 200.0, "floor_share": 0.6, "start_up_seconds": 2.0}
    assert Results.read(tmp_path / "other.json") is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text('{"rows": [{"name": 1}]}', encoding="utf-8")
    with pytest.raises(DataError, match="does not hold results"):
        Results.read(path)


def test_more_tokens_or_fewer_seconds_are_better() -> None:
    faster = replace(FAST, repeats=[{"tokens_per_second": 500.0}])
    assert faster.speed_against(FAST) == 2.5  # 500 / 200
    assert replace(SLOW, once={"seconds": 1.0}).speed_against(SLOW) == 4.0  # 4 s / 1 s
    merged = Row(name="a", settings={}, headline="merged_seconds", repeats=[{"merged_seconds": 2.0}])
    assert merged.speed_against(replace(merged, repeats=[{"merged_seconds": 1.0}])) == 0.5


def test_rows_measured_otherwise_do_not_compare() -> None:
    assert FAST.speed_against(replace(FAST, settings={"prompt": 6})) is None
    assert FAST.speed_against(replace(FAST, name="decode/9 sequences")) is None
    assert comparison([FAST, SLOW], results(replace(FAST, settings={"prompt": 6}), SLOW)) == {"soak/all": 1.0}
    assert comparison([FAST], None) == {}


def test_part_of_a_benchmark_replaces_its_own_rows_alone() -> None:
    other = replace(FAST, name="decode/16 sequences")
    again = replace(FAST, commit="new")
    merged = results(again).merged_over(results(FAST, other, SLOW))
    assert merged.rows == [again, SLOW]  # the group as it was measured now, the other group as stored
    assert results(SLOW).merged_over(results(FAST)).rows == [FAST, SLOW]
    assert results(FAST).merged_over(None) == results(FAST)


def test_markdown_shows_shares_ratios_and_large_numbers_each_their_way() -> None:
    row = Row(
        name="decode/8",
        settings={},
        headline="tokens_per_second",
        repeats=[{"tokens_per_second": 12345.6, "floor_share": 0.456, "speed_ratio": 8.125, "seconds": 0.012345}],
        once={"gradient_difference": 0.0012},
    )
    assert as_markdown([row, SLOW], "decode").splitlines() == [
        "|  | 8 |",
        "| --- | ---: |",
        "| tokens per second | 12,346 |",
        "| floor share | 45.6% |",
        "| speed ratio | 8.12x |",
        "| seconds | 0.0123 |",
        "| gradient difference | 1.2e-03 |",
    ]
    with pytest.raises(DataError, match=r"\['decode', 'soak'\]"):
        as_markdown([row, SLOW], "append")


def test_many_rows_of_few_figures_run_downwards() -> None:
    steps = [Row(name=f"append/{n}", settings={}, headline="seconds", repeats=[{"seconds": n}]) for n in (1, 2)]
    assert as_markdown(steps, "append").splitlines() == ["|  | seconds |", "| --- | ---: |", "| 1 | 1 |", "| 2 | 2 |"]


def test_the_terminal_shows_the_ratio_to_what_is_stored() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in as_tables([FAST, SLOW], {"decode/8 sequences": 1.25}):
        console.print(table)
    text = console.export_text()
    assert "decode" in text
    assert "1.25x" in text


def test_stored_results_can_be_shown(tmp_path: Path) -> None:
    results(FAST, SLOW).write(tmp_path / "bench.json")
    console = Console(width=100, record=True, quiet=False)
    show(tmp_path / "bench.json", None, console)
    assert "| floor share | 60.0% |" in console.export_text()
    with pytest.raises(ConfigError, match="there is no"):
        show(tmp_path / "none.json", None, console)


def test_a_page_shows_what_is_stored_between_its_markers(tmp_path: Path) -> None:
    machine = {"torch": "2", "transformers": "5", "python": "3"}
    replace(results(FAST, SLOW), machine=machine).write(tmp_path / "bench_engine.a.json")
    head, middle, end = (
        "<!-- bench_engine.a.json setting -->\n",
        "<!-- bench_engine.a.json soak -->\n",
        "<!-- end -->\n",
    )
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{head}{end}text\n{middle}old\n{end}rest\n", encoding="utf-8")
    fill_page(page, Console(quiet=True), out=tmp_path)
    filled = page.read_text(encoding="utf-8")
    assert "A, torch 2, transformers 5, Python 3; commit abc, unknown; medians of 2.\n<!-- end -->" in filled
    assert "| seconds |\n| --- | ---: |\n| all | 4 |\n<!-- end -->\nrest" in filled
    assert fill_in(filled, tmp_path) == filled
    with pytest.raises(DataError, match=r"bench_x\.json"):
        fill_in(f"<!-- bench_x.json soak -->\n{end}", tmp_path)


def test_the_page_of_the_benchmarks_shows_the_stored_results() -> None:
    root = checkout()
    assert root is not None
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert fill_in(page, root / "benchmarks" / "results") == page


def test_results_are_kept_with_the_repository(tmp_path: Path) -> None:
    root = checkout()
    assert root is not None
    assert results_folder(None) == root / "benchmarks" / "results"
    assert results_folder(tmp_path) == tmp_path


def test_an_unknown_rival_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="trl"):
        find_rival("trll")
