"""When training evaluates, saves and stops, for both loops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from agent_r1.ranks.crew import OneProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Optimizer steps start+1 .. steps, or until the time is up. The last step is always evaluated and saved."""

    start: int = 0
    steps: int
    eval_every: int
    save_every: int
    max_minutes: float | None = None

    def start_clock(self, ranks: OneProcess) -> Callable[[], bool]:
        """Start the clock; return a function that tells all ranks whether the time is up on rank 0."""
        end = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        return lambda: ranks.broadcast(time.monotonic() >= end)
