"""Resolve relative paths against the directory in which the program was started, even after a tool calls `os.chdir`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from types import TracebackType

_start: Path | None = None
_uses, _lock = 0, Lock()


class StartedHere(AbstractContextManager[None]):
    """Resolve relative paths against the current working directory. If uses overlap (nested, or in several threads),
    the directory of the first one applies until the last one ends.

    A class, because a generator ends its use as soon as it is garbage-collected.
    """

    def __enter__(self) -> None:
        global _start, _uses
        with _lock:
            _start, _uses = _start or Path.cwd(), _uses + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _start, _uses
        with _lock:
            _uses -= 1
            _start = _start if _uses else None


def anchored(path: str | Path) -> Path:
    """Return the absolute path with `~` expanded. Outside `StartedHere`, the working directory is the base."""
    return (_start or Path.cwd()) / Path(path).expanduser()


def shown(path: Path) -> str:
    """Return the shortest form of a path that a user can type in the same shell."""
    start = _start or Path.cwd()
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)
