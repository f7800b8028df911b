"""Tickets: which groups an asynchronous run has started, and how each of them ended.

Ticket k stands for row k % rows_per_step of step k // rows_per_step + 1 of a synchronous run, so rows and sampling
noise are the same in both. Every started ticket ends exactly once: trained, or dropped for a reason. Tickets that are
open when a checkpoint is written are played again by the process that continues from it.

Pure bookkeeping: nothing here knows engines, models or an event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, get_args

from agent_r1.runs.metrics import Metrics
from agent_r1.types import Group, Versions

# failed: no attempt can be trained on; uniform: all attempts earned the same, and the algorithm drops such groups;
# stale: some token was sampled by too old a version
Fate = Literal["trained", "failed", "uniform", "stale"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(kw_only=True)
class Ledger:
    """The tickets of a run. Starts are counted from 0 in each process, tickets over the whole run."""

    next: int = 0  # the first ticket that was never started
    open: set[int] = field(default_factory=set)  # started: being played, or waiting to be trained on
    ended: Counter[Fate] = field(default_factory=Counter)
    starts: int = 0  # starts of this process
    _again: tuple[int, ...] = ()  # tickets that were open when this process began; they come first
    _first: int = 0  # the first new ticket of this process
    _ended_before: int = 0
    _saved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit()

    def ticket(self, start: int) -> int:
        again = len(self._again)
        return self._again[start] if start < again else self._first + start - again

    def limit(self, most_open: int) -> int:
        """Return how many starts are possible with at most `most_open` open tickets."""
        return self.ended.total() - self._ended_before + most_open

    def start(self, count: int) -> None:
        """Open the tickets of the first `count` starts."""
        for start in range(self.starts, count):
            ticket = self.ticket(start)
            self.open.add(ticket)
            self.next = max(self.next, ticket + 1)
        self.starts = max(self.starts, count)

    def end(self, ticket: int, fate: Fate) -> None:
        if ticket not in self.open:
            raise ValueError(f"ticket {ticket} is not open and cannot end as {fate!r}")
        self.open.remove(ticket)
        self.ended[fate] += 1

    @property
    def metrics(self) -> Metrics:
        """Counts since the run began: those started are still open, trained or dropped."""
        started = {"groups/started": float(len(self.open) + self.ended.total())}
        return started | {f"groups/{fate}": float(self.ended[fate]) for fate in FATES}

    def commit(self) -> None:
        """A step is finished: `state_dict` now returns this state, whatever starts or is dropped afterwards."""
        self._saved = {"next": self.next, "open": sorted(self.open), "ended": dict(self.ended)}

    def state_dict(self) -> dict[str, Any]:
        return self._saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = self._first = state["next"]
        self._again, self.open, self.starts = tuple(state["open"]), set(state["open"]), 0
        self.ended = Counter(state["ended"])
        self._ended_before = self.ended.total()
        self.commit()


def oldest_version(group: Group) -> int | None:
    """The oldest version that sampled a token of the group; None if nothing was sampled."""
    return min((version for versions in _sampled(group) for version, _ in versions), default=None)


def staleness_metrics(groups: Sequence[Group], version: int) -> Metrics:
    """How many versions older than `version` the tokens are, and how many responses several versions wrote."""
    responses = [versions for group in groups for versions in _sampled(group)]
    ages: Counter[int] = Counter()
    for versions in responses:
        for sampled_by, count in versions:
            ages[version - sampled_by] += count
    total = ages.total()
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / max(1, total),
        "staleness/max": float(max(ages, default=0)),
        "staleness/mixed": fmean(len(dict(versions)) > 1 for versions in responses) if responses else 0.0,
        **{f"staleness/tokens_{age}": float(ages[age]) for age in range(max(ages, default=-1) + 1)},
    }


def _sampled(group: Group) -> list[Versions]:
    """The versions of each sampled response. A greedy baseline may come from any version."""
    return [step.versions for attempt in group.trajectories for step in attempt.steps if step.versions]
