"""Relative paths mean the directory the program was started in, wherever a tool moves the working directory later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_start: Path | None = None


@contextmanager
def started_here() -> Iterator[None]:
    """Anchor relative paths to the present working directory. Inside another one this changes nothing."""
    global _start
    before = _start
    _start = before or Path.cwd()
    try:
        yield
    finally:
        _start = before


def anchored(path: str | Path) -> Path:
    """The absolute path, `~` expanded. Outside `started_here`, relative to the working directory."""
    return (_start or Path.cwd()) / Path(path).expanduser()


def shown(path: Path) -> str:
    """As short as a user of the same shell can type it."""
    start = _start or Path.cwd()
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)
