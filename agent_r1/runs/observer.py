"""Observers of a run while it trains: callbacks of users, and trackers.

An observer is called after the run directory was written. Whatever it raises ends the run, after the step it
was told of is saved; trackers therefore raise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.types import Group

if TYPE_CHECKING:
    from agent_r1.runs.metrics import Metrics


class Observer:
    """Ignores everything; override what you need. Called by rank 0, in the thread that trains."""

    def start(self, run: RunDir, *, step: int) -> None:
        """Training begins, after `step` earlier steps."""

    def step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        """A step is finished, with these scored episodes."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The policy after `step` steps was evaluated."""

    def finish(self, run: RunDir) -> None:
        """The run ended, for whatever reason. Also called if `start` was never called."""
