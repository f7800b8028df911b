"""Every message on docs/errors.md is what its command says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agent_r1.cli.commands.init import write_task
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.docs.shown.blocks import ROOT
from tests.train.test_pipeline import MINI

PAGE = ROOT / "docs" / "errors.md"
ENTRIES = dict(
    re.findall(r"^### (.+?)\n\n```text\n\$ agent-r1 (.+?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
)
HUB_MODEL = "model: {path: HuggingFaceTB/SmolLM2-135M-Instruct}"
# What is wrong with the task `mine`, which `agent-r1 init` wrote: file, text, and what takes its place.
FAULTS = {
    "A YAML file that cannot be read": ("base.yaml", "task: {rows", "task: {rows: x, rows"),
    "A tool without a docstring": ("task.py", '    """Add up prices."""\n', ""),
    "A tool whose arguments have no types": ("task.py", "prices: list[int]", "prices"),
    "Test rows among training rows": (
        "task.py",
        "rng = random.Random(split)\n    return [draw_row(split",
        "rng = random.Random(0)\n    return [draw_row('train'",
    ),
    "A reward that returns nothing": ("task.py", "    return float(trajectory", "    float(trajectory"),
    "Demonstrations that do not fit": ("base.yaml", "max_context_tokens: 256", "max_context_tokens: 40"),
    "A model that cannot be downloaded": ("base.yaml", "model: {make: task.make_model}", HUB_MODEL),
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task and an evaluated run, both named `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_task(Path("mine"), Console(quiet=True))
    run = RunDir.create(Path("runs/mine"), load_config(str(MINI)))
    run.append_metrics("eval", 0, {"success": 0.5, "success_stderr": 0.1}, panel="p")
    return tmp_path / "mine"


def test_every_message_has_a_command_and_every_fault_a_message() -> None:
    assert len(ENTRIES) == PAGE.read_text(encoding="utf-8").count("\n### ")
    assert set(FAULTS) <= set(ENTRIES)


@pytest.mark.parametrize("title", ENTRIES)
def test_the_message_is_what_the_command_says(title: str, cli: Cli, mine: Path) -> None:
    if title == "No GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if title in FAULTS:
        name, old, new = FAULTS[title]
        text = (mine / name).read_text(encoding="utf-8")
        assert old in text
        (mine / name).write_text(text.replace(old, new), encoding="utf-8")
    command, said = ENTRIES[title].split("\n", 1)
    ended = cli(*shlex.split(command))
    pattern = ".*".join(re.escape(part) for part in " ".join(said.split()).split("..."))
    printed = " ".join((ended.out + ended.err).split())
    assert re.fullmatch(pattern.replace("\\ .*", ".*").replace(".*\\ ", ".*"), printed), printed
