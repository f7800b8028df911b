"""The task that `agent-r1 init` writes: complete, tested, and learning as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.cli.commands.init import FILES, TEMPLATE
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.docs.shown.blocks import ROOT, blocks

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def shop(cli: Cli, tmp_path: Path) -> Path:
    folder = tmp_path / "new" / "shop"
    ended = cli("init", folder)
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[1] for line in ended.out.splitlines()[1:]] == ["check", "train", "chat"]
    return folder


def test_init_writes_a_task_whose_own_tests_pass(shop: Path) -> None:
    assert sorted(path.name for path in shop.iterdir()) == sorted(FILES)
    assert not any("{task}" in path.read_text(encoding="utf-8") for path in shop.iterdir())
    assert load_config(str(shop)).task.tools == ["task.price", "task.total"]
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", str(shop)], capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout


def test_init_overwrites_nothing(cli: Cli, shop: Path, tmp_path: Path) -> None:
    (shop / "base.yaml").write_text("mine", encoding="utf-8")
    ended = cli("init", shop)
    assert ended.code == 2
    assert all(name in ended.err for name in (str(shop), *FILES))
    assert (shop / "base.yaml").read_text(encoding="utf-8") == "mine"
    ended = cli("init", shop / "task.py")
    assert (ended.code, "task.py" in ended.err) == (2, True)
    (tmp_path / "empty").mkdir()
    assert cli("init", tmp_path / "empty").code == 0


@pytest.mark.parametrize("page", ["README.md", "docs/first-task.md"])
def test_the_pages_show_the_task_and_its_measured_results(page: str) -> None:
    text, code = (ROOT / page).read_text(encoding="utf-8"), (TEMPLATE / "task.py").read_text(encoding="utf-8")
    parts = [part for body in blocks(ROOT / page, "python") for part in body.strip().split("\n\n\n")]
    assert [part for part in parts if not part.startswith(("import ", "from ")) and part not in code] == []
    results = json.loads((ROOT / "benchmarks" / "results" / "init_task.json").read_text(encoding="utf-8"))
    for run in results["runs"][: 1 if page == "README.md" else None]:
        assert all(f"{100 * run[when]:.1f} %" in text for when in ("before", "after"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine; its CPU time is about a minute
def test_held_out_success_rises_clearly_over_the_warm_start(cli: Cli, shop: Path, tmp_path: Path) -> None:
    """Half the steps and rows, so that it takes about a minute of one core. The warm start stays as written: how fast
    a worse one improves differs between processors."""
    few = ("trainer.steps=15", "trainer.eval_every=15", "eval.rows=100")
    ended = cli("train", shop, *few, "--run", tmp_path / "run")
    assert ended.code == 0, ended.err
    before, after = RunDir.open(tmp_path / "run").read_metrics("eval")
    assert before["success"] < 0.5
    assert after["success"] > before["success"] + 0.15
    assert after["episode/tool_calls"] > before["episode/tool_calls"]
