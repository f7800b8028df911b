"""Every bundled recipe runs two steps, from making its model to a resumable checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from agent_r1.config import bundled_recipes, load_config
from agent_r1.run.build import build_plan
from agent_r1.run.checkpoint import latest_checkpoint
from agent_r1.run.commands import run_training
from agent_r1.run.run_dir import RunDir

SMALL = [
    "sft.count=24",
    "sft.epochs=1",
    "rollout.rows_per_step=2",
    "rollout.group_size=3",
    "trainer.steps=2",
    "trainer.save_every=1",
    "trainer.eval_every=2",
    "eval.rows=4",
]


@pytest.mark.parametrize("recipe", bundled_recipes())
def test_a_recipe_runs_two_steps(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    config = load_config(recipe, SMALL)
    run = RunDir.create(tmp_path / "run", config)
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        run_training(config, build_plan(config), run, Console(file=nowhere), resume=False)
    assert [record["step"] for record in run.read_metrics("train")] == [1, 2]
    assert all(record["mismatch_max"] < 1e-4 for record in run.read_metrics("train") if not record["empty_update"])
    assert latest_checkpoint(run.checkpoints)[0] == 2
