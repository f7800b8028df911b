"""Progress reports of long loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Report = Callable[[str], None]

REPORT_SECONDS = 1.0


def track(items: Iterable[Item], stage: str, report: Report | None, total: int | None = None) -> Iterator[Item]:
    """Yield the items, reporting at most once a second and at the end."""
    began = last = time.perf_counter()
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        now = time.perf_counter()
        if report is not None and now - last >= REPORT_SECONDS:
            last = now
            report(describe_progress(stage, done, total, seconds=now - began))
    if report is not None:
        report(f"{stage}: {done:,} passages")


def describe_progress(stage: str, done: int, total: int | None, *, seconds: float) -> str:
    if not total:
        return f"{stage}: {done:,} passages"
    left = seconds * (total - done) / done
    return f"{stage}: {done:,} of {total:,} passages ({done / total:.0%}), about {left:.0f} s left"
