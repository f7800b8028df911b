"""An environment written from the docs alone, in fewer than sixty lines."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agent_r1 import check_env
from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from tests.recipes.vending.task import Machine, rows

RECIPE = Path(__file__).with_name("vending")
SMALL = [
    "sft.count=64",
    "sft.epochs=1",
    "rollout.rows_per_step=4",
    "trainer.steps=2",
    "trainer.eval_every=2",
    "eval.rows=4",
    "eval.samples=1",
    "eval.temperature=0",
    "model.device=cpu",
]


def test_it_has_fewer_than_sixty_lines() -> None:
    files = [file for file in RECIPE.iterdir() if file.name in ("task.py", "base.yaml")]
    assert len(files) == 2
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) < 60


def test_it_keeps_the_contract() -> None:
    for row in rows("train")[:5]:
        asyncio.run(check_env(Machine, row, ["what?", *["1"] * 20]))
        asyncio.run(check_env(Machine, row, ["5"] * 8))


def test_it_trains_with_a_context_policy_in_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    config = load_config(str(RECIPE), [*SMALL, "context.policy=window", "context.turns=1", "task.workers.processes=1"])
    run = RunDir.create(tmp_path / "run", config)
    run_training(config, build_plan(config), run, Console(file=io.StringIO()), resume=False)
    trained = run.read_metrics("train")
    assert [record["step"] for record in trained] == [1, 2]
    assert all(record["stop/error"] == 0 and record["episode/steps"] > 1 for record in trained)
