"""Agents that no one here wrote: each plays the quickstart through the gateway, id for id as the native flow.

The frameworks are in an environment of their own; `bash .ci/agents` installs it and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runs.trajectories import RecordFile
from agent_r1.types import Trajectory

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("AGENT_R1_AGENTS_PYTHON", "")
SMALL = ["trainer.steps=1", "rollout.rows_per_step=4", "rollout.group_size=4", "eval.rows=2"]

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="AGENT_R1_AGENTS_PYTHON does not name an interpreter: run bash .ci/agents"),
]

Ids = dict[str, list[tuple[list[int], list[int]]]]  # of prompts and responses, by episode


def run(python: str, *words: str | Path) -> None:
    command = [python, "-m", "agent_r1.cli", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def episodes(run: Path) -> list[Trajectory]:
    return list(RecordFile(run / "trajectories" / "train_000001.jsonl").trajectories())


def ids(played: list[Trajectory]) -> Ids:
    return {each.trajectory_id: [(step.prompt_ids, step.response_ids) for step in each.steps] for each in played}


def readable(trajectory: Trajectory) -> bool:
    """Whether all calls can be read. The native flow explains to the model what is wrong with the others."""
    return all(call.error is None for step in trajectory.steps for call in step.calls)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ids]]:
    """A warm start that calls tools, and the episodes of the native flow."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_CACHE", str(folder / "cache"))
        run(sys.executable, "sft", "quickstart", "sft.count=1200", "--run", folder / "start")
        words = ["quickstart", "sft.demos=null", "sft.trajectories=null", f"model.path={folder / 'start'}", *SMALL]
        run(sys.executable, "train", *words, "--run", folder / "run")
        yield folder / "start", ids([each for each in episodes(folder / "run") if readable(each)])


@pytest.mark.parametrize("framework", ["openai_agents", "langgraph", "pydantic_ai"])
def test_a_framework_plays_as_the_native_flow_id_for_id(
    framework: str, native: tuple[Path, Ids], tmp_path: Path
) -> None:
    start, expected = native
    recipe: list[str | Path] = [ROOT / "benchmarks" / "foreign", f"gateway.agent=frameworks.{framework}"]
    run(PYTHON, "train", *recipe, f"model.path={start}", *SMALL, "--run", tmp_path / "run")
    assert sum(len(steps) > 1 for steps in expected.values()) >= 8  # of 16 episodes; it does call tools
    found = ids(episodes(tmp_path / "run"))
    assert {name: found[name] for name in expected} == expected
    [trained] = [record for record in records(tmp_path / "run") if record["kind"] == "train"]
    assert trained["stop/error"] == 0
    assert trained["gateway/conversations"] == 1


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
