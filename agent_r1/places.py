"""Resolve relative paths against the directory in which the program was started, even after a tool calls `os.chdir`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_start: Path | None = None


@contextmanager
def started_here() -> Iterator[None]:
    """Resolve relative paths against the current working directory. Nested uses keep the outermost directory."""
    global _start
    before = _start
    _start = before or Path.cwd()
    try:
        yield
    finally:
        _start = before


def anchored(path: str | Path) -> Path:
    """Return the absolute path with `~` expanded. Outside `started_here`, the working directory is the base."""
    return (_start or Path.cwd()) / Path(path).expanduser()


def shown(path: Path) -> str:
    """Return the shortest form of a path that a user can type in the same shell."""
    start = _start or Path.cwd()
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)
