"""Shell completion: what a press of Tab offers, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.cli.options import complete_recipe, complete_run, complete_setting

TAB = """
import sys
from agent_r1 import cli
sys.argv = ["agent-r1"]
try:
    cli.main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["check", "gsm8k_tool/t"], ["gsm8k_tool/tiny"]),
        (["train", "quickstart", "rollout.group"], ["rollout.group_size="]),
        (["chat", "runs/"], ["runs/mine"]),
    ],
)
def test_tab_completes_recipes_runs_and_settings(typed: list[str], offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").touch()
    shell = {"_AGENT_R1_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["agent-r1", *typed])}
    environment = {**os.environ, **shell, "COMP_CWORD": str(len(typed)), "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", TAB], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.split() == offered
    assert ended.stderr.split()[-1] == "False"


def test_completions_lead_to_tasks_and_runs_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("tasks/shop", "base.yaml"), ("runs/a", "metrics.jsonl"), (".hidden", "base.yaml")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).touch()
    assert complete_recipe("quick") == ["quickstart", "quickstart/gateway", "quickstart/thinking"]
    assert complete_recipe("tas") == ["tasks/"]
    assert complete_recipe("tasks/s") == ["tasks/shop"]
    assert ".hidden" not in complete_recipe("")
    assert complete_recipe(".h") == [".hidden"]
    assert complete_run("") == ["runs/a", "runs/", "tasks/"]
    assert complete_recipe("no/such/folder") == []


def test_every_section_and_plain_key_is_offered() -> None:
    offered = complete_setting("")
    assert {"seed=", "learner.lr=", "algorithm.name=", "critic.lr=", "engine.threads="} <= set(offered)
    assert not any(name.startswith("engine=") for name in offered)
