"""The protocol of trackers, and what they receive. Knows no tracker by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent_r1.errors import ConfigError

PROJECT = "agent-r1"  # project of runs, unless the tracker's own environment variables name another


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that is about to be tracked."""

    name: str  # name of the run directory
    folder: Path  # the run directory: local files of a tracker belong there
    settings: Mapping[str, Any]  # the resolved config
    known: str | None  # the tracker's own id of this run, if it was tracked before
    step: int  # the last finished step


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An evaluation, row by row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]

    def as_markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:g}"
    return text.replace("|", "\\|").replace("\n", " ")


class Tracker(Protocol):
    """One run in a tracker. Any method may raise or hang; `observer.py` copes with it."""

    id: str  # the tracker finds the run again by this id

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def table(self, step: int, table: Table) -> None: ...
    def transcripts(self, step: int, texts: Sequence[str]) -> None: ...
    def picture(self, step: int, path: Path) -> None: ...
    def finish(self) -> None: ...


class Kind(Protocol):
    """A module with a tracker."""

    PACKAGE: str  # package that must be importable

    @staticmethod
    def check() -> None: ...
    @staticmethod
    def start(start: Start) -> Tracker: ...


def missing(name: str) -> ConfigError:
    return ConfigError(f"track: {name} is not installed: pip install 'agent-r1[{name}]', or leave it out of track")
