"""Which run `agent-r1 train` starts or continues, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

from agent_r1.cli.train_command import flatten, new_job, run_job
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.ranks.crew import Crew
from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.ranks_started import MINI


def test_continue_starts_a_run_and_then_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert not new_job(MINI, [], path, may_continue=True).resume
    run = RunDir.create(path, load_config(MINI))
    assert not new_job(MINI, [], path, may_continue=True).resume  # it was stopped before it produced anything
    run.append_metrics("train", 1, {"loss": 0.0})
    job = new_job(MINI, [], path, may_continue=True)
    assert (job.resume, job.words, job.path) == (True, [], path)
    longer = new_job(MINI, ["trainer.steps=9", "trainer.max_minutes=5"], path, may_continue=True)
    assert sorted(longer.words) == ["trainer.max_minutes=5.0", "trainer.steps=9"]
    assert longer.config.trainer.steps == 9


def test_continue_refuses_other_settings_and_no_directory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", load_config(MINI))
    run.append_metrics("train", 1, {"loss": 0.0})
    with pytest.raises(ConfigError, match=r"was started with learner\.lr=0\.001, not 0\.5"):
        new_job(MINI, ["learner.lr=0.5"], run.path, may_continue=True)
    with pytest.raises(ConfigError, match="--continue needs --run DIR"):
        new_job(MINI, [], None, may_continue=True)


def test_more_gpus_than_there_are_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.build.models.device.model_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = new_job(MINI, [], tmp_path / "run", may_continue=False)
    with pytest.raises(ConfigError, match="--gpus 3: this machine has only 2"):
        run_job(job, Console(quiet=True), gpus=3, dry_run=False, crew=Crew())
    assert not (tmp_path / "run").exists()


def test_settings_are_named_by_their_path() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


def test_a_model_that_the_hub_does_not_give_leaves_no_run_directory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("agent_r1.build.models.load._is_hub_reachable", lambda: False)
    ended = cli("train", MINI, "model={make: null, path: owner/nothing}", "--run", tmp_path / "run")
    assert ended.code == 2
    assert "owner/nothing" in ended.err
    assert "run directory" not in ended.out
    assert not (tmp_path / "run").exists()
