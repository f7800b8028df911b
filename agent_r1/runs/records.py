"""Trajectories on disk: one JSON object per line, with everything that people, `compare` and `sft` read.

Ids, log-probs, masks (every response token is trained, nothing else is), rewards and advantages are stored exactly;
floats round-trip. JSON has no NaN: numbers that are not finite are the texts "NaN", "Infinity" and "-Infinity". The ids
that top-k and top-p kept are base64 of little-endian int32. Files ending in `.gz` are compressed.
"""

from __future__ import annotations

import gzip
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from agent_r1.data.files import dump_json, read_json
from agent_r1.errors import DataError
from agent_r1.places import anchored
from agent_r1.types import Failure, Group, Step, StopReason, Support, ToolCallRecord, Trajectory

TRAINED, EVALUATED = "train_*", "eval_*"  # the stems of files with training episodes, and with those of evaluations
JSON_ERRORS = "backslashreplace"  # a lone surrogate is written as JSON spells it, "\udc80"
Advantages = Mapping[str, Sequence[Sequence[float]]]  # trajectory id -> [step][response token]


def trajectory_to_json(trajectory: Trajectory, advantages: Sequence[Sequence[float]] | None = None) -> dict[str, Any]:
    record = asdict(trajectory)
    record["total_reward"] = trajectory.total_reward  # derived, for people and queries
    record["error"] = trajectory.error  # likewise
    for step in record["steps"]:
        if step["support"] is not None:
            step["support"] = {name: b64encode(packed).decode() for name, packed in step["support"].items()}
    if advantages is not None:
        for step, values in zip(record["steps"], advantages, strict=True):
            step["advantages"] = list(values)
    return record


def trajectory_from_json(record: Mapping[str, Any]) -> Trajectory:
    try:
        return Trajectory(
            row_id=record["row_id"],
            trajectory_id=record["trajectory_id"],
            steps=[_step_from_json(step) for step in record["steps"]],
            stop=StopReason(record["stop"]),
            outcome_reward=float(record["outcome_reward"]),
            reward_components={name: float(value) for name, value in record["reward_components"].items()},
            failure=_failure_from_json(record),
            seconds=record["seconds"],
            next_prompt_ids=record.get("next_prompt_ids", []),  # records of 0.1 have none
            opening=record.get("opening", []),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a trajectory record: {type(error).__name__}: {error}") from error


def write_groups(path: Path, groups: Iterable[Group], advantages: Advantages | None = None) -> None:
    """One line per trajectory; the row's prompt and ground truth ride along, so a file stands on its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{path.name}")
    with _open(part, "wt") as file:
        for group in groups:
            row = {"prompt": group.row.prompt, "ground_truth": group.row.ground_truth}
            for trajectory in group.trajectories:
                record = trajectory_to_json(trajectory, (advantages or {}).get(trajectory.trajectory_id))
                file.write(dump_json({**record, "row": row}, default=str) + "\n")
    part.replace(path)  # a killed run leaves whole files only


def trajectories_of(place: str) -> Path:
    """The folder or file itself; of a run, the folder with its trajectories."""
    path = anchored(place)
    return path / "trajectories" if (path / "trajectories").is_dir() else path


def trajectory_files(source: Path, stem: str = "*") -> list[Path]:
    """The file, or those of a folder whose stem matches. There must be one."""
    if source.exists() and not source.is_dir():
        return [source]
    found = sorted([*source.glob(f"{stem}.jsonl"), *source.glob(f"{stem}.jsonl.gz")])
    if not found:
        raise DataError(f"no trajectories ({stem}.jsonl or {stem}.jsonl.gz) at {source}")
    return found


def read_trajectories(source: Path, stem: str = "*") -> Iterator[Trajectory]:
    """All trajectories of a file, or of the files of a folder whose stem matches, in name order."""
    for path in trajectory_files(source, stem):
        number = 0
        try:
            with _open(path, "rt") as file:
                for line in file:
                    number += 1
                    yield trajectory_from_json(read_json(line, max_nesting=None))
        except (ValueError, EOFError, OSError, zlib.error) as error:  # the last three: a damaged gzip file
            raise DataError(f"{path} line {number}: {error}") from error


def transcript(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(speaker, text) pairs of the whole episode, for terminals."""
    lines: list[tuple[str, str]] = []
    for step in trajectory.steps:
        lines.append(("memo" if step.is_summary else "agent", step.action_text))
        lines += [(answerer(step), step.feedback)] if step.feedback else []
    return lines


def answerer(step: Step) -> str:
    """Who answered a step, for people."""
    return "tool" if step.calls else "env"


def _step_from_json(record: Mapping[str, Any]) -> Step:
    fields = {key: value for key, value in record.items() if key != "advantages"}
    fields["response_logprobs"] = list(map(float, record["response_logprobs"]))
    version = fields.pop("policy_version", 0)  # older records have one for the whole step
    fields["versions"] = tuple(map(tuple, record.get("versions", [(version, len(record["response_ids"]))])))
    fields["calls"] = tuple(
        ToolCallRecord(**{**call, "text_span": tuple(call["text_span"]), "token_span": _span(call["token_span"])})
        for call in record["calls"]
    )
    if (support := record.get("support")) is not None:
        fields["support"] = Support(**{name: b64decode(packed) for name, packed in support.items()})
    return Step(**fields)


def _failure_from_json(record: Mapping[str, Any]) -> Failure | None:
    if record["error"] is None:
        return None
    known = record.get("failure") or {"kind": record["error"], "message": record["error"]}  # older records: text only
    return Failure(**known)


def _span(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])


def _open(path: Path, mode: str) -> IO[Any]:
    errors = "replace" if mode == "rt" else JSON_ERRORS
    if path.suffix == ".gz":
        return cast(IO[Any], gzip.open(path, mode, compresslevel=3, encoding="utf-8", errors=errors))
    return path.open(mode.replace("t", ""), encoding="utf-8", errors=errors)
