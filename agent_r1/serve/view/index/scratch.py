"""Texts of episodes on disk instead of in memory, in a file without a name, which ends with the process.

Only where each text ends is kept in memory. What the system caches of the file, it can take back at any time.
"""

from __future__ import annotations

import io
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import IO, Any

from numpy.typing import NDArray

from agent_r1.data.downloads import user_cache

MERGED = 2**20  # bytes up to which texts that were written one after the other are read at once
_IN_MEMORY = 2**60  # offsets from here on are of what the disk had no room for


class Scratch:
    """Appended by one thread at a time, read by any number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._disk: IO[bytes] | None = None
        self._memory = io.BytesIO()
        self._size = 0  # on disk

    def append(self, data: bytes) -> int:
        """Return where the data begin."""
        with self._lock:
            try:
                self._disk = self._disk or _nameless_file()
                self._disk.seek(self._size)
                self._disk.write(data)
                self._disk.flush()
            except OSError:  # no room, or no folder that can be written to
                at = self._memory.seek(0, io.SEEK_END)
                self._memory.write(data)
                return _IN_MEMORY + at
            self._size += len(data)
            return self._size - len(data)

    def read(self, at: int, length: int) -> bytearray:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), at)
        return buffer

    def read_into(self, view: memoryview, at: int) -> None:
        with self._lock:
            source = self._memory if at >= _IN_MEMORY else self._disk
            assert source is not None
            source.seek(at % _IN_MEMORY)
            done = 0
            while done < len(view) and (count := source.readinto(view[done:])):  # type: ignore[attr-defined]
                done += count
        if done < len(view):
            raise OSError("the file that holds the texts of episodes was cut off")


def _nameless_file() -> IO[bytes]:
    with suppress(OSError):
        user_cache().mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=user_cache(), buffering=0)  # /tmp may be memory
    return tempfile.TemporaryFile(buffering=0)


@dataclass(slots=True)
class _Block:
    """Texts that follow each other, in a file of episodes and on the scratch."""

    first: int  # position of the first of them
    at: int
    ends: array[int]  # from `at` on


@dataclass(slots=True)
class Shelf:
    """The texts of the episodes of one file, by position."""

    scratch: Scratch
    _blocks: list[_Block] = field(default_factory=list)
    _count: int = 0

    def add(self, at: int, lengths: Sequence[int]) -> None:
        """Add texts that were appended to the scratch."""
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.at + last.ends[-1] == at and last.ends[-1] < MERGED:
            last.ends.extend(accumulate(lengths[1:], initial=last.ends[-1] + lengths[0]))
        else:
            self._blocks.append(_Block(self._count, at, array("Q", accumulate(lengths))))
        self._count += len(lengths)

    def __getitem__(self, position: int) -> bytearray:
        block = self._blocks[bisect_right(self._blocks, position, key=lambda one: one.first) - 1]
        number = position - block.first
        begin = block.ends[number - 1] if number else 0
        return self.scratch.read(block.at + begin, block.ends[number] - begin)

    def containing(self, needle: bytes, wanted: NDArray[Any], buffer: bytearray) -> Iterator[int]:
        """Yield the positions of the texts that contain the needle. Reads only blocks of which one is wanted."""
        for block in self._blocks:
            if not wanted[block.first : block.first + len(block.ends)].any():
                continue
            size = block.ends[-1]
            if len(buffer) < size:
                buffer.extend(bytes(size - len(buffer)))
            with memoryview(buffer) as view, view[:size] as part:
                self.scratch.read_into(part, block.at)
            found = buffer.find(needle, 0, size)
            while found >= 0:
                number = bisect_right(block.ends, found)
                yield block.first + number
                found = buffer.find(needle, block.ends[number], size)
