"""Every bundled recipe runs two steps, from making its model to a resumable checkpoint, without a network.

Recipes that need data, a larger model or time have a preset `tiny` for this, whose demonstrations are right.
"""

from __future__ import annotations

import asyncio
import io
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_plan
from agent_r1.build.start import sft_trajectories
from agent_r1.build.task import build_task, recipe_function
from agent_r1.cli.commands.train import run_training
from agent_r1.config import RunConfig, bundled_presets, bundled_recipes, load_config
from agent_r1.guard import call
from agent_r1.rollout.scoring import RewardFunction, named_components
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.tools.python.sandbox import what_is_missing
from agent_r1.types import Group, TaskRow, Trajectory

SMALL_QUICKSTART = [
    "task.train_count=32",
    "sft.count=24",
    "sft.epochs=1",
    "rollout.rows_per_step=2",
    "rollout.group_size=3",
    "trainer.steps=2",
    "trainer.save_every=1",
    "trainer.eval_every=2",
    "eval.rows=4",
]
QUICKSTARTS = ("quickstart", "vision_quickstart")  # their models are tiny, and their demonstrations imperfect
CPU = [preset for recipe in bundled_recipes() for preset in bundled_presets(recipe) if preset.endswith("/cpu")]
TINY = [preset for recipe in bundled_recipes() for preset in bundled_presets(recipe) if preset.endswith("/tiny")]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start without caches and without a network."""
    for name in ("AGENT_R1_CACHE", "AGENT_R1_DATA", "AGENT_R1_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, only_to_this_machine(getattr(socket.socket, name)))
    torch.set_num_threads(1)


def only_to_this_machine(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a tiny run needs no network, and wants to reach {address}")
        return connect(self, address)

    return guarded


def settings(recipe: str) -> list[str]:
    isolated = what_is_missing("namespaces") is None
    return ["task.tool_kwargs.python.level=process"] if recipe == "retool/tiny" and not isolated else []


def trained(config: RunConfig, folder: Path) -> RunDir:
    """Train with an extra reward for letters: an untrained model would otherwise earn nothing and have no signal."""
    run, plan = RunDir.create(folder, config), build_plan(config)
    scorer = replace(plan.task.scorer, reward=with_letters(plan.task.scorer.reward))
    plan = replace(plan, task=replace(plan.task, scorer=scorer))
    run_training(config, plan, run, Console(file=io.StringIO()), resume=False)
    return run


def with_letters(reward: RewardFunction) -> RewardFunction:
    async def paid(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
        parts = named_components(await call(reward, row, trajectory))
        text = trajectory.final_text
        letters = sum(char.isalpha() for char in text) / max(1, len(text))
        return parts | {"reward": parts["reward"] + letters, "own": parts["reward"]}

    return paid


def check_run(config: RunConfig, run: RunDir) -> None:
    """Check that both steps sampled, scored and updated, with finite metrics."""
    records = run.read_metrics("train")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert all(math.isfinite(value) for key, value in record.items() if key not in ("kind", "panel")), record
        assert not record["empty_update"]
        assert record["mismatch_max"] < 1e-4
        assert record["grad_norm"] > 0
        assert record["stop/error"] == 0
    played = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert len(played) == 2 * config.rollout.rows_per_step * config.rollout.group_size
    assert {trajectory.reward_components["own"] for trajectory in played} <= {0.0, 1.0}
    assert [record["step"] for record in run.read_metrics("eval")] == [0, 2]
    assert latest_checkpoint(run.checkpoints)[0] == 2


def test_every_recipe_has_a_tiny_preset_or_is_tiny() -> None:
    assert {preset.split("/")[0] for preset in TINY} == set(bundled_recipes()) - set(QUICKSTARTS)


@pytest.mark.parametrize("recipe", QUICKSTARTS)
def test_a_quickstart_runs_two_steps(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe, SMALL_QUICKSTART)
    check_run(config, trained(config, tmp_path / "run"))


@pytest.mark.parametrize("preset", CPU)
def test_a_preset_that_learns_on_a_cpu_runs_two_steps(preset: str, tmp_path: Path) -> None:
    config = load_config(preset, [*SMALL_QUICKSTART, "trainer.save_every=2"])
    check_run(config, trained(config, tmp_path / "run"))


@pytest.mark.parametrize("reasoning", ["keep", "strip"])
def test_an_agent_that_thinks_is_trained_with_and_without_its_earlier_thoughts(reasoning: str, tmp_path: Path) -> None:
    config = load_config("quickstart/thinking", [*SMALL_QUICKSTART, f"context.reasoning={reasoning}"])
    run = trained(config, tmp_path / "run")
    check_run(config, run)
    demos = demonstrations(config, run)
    prompts = [step.prompt_ids for trajectory in demos for step in trajectory.steps[1:]]
    renderer = load_model(config, latest_checkpoint(run.checkpoints)[1]).renderer
    assert {"<think>" in renderer.decode(ids) for ids in prompts} == {reasoning == "keep"}
    extended = [
        now.prompt_ids[: len(before.prompt_ids)] + before.response_ids
        == now.prompt_ids[: len(before.prompt_ids) + len(before.response_ids)]
        for trajectory in demos
        for before, now in zip(trajectory.steps, trajectory.steps[1:], strict=False)
    ]
    assert set(extended) == {reasoning == "keep"}


@pytest.mark.parametrize("recipe", TINY)
def test_a_recipe_runs_two_steps(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe, settings(recipe))
    run = trained(config, tmp_path / "run")
    check_run(config, run)
    assert len(list((tmp_path / "AGENT_R1_CACHE").glob("warm-*"))) == 1  # the warm start was made, here and now
    check_demonstrations(config, run)


def check_demonstrations(config: RunConfig, run: RunDir) -> None:
    """Check that demonstrations call the tools, that no call fails and that each is a success."""
    demos = demonstrations(config, run)
    calls = [record for trajectory in demos for step in trajectory.steps for record in step.calls]
    assert len(demos) == config.sft.count
    assert bool(calls) == bool(config.task.tools)
    assert [record.error for record in calls if record.error is not None] == []
    assert min(trajectory.outcome_reward for trajectory in demos) >= config.task.success_reward


def demonstrations(config: RunConfig, run: RunDir) -> list[Trajectory]:
    assert config.sft.demos is not None
    task, model = build_task(config), load_model(config, latest_checkpoint(run.checkpoints)[1])
    rows = [row for row, _ in recipe_function(config.sft.demos, config)(count=config.sft.count, seed=config.seed)]

    async def play() -> list[Trajectory]:
        played = await sft_trajectories(config, task, model.renderer, lambda line: None)
        groups = [Group(row=row, trajectories=[one]) for row, one in zip(rows, played, strict=True)]
        return [group.trajectories[0] for group in await task.scorer(groups)]

    return asyncio.run(play())
