"""Trajectories on disk: JSON Lines that can be followed while they grow, each with an index beside it.

Ids, log-probs, rewards and advantages are stored exactly: floats round-trip. Ratios and entropies, which nothing reads
again, are rounded, and missing where the learner had nothing to compute. JSON has no NaN, so numbers that are not
finite are the strings "NaN", "Infinity" and "-Infinity". The ids that top-k and top-p kept are base64 of little-endian
int32. Every record has the `format` that it was written in.

`x.jsonl.idx` holds, for each record of `x.jsonl`, the offset of its end as a little-endian 64-bit integer. The index is
a cache: what it lacks is found by scanning the file. A last line that is not a complete record is still being written,
or was cut off by a kill, and does not count.
"""

from __future__ import annotations

import gzip
import math
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from agent_r1.data.files import dump_json, read_json
from agent_r1.disk import write_atomically
from agent_r1.errors import DataError
from agent_r1.places import anchored
from agent_r1.types import Failure, Group, PerToken, Step, StopReason, Support, ToolCallRecord, Trajectory
from agent_r1.vision.contents import picture_mark
from agent_r1.vision.picture_store import PICTURES, load_picture, store_pictures
from agent_r1.vision.pictures import Picture, added_pictures, pictures_of

FORMAT = 4  # format of a record; 3 lacks ratios and entropies, 2 also roles and start times, 1 also this field
TRAINED, EVALUATED = "train_*", "eval_*"  # stems of files with training episodes and with episodes of evaluations
JSON_ERRORS = "backslashreplace"  # writes a lone surrogate as JSON does, "\udc80"
Numbers = Mapping[str, PerToken]  # name -> [step][response token]
COMPUTED = ("advantages", "ratios", "entropies")  # values per token that a step's record may hold beside the step
Find = Callable[[Sequence[str]], tuple[Picture, ...]]  # names of pictures -> the pictures
Record = dict[str, Any]  # one trajectory as JSON, with numbers per token and its row's prompt and ground truth


def trajectory_to_json(trajectory: Trajectory, numbers: Numbers | None = None) -> Record:
    record = {"format": FORMAT, **_fields(trajectory)}
    record["steps"] = [_step_to_json(step) for step in trajectory.steps]
    for name in ("next_pictures", "counts", "log", "started"):
        if not record[name]:
            del record[name]
    record["failure"] = None if trajectory.failure is None else _fields(trajectory.failure)
    record["total_reward"] = trajectory.total_reward  # derived values, for people and queries
    record["error"] = trajectory.error
    for name, per_token in (numbers or {}).items():
        for step, values in zip(record["steps"], per_token, strict=True):
            if name == "advantages":
                step[name] = list(values)
            elif not all(map(math.isnan, values)):  # only for people, so rounded
                step[name] = [float(f"{value:.4g}") for value in values]
    return record


