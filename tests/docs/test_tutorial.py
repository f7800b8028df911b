"""docs/tutorial.md, followed: its changes give a task that passes its tests and checks, and every command works."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tutorial import OUT, PAGE, blocks, follow, table
from tests.conftest import Cli

pytestmark = pytest.mark.usefixtures("cache")
SHORTER = [
    *("trainer.steps=2", "trainer.eval_every=2", "trainer.save_every=2", "sft.count=16", "sft.epochs=1"),
    *("eval.rows=4", "rollout.rows_per_step=2", "rollout.group_size=2"),
]
MORE = {"train": SHORTER, "eval": ["eval.rows=4"], "chat": ["--ask", ""]}  # so that commands end soon
ELSEWHERE = ("python3 -m venv", "source ", "pip ")  # .ci/package installs the package
FOREVER = "agent-r1 view runs/shop"  # tests/serve/test_view_server.py opens it


@pytest.mark.slow
def test_the_commands_of_the_page_work_in_its_order(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = tmp_path / "before", tmp_path / "after"  # two folders: a process imports a task.py once
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    lines = [line.split("#")[0].strip() for line in "".join(blocks("bash")).splitlines()]
    changed = [index for index, line in enumerate(lines) if line == "agent-r1 check shop"][1]
    for index, line in enumerate(lines):
        if index == changed:
            follow(after)
            monkeypatch.chdir(after)
        if line.startswith("pytest"):
            run = subprocess.run([sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True)
            assert run.returncode == 0, run.stdout
        elif line.startswith("agent-r1") and line != FOREVER:
            words = shlex.split(line)[1:] + {"train": SHORTER, "eval": SHORTER[5:6], "chat": ["--ask", ""]}.get(
                line.split()[1], []
            )
            ended = cli(*[word for word in words if not ("quickstart" in words and word in SHORTER)])
            assert ended.code == 0, (line, ended)
        else:
            assert line == FOREVER or line.startswith(ELSEWHERE), line
    assert (after / "runs" / "shop" / "curve.png").exists()
    assert (after / "runs" / "shop" / "versions.json").exists()


def test_the_page_shows_the_measured_results() -> None:
    assert table(json.loads(OUT.read_text(encoding="utf-8"))) in PAGE.read_text(encoding="utf-8")
