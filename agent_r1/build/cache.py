"""What is made once and kept: where it lies, and how a folder gets there whole or not at all.

Knows nothing of what is in the folders, nor what they are keyed by; those who make them do.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from agent_r1.data.downloads import user_cache
from agent_r1.places import anchored

_PART = re.compile(r"\..+\.[0-9a-f]+\.part")


def cache_root() -> Path:
    return anchored(os.environ.get("AGENT_R1_CACHE") or user_cache())


def put(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill `folder` completely or not at all. If two runs write the same folder, the first one is kept."""
    with _part_of(folder) as part:
        write(part)
        try:
            part.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise


def remove_leftovers(parent: Path) -> None:
    """Delete folders that killed processes left half-written. Folders of live processes are locked and kept."""
    for part in parent.glob(".*.part"):
        if _PART.fullmatch(part.name) and part.is_dir():
            with suppress(OSError), _locked(part):  # an error means locked, gone, or not ours
                shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _part_of(folder: Path) -> Iterator[Path]:
    """Create a folder next to `folder`, lock it while it is written, and delete it unless it was moved away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    with ExitStack() as lock:
        while True:
            part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.part")
            part.mkdir()
            try:
                lock.enter_context(_locked(part))
            except (BlockingIOError, FileNotFoundError):
                continue  # another process deleted it as a leftover before it was locked
            except OSError:  # the file system has no locks, so leftovers are not deleted either
                break
            if part.is_dir():
                break
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock, which any end of the process releases. Raises BlockingIOError if another process holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)
