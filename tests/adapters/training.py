"""Train a tiny model for two steps on a task that is described in YAML alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.types import Trajectory

REST = """
model: {make: tests.mini.task.make_model, device: cpu}
rollout: {rows_per_step: 2, group_size: 2, max_steps: 3, max_response_tokens: 12, max_context_tokens: 1024}
trainer: {steps: 2, eval_every: 2, save_every: 2, threads: 1}
engine: {threads: 1, max_cached_tokens: 16384}
eval: {rows: 2}
"""


def train_two_steps(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[Trajectory]:
    """Return the training episodes, none of which failed."""
    monkeypatch.setenv("AGENT_R1_CACHE", str(folder / "cache"))
    (folder / "base.yaml").write_text(task + REST, encoding="utf-8")
    config = load_config(str(folder), overrides)
    run = RunDir.create(folder / "run", config)
    run_training(config, build_plan(config), run, Console(file=io.StringIO()), resume=False)
    played = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert [trajectory.error for trajectory in played] == [None] * 8
    assert (run.path / "checkpoints" / "step_000002").is_dir()
    return played
