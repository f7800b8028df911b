"""Recipes whose agent was written elsewhere: settings that are refused, and a whole run from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.build.plan import build_plan
from agent_r1.config import load_config, parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.trajectories import RecordFile
from tests.conftest import Cli

MINI = str(Path(__file__).parents[1] / "mini")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["task.flow=gateway"], "gateway.agent|gateway.command|section gateway"),
        (["gateway.agent=task.reward"], "task.flow=gateway"),
        (["task.flow=gateway", "task.tools=[]", "gateway.stdin=row"], "exactly one"),
        (["task.flow=gateway", "task.tools=[]", "gateway.agent=task.reward", "gateway.stdin=row"], "gateway.stdin"),
        (["task.flow=gateway", "task.tools=[]", "gateway.command=ls", "gateway.stdin=rows"], "gateway.stdin"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(MINI, ["sft.demos=null", *overrides])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["gateway.command=[ls, '{promt}']"], "promt"),
        (["gateway.agent=program.nobody"], "nobody"),
        (["gateway.agent=program.main"], "gateway.agent"),  # takes no arguments
        (["gateway.tool_format=hermess"], "hermess"),
        (["backend=verl"], "backend=local"),
        (["task.workers.processes=1"], "task.workers"),
        (["context={policy: window}"], "context.policy"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_model_is_made(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_plan(load_config(f"{MINI}/gateway.yaml", overrides))


def test_a_function_replaces_a_command_and_is_accepted_again_as_the_run_keeps_it() -> None:
    config = load_config(f"{MINI}/gateway.yaml", ["gateway.agent=task.reward"])
    assert config.gateway is not None
    assert (config.gateway.agent, config.gateway.command) == ("task.reward", None)
    assert parse_config(config.model_dump()) == config


def test_a_program_is_trained_from_the_command_line(cli: Cli, cache: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["trainer.steps=2", "rollout.rows_per_step=2", "rollout.group_size=3", "eval.rows=2"]
    ended = cli("train", f"{MINI}/gateway.yaml", *small, "--run", run)
    assert ended.code == 0, ended.err
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["gateway/calls"] for record in trained] == [2, 2]
    assert [record["stop/error"] for record in trained] == [0, 0]
    assert max(record["mismatch_max"] for record in trained if "mismatch_max" in record) < 1e-4
    assert sum(record.get("grad_norm", 0) for record in trained) > 0
    for trajectory in RecordFile(run / "trajectories" / "train_000001.jsonl").trajectories():
        first, second = trajectory.steps
        known = first.prompt_ids + first.response_ids
        assert second.prompt_ids[: len(known)] == known
