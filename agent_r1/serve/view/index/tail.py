"""Follow `metrics.jsonl` by byte offset: each look reads only what was appended since the last one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from agent_r1.data.files import read_json


class MetricsTail:
    """The metric records of a run so far. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode = self._offset = 0
        self._start = b""  # of the file; a resumed run writes it anew
        self.generation = 0  # changes when records were replaced, so that readers start over
        self.records: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Read what is new and return all records. A missing file has none; a last line without its end waits."""
        with self._lock:
            try:
                stat = self._path.stat()
                with self._path.open("rb") as file:
                    start = file.read(len(self._start) or 64)
                    if stat.st_ino != self._inode or stat.st_size < self._offset or start != self._start:
                        self._begin(stat.st_ino, start)
                    file.seek(self._offset)
                    added = file.read()
            except OSError:
                self._begin(0, b"")
                return self.records
            complete = added[: added.rfind(b"\n") + 1]
            self._offset += len(complete)
            # A new list: readers may still use the old one.
            self.records = [*self.records, *filter(None, map(_parse, complete.splitlines()))]
            return self.records

    def _begin(self, inode: int, start: bytes) -> None:
        self.generation += bool(self.records)
        self._inode, self._offset, self._start, self.records = inode, 0, start, []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = read_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)
    return record if is_record else None
