"""The episodes of a run: numbers in memory as columns, texts on disk. Filtered, sorted and paged.

Files are read in the background, newest step first, and followed by byte offset while they grow. Questions are answered
from what has been read so far; `progress` says how much that is.
"""

from __future__ import annotations

import json
import math
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.runs.reader import RunReader
from agent_r1.runs.statistics import standard_error
from agent_r1.runs.trajectories import RecordFile
from agent_r1.serve.view.index.columns import NUMBERS, Columns, Part, join, thin
from agent_r1.serve.view.index.scratch import Scratch, Shelf
from agent_r1.serve.view.index.summary import Summary, summarize
from agent_r1.types import StopReason

BATCH, BATCH_BYTES = 256, 2**25  # records summarised before they are published, and their size
PATIENCE = 0.1  # seconds that a question waits for new records to be read
LOOK_SECONDS = 1.0
FAILURES = tuple(reason.value for reason in StopReason if reason.is_failure)


@dataclass(slots=True)
class FileIndex:
    """What was read of one file."""

    records: RecordFile
    kind: str
    step: int
    summaries: Shelf  # as JSON
    texts: Shelf  # to search, each with a zero byte at its end
    stamp: tuple[int, int, int] = (0, 0, 0)  # inode, size and time of the last change when it was last read
    count: int = 0  # of records that were read
    parts: list[Part] = field(default_factory=list)
    statistics: tuple[int, dict[str, float]] = (0, {})  # and the count that they were made of

    @property
    def name(self) -> str:
        return self.records.path.name.split(".")[0]

    def summary(self, position: int) -> Summary:
        return Summary(*json.loads(self.summaries[position]))

    def row(self, position: int) -> dict[str, Any]:
        """Return a row of the table, as it can be written as JSON."""
        values = self.summary(position)._asdict()
        finite = {name: value if np.isfinite(value) else str(value) for name in NUMBERS for value in [values[name]]}
        return {"file": self.name, "n": position, "kind": self.kind, "step": self.step, **values, **finite}


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
        self._summaries, self._texts = Scratch(), Scratch()

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
            read = sum(file.count for file in self._files.values())
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
                    number = int(step) if step.isdecimal() else 0
                    known = FileIndex(records, kind, number, Shelf(self._summaries), Shelf(self._texts))
                if known.stamp != stamp:
                    known.stamp = stamp
                    found.append(known)
                total += len(known.records) if known.records.path.suffix != ".gz" else known.count
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
        batch, size = list[bytes](), 0
        try:
            for line in file.records.lines(start=file.count):
                batch.append(line)
                size += len(line)
                if len(batch) == BATCH or size > BATCH_BYTES:
                    self._publish(file, batch)
                    batch, size = [], 0
        except (OSError, DataError):
            pass  # deleted while it was read, or damaged from here on: keep what was read
        self._publish(file, batch)

    def _publish(self, file: FileIndex, batch: list[bytes]) -> None:
        if not batch:
            return
        read = list(map(summarize, batch))  # outside the lock: the slow part
        rows = [summary for summary, _ in read]
        part = Part.of(rows)
        shelved = [
            (file.summaries, [json.dumps(row).encode() for row in rows]),
            (file.texts, [text + b"\0" for _, text in read]),
        ]
        places = [(shelf, shelf.scratch.append(b"".join(texts)), list(map(len, texts))) for shelf, texts in shelved]
        with self._lock:
            for shelf, at, lengths in places:
                shelf.add(at, lengths)
            file.parts.append(part)
            file.count += len(rows)
            self._version += 1

    def _table(self) -> tuple[Columns, list[tuple[FileIndex, int]]]:
        """Return all columns, and for each file its index of the first row. Call with the lock."""
        if self._columns is None or self._columns[0] != self._version:
            files = list(self._files.values())
            firsts = accumulate((file.count for file in files), initial=0)
            starts = list(zip(files, firsts, strict=False))
            columns, whole = join([(file.kind, file.step, file.parts) for file in files])
            for file, start in starts:
                file.parts = [whole.view(start, start + file.count)]  # numbers are kept once
            self._columns = (self._version, columns, starts)
        return self._columns[1], self._columns[2]

    def _rows_of(self, file: FileIndex) -> tuple[Columns, slice]:
        """Return all columns and where those of a file are. Call with the lock."""
        columns, starts = self._table()
        start = next((start for one, start in starts if one is file), None)
        return columns, slice(0) if start is None else slice(start, start + file.count)  # deleted in this moment

    def find(self, asked: Mapping[str, str], *, offset: int, limit: int, spread: bool = False) -> dict[str, Any]:
        """Return the matching episodes from `offset` on, or `limit` of them that are evenly spread over all, and counts
        of all matches by stop reason and tool."""
        with self._lock:
            columns, starts = self._table()
            chosen = self._select(columns, starts, asked)
            order = self._sort(columns, chosen, asked.get("sort") or "-step")
            firsts = [start for _, start in starts]
            page = []
            for index in thin(order.tolist(), limit) if spread else order[offset : offset + limit]:
                file, start = starts[bisect_right(firsts, int(index)) - 1]
                page.append(file.row(int(index) - start))
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
        if needle := asked.get("text", "").casefold().replace("\0", " ").encode("utf-8", "replace"):
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

    def summaries(self, name: str) -> list[Summary]:
        """Return all rows of one file."""
        file = self.require(name)
        return [file.summary(position) for position in range(file.count)]

    def group(self, name: str, row: str) -> list[dict[str, Any]]:
        """Return the attempts at one row in one file."""
        file = self.require(name)
        with self._lock:
            columns, here = self._rows_of(file)
            [codes] = np.nonzero(columns["row_names"] == row)
            return [file.row(int(n)) for n in np.flatnonzero(np.isin(columns["row"][here], codes))]

    def neighbours(self, name: str, row: str) -> dict[str, str | None]:
        """Return the rows before and after this one in its file."""
        file = self.require(name)
        with self._lock:
            columns, here = self._rows_of(file)
            rows = list(dict.fromkeys(columns["row_names"][columns["row"][here]]))
        at = rows.index(row) if row in rows else -1
        return {
            "before": rows[at - 1] if at > 0 else None,
            "after": rows[at + 1] if 0 <= at < len(rows) - 1 else None,
        }

    def statistics(self, success_reward: float) -> dict[str, list[dict[str, float]]]:
        """Return per kind and step: standard errors over rows of reward and success, seconds of sampling and tools."""
        result: dict[str, list[dict[str, float]]] = {}
        with self._lock:
            columns, starts = self._table()
            failed = np.isin(columns["stop_names"], FAILURES)[columns["stop"]]
            for file, start in starts:
                if file.statistics[0] != file.count:
                    here = slice(start, start + file.count)
                    file.statistics = (file.count, _statistics(columns, here, failed, success_reward))
                if file.count:
                    result.setdefault(file.kind, []).append({"step": file.step, **file.statistics[1]})
        return {kind: sorted(steps, key=lambda entry: entry["step"]) for kind, steps in result.items()}


