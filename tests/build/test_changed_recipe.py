"""A run resumed with changed code says so, and does not compare results on different rows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli

MINI = Path(__file__).parents[1] / "mini"
SHORT = ("sft.demos=null", "trainer.steps=1", "eval.rows=2", "rollout.rows_per_step=2", "rollout.group_size=2")


@pytest.fixture
def folder(tmp_path: Path, cache: None) -> Path:
    made = tmp_path / "changing"
    shutil.copytree(MINI, made, ignore=shutil.ignore_patterns("__pycache__"))
    return made


def test_changed_code_is_reported_and_different_rows_are_not_compared(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = cli("train", folder, *SHORT, "--run", run)
    assert ended.code == 0, ended.err
    assert "% -> " in ended.out
    (folder / "log.txt").write_text("what the program said\n", encoding="utf-8")
    (folder / "results.json").write_text("{}", encoding="utf-8")
    same = cli("train", "--resume", run, "trainer.steps=2")
    assert same.code == 0, same.err
    assert "has changed since" not in same.out
    assert "% -> " in same.out

    task = folder / "task.py"
    code = task.read_text(encoding="utf-8")
    task.write_text(
        code + "\n_first_rows = rows\n\n\ndef rows(split, count=20):\n    return _first_rows(split, count + 3)[3:]\n"
    )
    for name in [name for name in sys.modules if name.startswith("recipe_changing_")]:
        del sys.modules[name]  # as in a new process
    other = cli("train", "--resume", run, "trainer.steps=3")
    assert other.code == 0, other.err
    assert f"has changed since {run} was saved" in " ".join(other.out.split())
    assert "after 3 steps, on other rows" in other.out
    assert "% -> " not in other.out
