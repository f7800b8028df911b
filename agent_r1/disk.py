"""Write files and folders completely or not at all."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

A_DAY = 24 * 3600.0


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which replaces `path` once the block has succeeded.

    The content reaches the disk before it gets its name, so a kill or a power cut never leaves half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield part
        for written in [*part.rglob("*"), part]:
            _flush(written)
        part.replace(path)
    finally:
        _remove(part)


def remove_leftovers(folder: Path, *, older_than: float = A_DAY) -> None:
    """Delete files that killed processes left half-written. Processes may be writing now, hence the age in seconds."""
    for part in folder.glob(".*.part"):
        with suppress(OSError):  # another process deleted it, or another user owns it
            if time.time() - part.stat().st_mtime >= older_than:
                _remove(part)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
