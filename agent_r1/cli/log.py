"""The log of a run: what would otherwise be printed over the live display."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_r1.errors import RolloutError
from agent_r1.places import shown
from agent_r1.text import visible

PRINTED_CHARS = 16 * 2**20  # kept of what env processes print; it may be without end
FAILED_CHARS = 64 * 2**20  # kept of warnings and tracebacks; then only their first lines
KEPT_LINES = 40  # at each end of a traceback
KEPT_CHARS = 1000  # at each end of a line
_WORKERS = "agent_r1.envs.processes"


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Tracebacks of failed episodes and what env processes print go there; an end by too many failures says so."""
    package, workers = logging.getLogger("agent_r1"), logging.getLogger(_WORKERS)
    before = package.propagate, workers.level
    handler: logging.Handler
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        size = path.stat().st_size
    except OSError:  # somebody else's run, which may be evaluated and talked to but not written to
        handler, size = logging.StreamHandler(), 0
    handler.setFormatter(_Bounded("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_Printed())
    package.addHandler(handler)
    package.propagate = False
    workers.setLevel(logging.INFO)
    try:
        yield
    except RolloutError as error:
        if not path.is_file() or path.stat().st_size == size:  # what only ran out of time has no traceback
            raise
        raise RolloutError(f"{error}; details in {shown(path)}") from error
    finally:
        package.removeHandler(handler)
        handler.close()
        package.propagate, level = before
        workers.setLevel(level)


class _Bounded(logging.Formatter):
    """Cuts the middle out of long tracebacks and lines: failures may repeat, and messages have no size limit."""

    def __init__(self, format: str) -> None:
        super().__init__(format)
        self._left = FAILED_CHARS

    def format(self, record: logging.LogRecord) -> str:
        text = visible(super().format(record))  # people read logs in terminals
        if record.levelno <= logging.INFO:
            return text
        lines = text.split("\n")
        if self._left < 0:
            return f"{_cut(lines[0])} ({len(lines) - 1} lines omitted: the log already has {FAILED_CHARS:,} characters)"
        if len(lines) > 2 * KEPT_LINES + 1:  # the first line says what failed
            cut = len(lines) - 2 * KEPT_LINES - 1
            lines[KEPT_LINES + 1 : -KEPT_LINES] = [f"... ({cut:,} lines cut)"]
        text = "\n".join(map(_cut, lines))
        self._left -= len(text)
        return text


def _cut(line: str) -> str:
    cut = len(line) - 2 * KEPT_CHARS
    return line if cut <= 0 else f"{line[:KEPT_CHARS]}... ({cut:,} characters cut) ...{line[-KEPT_CHARS:]}"


class _Printed(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._left = PRINTED_CHARS

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_WORKERS) or record.levelno > logging.INFO:
            return True
        if self._left < 0:
            return False
        self._left -= len(record.getMessage())
        if self._left < 0:
            record.msg, record.args = "env processes print more than %d characters: no more is kept", (PRINTED_CHARS,)
        return True
