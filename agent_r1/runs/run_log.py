"""The log of a run: tracebacks of failed episodes and the output of environment processes, away from the display."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_r1.errors import RolloutError
from agent_r1.places import shown
from agent_r1.text import cut_middle, visible

MAX_CHARS = 64 * 2**20  # per command; beyond it, only the first lines of failures are logged, and no process output
MAX_RECORD_CHARS = 10_000  # of one record; its beginning and its end are kept
_WORKERS = "agent_r1.envs.processes"


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log to `path`. If too many episodes fail, the error names this log."""
    package, workers = logging.getLogger("agent_r1"), logging.getLogger(_WORKERS)
    before = package.propagate, workers.level
    handler: logging.Handler
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        size = path.stat().st_size
    except OSError:  # a run of another user: it may be evaluated, but not written to
        handler, size = logging.StreamHandler(), 0
    bounded = _Bounded("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(bounded)
    handler.addFilter(lambda record: record.levelno > logging.INFO or bounded.left > 0)
    package.addHandler(handler)
    package.propagate = False
    workers.setLevel(logging.INFO)
    try:
        yield
    except RolloutError as error:
        if not path.is_file() or path.stat().st_size == size:  # timeouts leave no traceback
            raise
        raise RolloutError(f"{error}; details in {shown(path)}") from error
    finally:
        package.removeHandler(handler)
        handler.close()
        package.propagate, level = before
        workers.setLevel(level)


class _Bounded(logging.Formatter):
    """Cuts the middle out of long records: failures repeat, and their messages may have any size."""

    def __init__(self, format: str) -> None:
        super().__init__(format)
        self.left = MAX_CHARS

    def format(self, record: logging.LogRecord) -> str:
        text = cut_middle(visible(super().format(record)), MAX_RECORD_CHARS)  # people read logs in terminals
        if self.left <= 0:
            return text.partition("\n")[0]
        self.left -= len(text)
        return text if self.left > 0 else f"{text}\nThe log is full: it has {MAX_CHARS:,} characters."