def trajectory_from_json(record: Record, pictures: Path | None = None) -> Trajectory:
    """`pictures`: the folder with the pictures that the record names."""
    load = cache(partial(load_picture, pictures))  # every later step shows a picture again

    def find(names: Sequence[str]) -> tuple[Picture, ...]:
        return tuple(map(load, names))

    try:
        if record.get("format", 1) > FORMAT:
            raise ValueError(f"it has format {record['format']}, but this version reads up to {FORMAT}")
        known = {field.name: record[field.name] for field in fields(Trajectory) if field.name in record}
        known |= {
            "steps": [_step_from_json(step, find) for step in record["steps"]],
            "stop": StopReason(record["stop"]),
            "outcome_reward": float(record["outcome_reward"]),
            "reward_components": as_floats(record["reward_components"]),
            "failure": _failure_from_json(record),
            "next_pictures": find(record.get("next_pictures", ())),
            "counts": as_floats(record.get("counts", {})),
        }
        return Trajectory(**known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a trajectory record: {type(error).__name__}: {error}") from error


def write_groups(path: Path, groups: Iterable[Group], numbers: Mapping[str, Numbers] | None = None) -> None:
    """Write one line per trajectory, with its row's prompt and ground truth, and the index beside the file. `numbers`
    are by trajectory id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = list(groups)
    store_pictures(path.parent / PICTURES, chain.from_iterable(map(_pictures_of, groups)))
    with path.open("wb") as file, _index_path(path).open("wb") as index:
        for group in groups:
            row = {"prompt": group.row.prompt, "ground_truth": group.row.ground_truth}
            for trajectory in group.trajectories:
                record = trajectory_to_json(trajectory, (numbers or {}).get(trajectory.trajectory_id))
                line = dump_json({**record, "row": row}, default=str) + "\n"
                file.write(line.encode("utf-8", JSON_ERRORS))
                index.write(file.tell().to_bytes(8, "little"))
            file.flush()
            index.flush()


class RecordFile:
    """The records of one file, counted and read by position, also while another process is writing it.

    Gzipped files (`.jsonl.gz`) have no index on disk, and are read from their start to a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_gzip = path.suffix == ".gz"
        self._ends = array("Q")  # end of every complete line
        self._size = -1  # size of the file when `_ends` was made
        self._lacks_newline = False  # whether the last of these lines lacks its newline

    def __len__(self) -> int:
        self._update()
        return len(self._ends)

    def __getitem__(self, position: int) -> Record:
        """Return a record. Raises IndexError if there are fewer."""
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"record {position} does not exist: {self.path} has {count} records")
        return self._parse(next(self.lines(position % count)), position % count)

    def __iter__(self) -> Iterator[Record]:
        for position, line in enumerate(self.lines()):
            yield self._parse(line, position)

    def lines(self, start: int = 0) -> Iterator[bytes]:
        """Return the complete lines from a position on, not parsed."""
        if start > 0:
            self._update()
        if start > len(self._ends):
            return iter(())
        return self._lines(self._ends[start - 1] if start else 0, start)

    def trajectories(self) -> Iterator[Trajectory]:
        for position, record in enumerate(self):
            try:
                yield trajectory_from_json(record, self.path.parent / PICTURES)
            except DataError as error:
                raise DataError(f"{self.path} line {position + 1}: {error}") from error

    def _lines(self, offset: int, position: int) -> Iterator[bytes]:
        try:
            with gzip.open(self.path) if self._is_gzip else self.path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not _is_complete(line):
                        return
                    yield line
                    position += 1
        except (EOFError, OSError, zlib.error) as error:  # a damaged gzip file
            raise DataError(f"{self.path} line {position + 1}: {error}") from error

    def _parse(self, line: bytes, position: int) -> Record:
        try:
            record = read_json(line.decode("utf-8", "replace"))
            if not isinstance(record, dict):
                raise ValueError("not a trajectory record")
        except ValueError as error:
            raise DataError(f"{self.path} line {position + 1}: {error}") from error
        return record

    def _update(self) -> None:
        """Make `_ends` cover every complete line that the file has now."""
        size = self.path.stat().st_size
        if size == self._size:
            return
        if size < self._size or not self._ends or self._lacks_newline:  # replaced, new to us, or continued
            self._ends = array("Q") if self._is_gzip else self._read_index(size)
        is_indexed = bool(self._ends) or self._is_gzip
        end = self._ends[-1] if self._ends else 0
        for line in self._lines(end, len(self._ends)):
            end += len(line)
            self._ends.append(end)
            self._lacks_newline = not line.endswith(b"\n")
        self._size = size
        if self._ends and not is_indexed:
            with suppress(OSError), write_atomically(_index_path(self.path)) as part:  # the run may be read-only
                part.write_bytes(self._ends.tobytes())

    def _read_index(self, size: int) -> array[int]:
        """Return the index, or an empty one if it is missing or does not belong to the file."""
        ends = array("Q")
        with suppress(OSError):
            packed = _index_path(self.path).read_bytes()
            ends.frombytes(packed[: len(packed) // 8 * 8])
        if ends and ends[-1] <= size:
            with self.path.open("rb") as file:
                file.seek(ends[-1] - 1)
                if file.read(1) == b"\n":
                    return ends
        return array("Q")


def trajectories_of(place: str) -> Path:
    """Return the folder or file itself, or the folder with the trajectories if it is a run."""
    path = anchored(place)
    return path / "trajectories" if (path / "trajectories").is_dir() else path


def trajectory_files(source: Path, stem: str = "*") -> list[Path]:
    """Return the file, or the files of a folder whose stem matches; raises DataError if there are none."""
    if source.exists() and not source.is_dir():
        return [source]
    found = sorted([*source.glob(f"{stem}.jsonl"), *source.glob(f"{stem}.jsonl.gz")])
    if not found:
        raise DataError(f"no trajectories ({stem}.jsonl or {stem}.jsonl.gz) at {source}")
    return found


def read_trajectories(source: Path, stem: str = "*") -> Iterator[Trajectory]:
    """Yield all trajectories of a file, or of the files of a folder whose stem matches, in name order."""
    for path in trajectory_files(source, stem):
        yield from RecordFile(path).trajectories()


def transcript(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return (speaker, text) pairs of the whole episode, for terminals."""
    lines: list[tuple[str, str]] = []
    for index, step in enumerate(trajectory.steps):
        lines.append((step.role or ("memo" if step.is_summary else "agent"), step.action_text))
        seen = [picture_mark(picture) for picture in answer_pictures(trajectory, index)]
        if answer := "\n".join(filter(None, [step.feedback, *seen])):
            lines.append((answerer(step), answer))
    return lines


def answer_pictures(trajectory: Trajectory, index: int) -> list[Picture]:
    """Return the pictures of the answer to a step: the pictures of its calls, or the pictures that the next prompt
    adds."""
    step, later = trajectory.steps[index], trajectory.steps[index + 1 :]
    if any(call.pictures for call in step.calls):
        return [picture for call in step.calls for picture in call.pictures]
    ids, known = (
        (later[0].prompt_ids, later[0].pictures) if later else (trajectory.next_prompt_ids, trajectory.next_pictures)
    )
    return added_pictures(step.prompt_ids + step.response_ids, ids, known)


def answerer(step: Step) -> str:
    """Return who answered a step, for people."""
    return "tool" if step.calls else "env"


def _is_complete(line: bytes) -> bool:
    """Whether a line has its newline, or is a whole record without one, as other programs end their files."""
    if line.endswith(b"\n"):
        return True
    try:
        return isinstance(read_json(line.decode("utf-8", "replace")), dict)
    except ValueError:
        return False


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.idx")


def _failure_from_json(record: Mapping[str, Any]) -> Failure | None:
    failure, error = record.get("failure"), record["error"]
    if failure is None and error is not None:  # format 1 has only this text
        failure = {"kind": error, "message": error}
    return None if failure is None else Failure(**failure)


def _fields(item: Failure | Step | ToolCallRecord | Trajectory) -> Record:
    """Return the fields as they are; `asdict` would copy every token."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _step_to_json(step: Step) -> Record:
    record = _fields(step) | {"calls": [_named_pictures(_fields(call)) for call in step.calls]}
    if step.support is not None:
        packed = {"counts": step.support.counts, "ids": step.support.ids}
        record["support"] = {name: b64encode(data).decode() for name, data in packed.items()}
    if not step.role:
        del record["role"]
    return _named_pictures(record)


def _named_pictures(record: Record) -> Record:
    """Replace the pictures by their names. Without pictures, the record has no such key, like older records."""
    pictures = record.pop("pictures")
    return record | {"pictures": [picture.name for picture in pictures]} if pictures else record


def _pictures_of(group: Group) -> Iterator[Picture]:
    """Yield all pictures that the group's records name."""
    yield from pictures_of(group.row.prompt)
    for trajectory in group.trajectories:
        yield from pictures_of(trajectory.opening)
        for step in trajectory.steps:
            yield from step.pictures
            yield from chain.from_iterable(call.pictures for call in step.calls)
        yield from trajectory.next_pictures


def _step_from_json(record: Mapping[str, Any], find: Find) -> Step:
    known = {key: value for key, value in record.items() if key not in COMPUTED}
    known["response_logprobs"] = list(map(float, record["response_logprobs"]))
    version = known.pop("policy_version", 0)  # format 1 has one version for the whole step
    known["versions"] = tuple(map(tuple, record.get("versions", [(version, len(record["response_ids"]))])))
    known["calls"] = tuple(_call_from_json(call, find) for call in record["calls"])
    known["pictures"] = find(record.get("pictures", ()))
    if (support := record.get("support")) is not None:
        known["support"] = Support(**{name: b64decode(packed) for name, packed in support.items()})
    return Step(**known)


def _call_from_json(record: Mapping[str, Any], find: Find) -> ToolCallRecord:
    span = record["token_span"]
    spans = {"text_span": tuple(record["text_span"]), "token_span": None if span is None else tuple(span)}
    return ToolCallRecord(**{**record, **spans, "pictures": find(record.get("pictures", ()))})


def as_floats(stored: Mapping[str, Any]) -> dict[str, float]:
    """Read stored numbers, of which "NaN" is one too."""
    return {name: float(value) for name, value in stored.items()}
