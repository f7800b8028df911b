"""The benchmark of pictures, at a tiny shape."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from agent_r1.bench.command import Options
from benchmarks.speed.__main__ import run
from tests.bench.result_files import read_rows


def test_episodes_and_updates_with_pictures_are_measured_beside_transformers(tmp_path: Path) -> None:
    rows = read_rows(run("vision", Options(device="cpu", repeats=1, out=tmp_path), Console(quiet=True)))
    groups = ("episodes", "updates", "trained")
    assert list(rows) == [f"{group}/{count} pictures" for group in groups for count in (1, 2)]
    assert all(row["figures"]["speed_ratio"] > 0 for row in rows.values())
    assert [rows[f"{group}/1 pictures"]["settings"]["train_vision"] for group in groups[1:]] == [False, True]
    # Two groups: one first picture each, and each group's two attempts see one of its two later pictures.
    figures = rows["episodes/1 pictures"]["figures"]
    assert (figures["looked"], figures["shown"]) == (2 + 4, 4 * (1 + 2))
    assert figures["hit_rate"] == 0.5
