"""Folders that are made once and kept: where they are, and how to fill one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agent_r1.data.downloads import user_cache
from agent_r1.disk import write_atomically
from agent_r1.places import anchored


def cache_root() -> Path:
    return anchored(os.environ.get("AGENT_R1_CACHE") or user_cache())


def put(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill `folder` completely or not at all. If two runs write the same folder, the first one is kept."""
    try:
        with write_atomically(folder) as part:
            part.mkdir()
            write(part)
    except OSError:
        if not folder.is_dir() or not any(folder.iterdir()):  # otherwise another run was first
            raise
