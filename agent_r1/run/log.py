"""The log of a run: what would otherwise be printed over the live display."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_r1.errors import RolloutError
from agent_r1.run.remarks import has_text


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log there, and let an end by too many failures say so."""
    log_to(path)
    try:
        yield
    except RolloutError as error:
        if not has_text(path):  # what only ran out of time has no traceback
            raise
        raise RolloutError(f"{error}; details in {path}") from error


def log_to(path: Path) -> None:
    """Tracebacks of failed episodes and what env processes print go to the run's log, not over the live display."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("agent_r1")
    for old in [h for h in package.handlers if isinstance(h, logging.FileHandler)]:
        package.removeHandler(old)
        old.close()
    package.addHandler(handler)
    package.propagate = False
    logging.getLogger("agent_r1.agent.workers").setLevel(logging.INFO)
