"""Records of trajectories: exact, strict JSON, indexed, readable while they grow, damage named with its line."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from agent_r1.errors import DataError
from agent_r1.runs.outcomes import EvalRecord, Subject
from agent_r1.runs.trajectories import (
    FORMAT,
    RecordFile,
    read_trajectories,
    trajectory_from_json,
    trajectory_to_json,
    write_groups,
)
from agent_r1.types import Failure, Group, Step, StopReason, Support, TaskRow, ToolCallRecord, Trajectory

NAN, INF = math.nan, math.inf
CALL = ToolCallRecord(
    name="add",
    arguments={"a": [1, None]},
    result="3",
    reward=0.5,
    text_span=(0, 4),
    token_span=(0, 2),
    info={"score": NAN, "bounds": [-INF, INF], "fine": 1.5},
)
STEP = Step(
    prompt_ids=[1, 2],
    response_ids=[3, 4],
    response_logprobs=[-1 / 3, -INF],
    reward=0.5,
    versions=((7, 2),),
    action_text='call "ü" \udc80',
    calls=(CALL,),
    info={"k": 1},
)
TRAJECTORY = Trajectory(
    row_id="r",
    trajectory_id="r#0",
    steps=[STEP, replace(STEP, calls=())],
    stop=StopReason.MAX_STEPS,
    outcome_reward=1.0,
    reward_components={"reward": 1.0, "format": 0.25},
    counts={"gateway/calls": 2.0},
    log="started\n",
)
ROW = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r", reward_model={"ground_truth": NAN})


def write(path: Path, count: int) -> RecordFile:
    write_groups(path, [Group(row=ROW, trajectories=[replace(TRAJECTORY, row_id=f"r{i}")]) for i in range(count)])
    return RecordFile(path)


def row_ids(file: RecordFile) -> list[str]:
    return [record["row_id"] for record in file]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_a_trajectory_is_strict_json_and_comes_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_groups(path, [Group(row=ROW, trajectories=[TRAJECTORY])], {"r#0": {"advantages": [[0.1, NAN], [0.3, 0.4]]}})
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert record["format"] == FORMAT
    assert record["steps"][0]["advantages"] == [0.1, "NaN"]
    assert record["total_reward"] == 2.0  # 0.5 + 0.5 + 1.0
    assert record["row"] == {"prompt": ROW.prompt, "ground_truth": "NaN"}
    texts = {
        "score": "NaN",
        "bounds": ["-Infinity", "Infinity"],
        "fine": 1.5,
    }  # what a tool returned is not interpreted
    expected = replace(TRAJECTORY, steps=[replace(STEP, calls=(replace(CALL, info=texts),)), TRAJECTORY.steps[1]])
    assert list(read_trajectories(path)) == [expected]


def test_ratios_and_entropies_are_rounded_and_left_out_where_nothing_was_computed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    noted = {"ratios": [[1.23456789, math.inf], [NAN, NAN]], "entropies": [[0.000123456, NAN], [0.5, 0.25]]}
    write_groups(path, [Group(row=ROW, trajectories=[TRAJECTORY])], {"r#0": noted})
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert record["steps"][0]["ratios"] == [1.235, "Infinity"]
    assert "ratios" not in record["steps"][1]
    assert [step["entropies"] for step in record["steps"]] == [[0.0001235, "NaN"], [0.5, 0.25]]
    assert len(list(read_trajectories(path))) == 1


def test_the_ids_that_top_p_kept_round_trip_in_few_bytes() -> None:
    kept = [[3, 70_000], list(range(1000))]
    step = replace(STEP, temperature=0.7, top_p=0.9, top_k=1024, support=Support.of(kept))
    text = json.dumps(trajectory_to_json(replace(TRAJECTORY, steps=[step])))
    assert len(text) < 1002 * 4 * 4 / 3 + 1500  # four bytes an id, in base64
    [read] = trajectory_from_json(json.loads(text)).steps
    assert read.support is not None
    assert read.support.per_token() == kept
    for damage in ('"counts": "AgA', '"ids": "AAAA'):
        with pytest.raises(DataError, match="not a trajectory record"):
            trajectory_from_json(json.loads(text.replace(damage.partition(': "')[0] + ': "', damage)))


def test_records_of_format_1_are_read_and_later_formats_refused() -> None:
    failed = replace(TRAJECTORY, stop=StopReason.ERROR, failure=Failure(kind="KeyError", message="KeyError: 'x'"))
    record = trajectory_to_json(failed)
    later = record | {"format": FORMAT + 1}
    del record["format"], record["failure"], record["opening"], record["next_prompt_ids"]
    for step in record["steps"]:
        for name in ("temperature", "top_p", "top_k", "support", "versions"):
            del step[name]
        step["policy_version"] = 7
    message = "KeyError: 'x'"
    assert trajectory_from_json(record) == replace(failed, failure=Failure(kind=message, message=message))
    with pytest.raises(DataError, match=f"format {FORMAT + 1}"):
        trajectory_from_json(later)


def test_the_nth_record_is_read_at_its_offset(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", 50)
    content = file.path.read_bytes()
    lines = content.splitlines(keepends=True)
    file.path.write_bytes(b"x" * len(b"".join(lines[:30])) + b"".join(lines[30:]))  # nothing before it is read
    file = RecordFile(file.path)
    assert len(file) == 50
    assert (file[30]["row_id"], file[49]["row_id"], file[-2]["row_id"]) == ("r30", "r49", "r48")
    with pytest.raises(IndexError, match="50 records"):
        file[50]


@pytest.mark.parametrize("damage", ["missing", "cut off", "of another file"])
def test_an_index_that_is_missing_or_stale_is_rebuilt(tmp_path: Path, damage: str) -> None:
    file, index = write(tmp_path / "a.jsonl", 20), tmp_path / "a.jsonl.idx"
    whole = index.read_bytes()
    if damage == "missing":
        index.unlink()
    elif damage == "cut off":
        index.write_bytes(whole[:-21])  # a killed writer: the file is ahead of its index
    else:
        write(tmp_path / "b.jsonl", 300)
        shutil.copy(tmp_path / "b.jsonl.idx", index)
    assert (len(file), file[19]["row_id"]) == (20, "r19")
    if damage != "cut off":  # a writer may still be appending to it
        assert index.read_bytes() == whole


def test_a_file_is_read_while_it_grows(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", 3).path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole[0] + whole[1][:-10])  # the second line is still being written
    file = RecordFile(path)
    assert (len(file), row_ids(file)) == (1, ["r0"])
    path.write_bytes(b"".join(whole))
    assert (len(file), file[2]["row_id"], row_ids(file)) == (3, "r2", ["r0", "r1", "r2"])
    path.write_bytes(whole[2])  # replaced by another run
    assert (len(file), file[0]["row_id"]) == (1, "r2")


def test_a_last_record_without_a_newline_counts(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", 4).path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(whole[:2])[:-1])
    file = RecordFile(path)
    for reader in (file, RecordFile(path)):  # the second one finds an index
        assert (len(reader), reader[1]["row_id"], row_ids(reader)) == (2, "r1", ["r0", "r1"])
    path.write_bytes(b"".join(whole))
    assert (len(file), file[1]["row_id"], file[2]["row_id"]) == (4, "r1", "r2")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(whole)[:-1]))
    assert len(RecordFile(tmp_path / "b.jsonl.gz")) == 4


def test_gzipped_files_are_read_too(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", 99).path.read_bytes()
    path = tmp_path / "b.jsonl.gz"
    path.write_bytes(gzip.compress(plain))
    file = RecordFile(path)
    assert (len(file), file[98]["row_id"], row_ids(file)[:2]) == (99, "r98", ["r0", "r1"])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"b\.jsonl\.gz line \d+: "):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"x": ' + "9" * 5000 + "}", "digits"),
        ("[]", "not a trajectory record"),
        ('{"row_id": "r"}', "not a trajectory record: KeyError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", 1).path
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=rf"a\.jsonl line 2: .*{message}"):
        list(read_trajectories(path))


def test_an_evaluation_is_strict_json_too(tmp_path: Path) -> None:
    subject = Subject(model="m", recipe="r", split="test", panel="p", seed=0, settings={})
    record = EvalRecord(subject=subject, metrics={"kl": NAN}, outcomes={"a": {"reward": INF}})
    record.save(tmp_path / "e.json")
    json.loads((tmp_path / "e.json").read_text(encoding="utf-8"), parse_constant=refuse)
    read = EvalRecord.load(tmp_path / "e.json")
    assert math.isnan(read.metrics["kl"])
    assert read.outcomes == {"a": {"reward": INF}}
