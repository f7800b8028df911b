"""Tasksets of verifiers. Its pins are not ours, so `.ci/adapters` runs these tests in an environment of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import replay
from agent_r1.adapters.verifiers_tasks import VerifiersEnv, reward, rows
from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import Step, StopReason, Trajectory
from tests.adapters.training import train_two_steps

pytest.importorskip("verifiers.v1", reason="pip install verifiers, in an environment of its own")

SUMS, DRAWERS = "tests.adapters.small_taskset:Sums", "tests.adapters.small_taskset:Drawers"


def answered(text: str) -> Trajectory:
    step = Step(prompt_ids=[], response_ids=[], response_logprobs=[], action_text=text)
    return Trajectory(row_id="r", trajectory_id="r#0", steps=[step], stop=StopReason.ANSWERED)


def test_rows_of_a_taskset_are_its_tasks_and_splits_do_not_overlap() -> None:
    train, test = rows("train", taskset=SUMS, held_out=5), rows("test", taskset=SUMS, held_out=5)
    assert [message["content"] for message in train[0].prompt] == ["Add.", "5 + 1"]
    assert ([row.row_id for row in test], len(train)) == ([f"test-{index}" for index in range(5)], 15)
    assert len(rows("train", 3, taskset=SUMS, config={"size": 10}, held_out=5)) == 3


def test_the_task_scores_the_episode_with_its_weights_and_metrics() -> None:
    row = rows("test", 3, taskset=SUMS)[2]
    assert asyncio.run(reward(row, answered("3"))) == {"reward": 2.0, "exact": 1.0, "length": 1.0}
    assert asyncio.run(reward(row, answered("four")))["reward"] == 0.0


def test_tools_of_a_toolset_are_called_and_their_state_is_scored() -> None:
    row = rows("test", 2, taskset=DRAWERS)[1]
    calls = [FORMATS["hermes"].write_call("open_drawer", {"number": number}) for number in (1, 3)]
    played = asyncio.run(replay(VerifiersEnv, row, [*calls, "note 1"]))
    assert [call.result for step in played.steps for call in step.calls] == ["empty", "note 1"]
    assert asyncio.run(reward(row, played)) == {"reward": 1.0, "found": 1.0, "opened": 2.0}
    again = asyncio.run(replay(VerifiersEnv, row, [*calls[:1], "none"]))
    assert asyncio.run(reward(row, again)) == {"reward": 0.0, "found": 0.0, "opened": 1.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"taskset": "tests.adapters.small_taskset:Boxed"}, "setup"),
        ({"taskset": "tests.adapters.small_taskset:Nowhere"}, "Nowhere"),
        ({"taskset": "tests.adapters.small_taskset:SumTask"}, "Taskset"),
        ({"taskset": SUMS, "config": {"sice": 3}}, "sice"),
    ],
)
def test_what_is_not_supported_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rows("train", **settings)


@pytest.mark.parametrize(("taskset", "player"), [(SUMS, "flow: single_step"), (DRAWERS, "env: verifiers")])
def test_two_steps_of_training(taskset: str, player: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = f"""
task:
  rows: verifiers
  rows_kwargs: {{taskset: "{taskset}", held_out: 5}}
  reward: verifiers
  {player}
"""
    assert len(train_two_steps(task, tmp_path, monkeypatch)) == 8