def _containing(needle: bytes, starts: list[tuple[FileIndex, int]], wanted: NDArray[Any]) -> NDArray[Any]:
    hits, buffer = np.zeros_like(wanted), bytearray()
    for file, start in starts:
        found = list(file.texts.containing(needle, wanted[start : start + file.count], buffer))
        hits[start + np.array(found, int)] = True
    return hits


def _is_rewritten(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
    """A resumed run writes the files of its repeated steps anew."""
    return before[0] != now[0] or now[1] < before[1] or (now[1] == before[1] and now[2] != before[2])


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


def _statistics(columns: Columns, here: slice, failed: NDArray[Any], success_reward: float) -> dict[str, float]:
    _, rows = np.unique(columns["row"][here], return_inverse=True)

    def error(values: NDArray[Any]) -> float:
        """Attempts at one row are not independent, so the error is that of the means of rows."""
        means = np.bincount(rows, np.where(failed[here], 0.0, values)) / np.bincount(rows)
        result = standard_error(means.tolist())
        return result if np.isfinite(result) else 0.0

    return {
        "reward_stderr": error(columns["reward"][here]),
        "success_stderr": error(columns["outcome"][here] >= success_reward),
        "sampling": float(columns["sampling"][here].sum()),
        "waiting": float(columns["waiting"][here].sum()),
        "episodes": here.stop - here.start,
    }


def wait_until_read(index: EpisodeIndex, seconds: float) -> None:
    """Read everything, for programs that do not show progress."""
    end = time.monotonic() + seconds
    index.refresh(seconds)  # ends a reading that has begun, which may have missed the newest records
    index.refresh(end - time.monotonic(), at_once=True)
