"""Files of trajectories: strict JSON whatever tools return, read back as they were, damage named with its line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from agent_r1.errors import DataError
from agent_r1.runs.outcomes import EvalRecord, Subject
from agent_r1.runs.records import read_trajectories, write_groups
from agent_r1.types import Group, Step, StopReason, TaskRow, ToolCallRecord, Trajectory

NAN, INF = math.nan, math.inf


def played(**call: Any) -> Trajectory:
    record = ToolCallRecord(name="look", arguments={}, result="", text_span=(0, 1), **call)
    step = Step(prompt_ids=[1], response_ids=[2, 3], response_logprobs=[-0.5, -INF], calls=(record,))
    return Trajectory(
        row_id="a", trajectory_id="a-0", steps=[step], stop=StopReason.ANSWERED, reward_components={"f1": 0.5}
    )


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_numbers_that_json_has_not_are_written_as_text_and_read_back(tmp_path: Path) -> None:
    trajectory = played(info={"score": NAN, "bounds": [-INF, INF], "fine": 1.5})
    row = TaskRow(prompt=[], reward_model={"ground_truth": NAN})
    write_groups(tmp_path / "a.jsonl", [Group(row=row, trajectories=[trajectory])], {"a-0": [[NAN, 1.0]]})
    text = (tmp_path / "a.jsonl").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=refuse)
    assert record["steps"][0]["calls"][0]["info"] == {"score": "NaN", "bounds": ["-Infinity", "Infinity"], "fine": 1.5}
    assert record["steps"][0]["advantages"] == ["NaN", 1.0]
    assert record["row"]["ground_truth"] == "NaN"
    [read] = read_trajectories(tmp_path / "a.jsonl")
    [step] = read.steps
    assert step.response_logprobs == [-0.5, -INF]  # numbers again, where a number is meant
    assert step.calls[0].info == {"score": "NaN", "bounds": ["-Infinity", "Infinity"], "fine": 1.5}


def test_a_trajectory_is_read_as_it_was_written(tmp_path: Path) -> None:
    trajectory = played(info={"list": [1, {"a": None}]}, reward=0.25)
    write_groups(tmp_path / "a.jsonl.gz", [Group(row=TaskRow(prompt=[]), trajectories=[trajectory])])
    assert list(read_trajectories(tmp_path / "a.jsonl.gz")) == [trajectory]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"x": ' + "9" * 5000 + "}", "too many digits"),
        ("[]", "not a trajectory record"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    write_groups(tmp_path / "a.jsonl", [Group(row=TaskRow(prompt=[]), trajectories=[played()])])
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=rf"a\.jsonl line 2: .*{message}"):
        list(read_trajectories(tmp_path / "a.jsonl"))


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write_groups(
        path, [Group(row=TaskRow(prompt=[]), trajectories=[replace(played(), row_id=str(i)) for i in range(99)])]
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz line \d+: "):
        list(read_trajectories(path))


def test_an_evaluation_with_a_number_that_json_has_not_is_strict_json_too(tmp_path: Path) -> None:
    subject = Subject(model="m", recipe="r", split="test", panel="p", seed=0, settings={})
    record = EvalRecord(subject=subject, metrics={"kl": NAN}, outcomes={"a": {"reward": INF}})
    record.save(tmp_path / "e.json")
    json.loads((tmp_path / "e.json").read_text(encoding="utf-8"), parse_constant=refuse)
    read = EvalRecord.load(tmp_path / "e.json")
    assert math.isnan(read.metrics["kl"])
    assert read.outcomes == {"a": {"reward": INF}}
