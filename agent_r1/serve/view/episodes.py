"""The episodes of a run in memory: numbers as columns, texts as one block per file. Filtered, sorted and paged.

Files are read in the background, newest step first, and followed by byte offset while they grow. Questions are answered
from what has been read so far; `progress` says how much that is.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.runs.reader import RunReader
from agent_r1.runs.statistics import standard_error
from agent_r1.runs.trajectories import RecordFile
from agent_r1.serve.view.columns import NUMBERS, Columns, Part, join, thin
from agent_r1.serve.view.summary import Summary, summarize
from agent_r1.types import StopReason

BATCH = 256  # records summarised before they are published
PATIENCE = 0.1  # seconds that a question waits for new records to be read
LOOK_SECONDS = 1.0
FAILURES = tuple(reason.value for reason in StopReason if reason.is_failure)


@dataclass(frozen=True, slots=True)
class Block:
    """The texts and numbers of some episodes that follow each other in a file."""

    first: int  # position of the first of them
    texts: bytes  # each with a zero byte at its end
    ends: array[int]
    part: Part

    def containing(self, needle: bytes) -> Iterator[int]:
        """Yield the positions of the episodes whose text contains the needle."""
        at = self.texts.find(needle)
        while at >= 0:
            number = bisect_right(self.ends, at)
            yield self.first + number
            at = self.texts.find(needle, self.ends[number])


@dataclass(slots=True)
class FileIndex:
    """What was read of one file."""

    records: RecordFile
    kind: str
    step: int
    stamp: tuple[int, int, int] = (0, 0, 0)  # inode, size and time of the last change when it was last read
    rows: list[Summary] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.records.path.name.split(".")[0]


class EpisodeIndex:
    """All episodes of a run. Safe to use from several threads."""

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._files: dict[str, FileIndex] = {}
        self._lock = threading.Lock()  # held to read or publish, never while a file is read
        self._reading = threading.Lock()  # held by the thread that reads files
        self._thread: threading.Thread | None = None
        self._looked = -math.inf  # when files were last looked for
        self._version = 0  # of what is published
        self._total = 1  # records in all files; not known yet, so that nobody takes the run to be empty
        self._columns: tuple[int, Columns, list[tuple[FileIndex, int]]] | None = None
        self._stats: dict[str, tuple[int, dict[str, float]]] = {}

    def refresh(self, patience: float = PATIENCE, *, at_once: bool = False) -> None:
        """Start to read what is new, and wait a little for it. Looks for it at most once a second, or `at_once`."""
        with self._lock:
            if not at_once and time.monotonic() - self._looked < LOOK_SECONDS and not self._is_reading():
                return
            if not self._is_reading():
                self._looked = time.monotonic()
                self._thread = threading.Thread(target=self._read_all, daemon=True, name="episodes")
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(patience)

    def _is_reading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def progress(self) -> dict[str, int]:
        with self._lock:
            read = sum(len(file.rows) for file in self._files.values())
            return {"read": read, "total": max(read, self._total)}

    def require(self, name: str) -> FileIndex:
        """Return one file, read completely. Raises ConfigError if there is no such file."""
        with self._reading:
            self._find_changes(only=name)
            if name not in self._files:
                known = [file.path.name.split(".")[0] for file in self._run.files()]
                raise ConfigError(f"{self._run} has no episodes {name!r}.{did_you_mean(name, known[-8:])}")
            self._read(self._files[name])
        return self._files[name]

    def _read_all(self) -> None:
        with self._reading:
            changed = self._find_changes()
        for file in changed:
            with self._reading:  # one file at a time, so that `require` does not wait for all of them
                self._read(file)

    def _find_changes(self, only: str | None = None) -> list[FileIndex]:
        """Return the files with new records, newest first. Forgets files that were deleted or written anew."""
        found, present = list[FileIndex](), dict[str, FileIndex]()
        total = 0
        for records in self._run.files():
            name = records.path.name.split(".")[0]
            known = self._files.get(name)
            if only is not None and name != only:
                continue
            try:
                stat = records.path.stat()
                stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if known is None or _is_rewritten(known.stamp, stamp):
                    kind, _, step = name.rpartition("_")
                    known = FileIndex(records=records, kind=kind, step=int(step) if step.isdecimal() else 0)
                if known.stamp != stamp:
                    known.stamp = stamp
                    found.append(known)
                total += len(known.records) if known.records.path.suffix != ".gz" else len(known.rows)
            except (OSError, DataError):
                continue  # deleted in this moment, or damaged
            present[name] = known
        with self._lock:
            if only is None:
                self._total = total
                if self._files.keys() - present.keys():
                    self._version += 1
                self._files = present
            else:
                self._files |= present
        return sorted(found, key=lambda file: (file.step, file.kind), reverse=True)

    def _read(self, file: FileIndex) -> None:
        batch = list[bytes]()
        try:
            for line in file.records.lines(start=len(file.rows)):
                batch.append(line)
                if len(batch) == BATCH:
                    self._publish(file, batch)
                    batch = []
        except (OSError, DataError):
            pass  # deleted while it was read, or damaged from here on: keep what was read
        self._publish(file, batch)

    def _publish(self, file: FileIndex, batch: list[bytes]) -> None:
        if not batch:
            return
        read = list(map(summarize, batch))  # outside the lock: the slow part
        ends = array("Q", accumulate(len(text) + 1 for _, text in read))
        rows = [summary for summary, _ in read]
        block = Block(len(file.rows), b"".join(text + b"\0" for _, text in read), ends, Part.of(rows))
        with self._lock:
            file.blocks.append(block)
            file.rows += rows
            self._version += 1

    def _table(self) -> tuple[Columns, list[tuple[FileIndex, int]]]:
        """Return all columns, and for each file its index of the first row. Call with the lock."""
        if self._columns is None or self._columns[0] != self._version:
            files = list(self._files.values())
            firsts = accumulate((len(file.rows) for file in files), initial=0)
            starts = list(zip(files, firsts, strict=False))
            columns = join([(file.kind, file.step, [block.part for block in file.blocks]) for file in files])
            self._columns = (self._version, columns, starts)
        return self._columns[1], self._columns[2]

    def find(self, asked: Mapping[str, str], *, offset: int, limit: int, spread: bool = False) -> dict[str, Any]:
        """Return the matching episodes from `offset` on, or `limit` of them that are evenly spread over all, and counts
        of all matches by stop reason and tool."""
        with self._lock:
            columns, starts = self._table()
            chosen = self._select(columns, starts, asked)
            order = self._sort(columns, chosen, asked.get("sort") or "-step")
            firsts = [start for _, start in starts]
            page = []
            for index in thin(order, limit) if spread else order[offset : offset + limit]:
                file, start = starts[bisect_right(firsts, int(index)) - 1]
                page.append(_row(file, int(index) - start))
            return {"matches": len(order), "rows": page, **_facets(columns, chosen)}

    def _select(self, columns: Columns, starts: list[tuple[FileIndex, int]], asked: Mapping[str, str]) -> NDArray[Any]:
        chosen = np.ones(len(columns["step"]), bool)
        for key in ("kind", "row", "stop"):
            if asked.get(key):
                codes = [code for code, name in enumerate(columns[f"{key}_names"]) if name in asked[key].split("\n")]
                chosen &= np.isin(columns[key], codes)
        for key in ("tool", "role"):
            if wanted := asked.get(key):
                codes = [code for code, names in enumerate(columns[f"{key}s_names"]) if wanted in names.split("\0")]
                chosen &= np.isin(columns[f"{key}s"], codes)
        for key in ("step", *NUMBERS):
            if asked.get(f"{key}_min"):
                chosen &= columns[key] >= _number(f"{key}_min", asked[f"{key}_min"])
            if asked.get(f"{key}_max"):
                chosen &= columns[key] <= _number(f"{key}_max", asked[f"{key}_max"])
        if asked.get("step"):
            chosen &= columns["step"] == _number("step", asked["step"])
        if needle := asked.get("text", "").casefold().encode("utf-8", "replace"):
            chosen &= _containing(needle, starts, chosen)
        return chosen

    def _sort(self, columns: Columns, chosen: NDArray[Any], key: str) -> NDArray[Any]:
        name = key.removeprefix("-")
        sortable = ("step", "row", "stop", *NUMBERS)
        if name not in sortable:
            raise ConfigError(f"cannot sort by {name!r}.{did_you_mean(name, sortable)}")
        order: NDArray[Any] = columns["order"][chosen[columns["order"]]]
        if key == "-step":
            return order
        values = columns[name][order]
        return np.take(order, np.argsort(-values if key.startswith("-") else values, kind="stable"))

    def group(self, name: str, row: str) -> list[dict[str, Any]]:
        """Return the attempts at one row in one file."""
        file = self.require(name)
        with self._lock:
            return [_row(file, n) for n, summary in enumerate(file.rows) if summary.row == row]

    def neighbours(self, name: str, row: str) -> dict[str, str | None]:
        """Return the rows before and after this one in its file."""
        file = self.require(name)
        rows = list(dict.fromkeys(summary.row for summary in file.rows))
        at = rows.index(row) if row in rows else -1
        return {
            "before": rows[at - 1] if at > 0 else None,
            "after": rows[at + 1] if 0 <= at < len(rows) - 1 else None,
        }

    def statistics(self, success_reward: float) -> dict[str, list[dict[str, float]]]:
        """Return per kind and step: standard errors over rows of reward and success, seconds of sampling and tools."""
        with self._lock:
            files = [(file, list(file.rows)) for file in self._files.values()]
        result: dict[str, list[dict[str, float]]] = {}
        for file, rows in files:
            cached = self._stats.get(file.name)
            if cached is None or cached[0] != len(rows):
                cached = self._stats[file.name] = (len(rows), _statistics(rows, success_reward))
            if rows:
                result.setdefault(file.kind, []).append({"step": file.step, **cached[1]})
        return {kind: sorted(steps, key=lambda entry: entry["step"]) for kind, steps in result.items()}


def _containing(needle: bytes, starts: list[tuple[FileIndex, int]], wanted: NDArray[Any]) -> NDArray[Any]:
    hits = np.zeros_like(wanted)
    for file, start in starts:
        if wanted[start : start + len(file.rows)].any():
            found = [position for block in file.blocks for position in block.containing(needle)]
            hits[start + np.array(found, int)] = True
    return hits


def _is_rewritten(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
    """A resumed run writes the files of its repeated steps anew."""
    return before[0] != now[0] or now[1] < before[1] or (now[1] == before[1] and now[2] != before[2])


def _row(file: FileIndex, position: int) -> dict[str, Any]:
    values = file.rows[position]._asdict()
    finite = {name: value if np.isfinite(value) else str(value) for name in NUMBERS for value in [values[name]]}
    return {"file": file.name, "n": position, "kind": file.kind, "step": file.step, **values, **finite}


def _facets(columns: Columns, chosen: NDArray[Any]) -> dict[str, Any]:
    """Count the matches by stop reason, by tool and by role, and name what could be chosen."""
    stops = np.bincount(columns["stop"][chosen], minlength=len(columns["stop_names"]))
    return {
        "stops": {name: int(count) for name, count in zip(columns["stop_names"], stops, strict=True)},
        "tools": _members(columns, "tools", chosen),
        "roles": _members(columns, "roles", chosen),
        "kinds": list(columns["kind_names"]),
        "mean_reward": _mean(columns["reward"][chosen]),
    }


def _members(columns: Columns, key: str, chosen: NDArray[Any]) -> dict[str, int]:
    """Count the matches by the members of a column of combinations."""
    combined = np.bincount(columns[key][chosen], minlength=len(columns[f"{key}_names"]))
    found = Counter[str]({one: 0 for names in columns[f"{key}_names"] for one in names.split("\0") if one})
    for names, count in zip(columns[f"{key}_names"], combined, strict=True):
        for one in filter(None, names.split("\0")):
            found[one] += int(count)
    return dict(sorted(found.items()))


def _mean(values: NDArray[Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {text[:40]!r}") from None


def _statistics(rows: list[Summary], success_reward: float) -> dict[str, float]:
    def error(value: Callable[[Summary], float]) -> float:
        """Attempts at one row are not independent, so the error is that of the means of rows."""
        means: dict[str, list[float]] = {}
        for row in rows:
            means.setdefault(row.row, []).append(0.0 if row.stop in FAILURES else value(row))
        result = standard_error([float(np.mean(values)) for values in means.values()])
        return result if np.isfinite(result) else 0.0

    return {
        "reward_stderr": error(lambda row: row.reward),
        "success_stderr": error(lambda row: float(row.outcome >= success_reward)),
        "sampling": sum(row.sampling for row in rows),
        "waiting": sum(row.waiting for row in rows),
        "episodes": len(rows),
    }


def wait_until_read(index: EpisodeIndex, seconds: float) -> None:
    """Read everything, for programs that do not show progress."""
    end = time.monotonic() + seconds
    index.refresh(seconds)  # ends a reading that has begun, which may have missed the newest records
    index.refresh(end - time.monotonic(), at_once=True)
