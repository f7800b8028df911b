"""Rows are stored, read back, merged, compared and printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.bench.results import Results, Row, as_tables, comparison
from agent_r1.errors import DataError
from tests.bench.result_files import FAST, SLOW


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
    with pytest.raises(DataError, match=r"bench\.json"):
        Results.read(path)


def test_more_tokens_or_fewer_seconds_are_better() -> None:
    faster = replace(FAST, repeats=[{"tokens_per_second": 500.0}])
    assert faster.speed_against(FAST) == 2.5  # 500 / 200
    assert replace(SLOW, once={"seconds": 1.0}).speed_against(SLOW) == 4.0  # 4 s / 1 s
    merged = Row(name="a", settings={}, headline="merged_seconds", repeats=[{"merged_seconds": 2.0}])
    assert merged.speed_against(replace(merged, repeats=[{"merged_seconds": 1.0}])) == 0.5


def test_rows_with_other_settings_are_not_compared() -> None:
    assert FAST.speed_against(replace(FAST, settings={"prompt": 6})) is None
    assert FAST.speed_against(replace(FAST, name="decode/9 sequences")) is None
    assert comparison([FAST, SLOW], results(replace(FAST, settings={"prompt": 6}), SLOW)) == {"soak/all": 1.0}
    assert comparison([FAST], None) == {}


def test_measuring_one_group_replaces_only_its_rows() -> None:
    other = replace(FAST, name="decode/16 sequences")
    again = replace(FAST, commit="new")
    merged = results(again).merged_over(results(FAST, other, SLOW))
    assert merged.rows == [again, SLOW]  # the group as it was measured now, the other group as stored
    assert results(SLOW).merged_over(results(FAST)).rows == [FAST, SLOW]
    assert results(FAST).merged_over(None) == results(FAST)
    # Interrupted within the group: what was not measured again stays.
    halfway = results(again).merged_over(results(FAST, other, SLOW), unfinished=FAST.group)
    assert halfway.rows == [again, other, SLOW]


def test_the_terminal_shows_the_ratio_to_what_is_stored() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in as_tables([FAST, SLOW], {"decode/8 sequences": 1.25}):
        console.print(table)
    text = console.export_text()
    assert "decode" in text
    assert "1.25x" in text
