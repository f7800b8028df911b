"""What is made once and kept: where it lies, and how a folder gets there whole or not at all.

Knows nothing of what is in the folders, nor what they are keyed by; those who make them do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from agent_r1.tasks.download import user_cache


def cache_root() -> Path:
    return Path(os.environ.get("AGENT_R1_CACHE") or user_cache()).expanduser()


def put(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill `folder` completely or not at all. Of two runs that make the same thing, the first one's stays."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True, exist_ok=True)
    try:
        write(part)
        try:
            part.replace(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
