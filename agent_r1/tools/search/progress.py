"""How far a long piece of work is, as something that can be printed. Nothing here knows what the work is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One report: `done` of `total` passages after `seconds`. The total is None while it is not known yet."""

    stage: str
    done: int
    total: int | None
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before there is one."""
        if self.total is None or self.done == 0:
            return None
        return self.seconds * (self.total - self.done) / self.done

    def __str__(self) -> str:
        if self.total is None:
            return f"{self.stage}: {self.done:,} passages"
        share = self.done / self.total if self.total else 1.0
        left = self.seconds_left
        tail = "" if left is None or self.done == self.total else f", about {left:.0f} s left"
        return f"{self.stage}: {self.done:,} of {self.total:,} passages ({share:.0%}){tail}"


Report = Callable[[Progress], None]


class Reporter:
    """Reports one stage at most every `interval` seconds, and always its end."""

    def __init__(self, stage: str, total: int | None, report: Report | None, interval: float = 1.0) -> None:
        self._stage, self._total, self._report, self._interval = stage, total, report, interval
        self._began = self._last = time.perf_counter()

    def at(self, done: int) -> None:
        now = time.perf_counter()
        if self._report is not None and now - self._last >= self._interval:
            self._last = now
            self._say(done, now)

    def end(self, done: int) -> None:
        if self._report is not None:
            self._total = done
            self._say(done, time.perf_counter())

    def _say(self, done: int, now: float) -> None:
        assert self._report is not None
        self._report(Progress(stage=self._stage, done=done, total=self._total, seconds=now - self._began))
