"""The runs that are shown: found under the given places, named, opened once. They may appear and vanish meanwhile."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.places import anchored
from agent_r1.runs.reader import RunReader, is_run
from agent_r1.serve.view.index.columns import thin
from agent_r1.serve.view.index.episodes import EpisodeIndex
from agent_r1.serve.view.index.tail import MetricsTail

RESCAN_SECONDS = 2.0
QUIET_SECONDS = 120.0  # without news for so long, or for ten steps, a run is taken to have stopped
SPARK_POINTS = 48
FOLDERS_DEEP = 3  # how far below a place runs are looked for


class NotFound(AgentR1Error):
    """What was asked for is not there, or not any more."""


class OpenRun:
    """A run and what was read of it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.reader = RunReader(path)
        self.tail = MetricsTail(path / "metrics.jsonl")
        self.episodes = EpisodeIndex(self.reader)
        self._settings: tuple[int, dict[str, Any]] = (0, {})  # and when the file was changed

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved config, read again when it changes: a resumed run may have more steps."""
        try:
            changed = (self.reader.path / "config.json").stat().st_mtime_ns
            if self._settings[0] != changed:
                self._settings = (changed, self.reader.settings)
        except (OSError, AgentR1Error) as error:
            raise NotFound(f"the settings of {self.name} cannot be read: {error}") from error
        return self._settings[1]

    def setting(self, section: str, name: str) -> Any:
        """Return a setting, or None: older runs lack some."""
        found = self.settings.get(section)
        return found.get(name) if isinstance(found, dict) else None

    @property
    def success_reward(self) -> float:
        value = self.setting("task", "success_reward")
        return float(value) if isinstance(value, int | float) else 1.0

    def last_news(self) -> float:
        """Return when the run last wrote something."""
        times = [0.0]
        for name in ("metrics.jsonl", "trajectories", "run.log", "config.json", "checkpoints"):
            try:
                times.append((self.reader.path / name).stat().st_mtime)
            except OSError:
                continue
        return max(times)

    def describe(self) -> dict[str, Any]:
        """Return a line of the list of runs."""
        records = self.tail.update()
        steps = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "sft", "collect")}
        main = next((kind for kind in ("train", "sft", "collect") if steps[kind]), "train")
        done = steps[main][-1]["step"] if steps[main] else 0
        total = self.setting("trainer", "steps") if main == "train" else None
        spark_kind = "eval" if len(steps["eval"]) > 1 else main
        measure = "success" if any("success" in r for r in steps[spark_kind]) else "loss"
        spark = [(r["step"], r[measure]) for r in steps[spark_kind] if isinstance(r.get(measure), int | float)]
        return {
            "id": self.name,
            "path": str(self.reader),
            "recipe": str(self.settings.get("recipe", "")),
            "algorithm": self.setting("algorithm", "name"),
            "model": self.setting("model", "path"),
            "seed": self.settings.get("seed"),
            "kind": main,
            "steps": done,
            "total": total,
            "status": self._status(steps[main], done, total),
            "began": self._began(records),
            "updated": self.last_news(),
            "measure": measure,
            "spark": thin(spark, SPARK_POINTS),
            "spark_kind": spark_kind,
            "value": spark[-1][1] if spark else None,
            "generation": self.tail.generation,
        }

    def _began(self, records: Sequence[Mapping[str, Any]]) -> float | None:
        return records[0].get("time") if records else None

    def _status(self, steps: Sequence[Mapping[str, Any]], done: int, total: Any) -> str:
        """Return finished, running, or stopped (no news for long). Nobody writes down that a run was killed."""
        if isinstance(total, int) and done >= total:
            return "finished"
        times = [r["time"] for r in steps[-12:] if isinstance(r.get("time"), int | float)]
        pace = median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0
        quiet = time.time() - self.last_news()
        if quiet < max(QUIET_SECONDS, 10 * pace):
            return "running"
        return "stopped" if total is not None or not steps else "finished"


class Library:
    """All runs under some places: run directories, or folders of them."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = [anchored(place) for place in places]
        self._lock = threading.Lock()
        self._runs: dict[str, OpenRun] = {}
        self._names: dict[Path, str] = {}  # kept, so that links stay valid while other runs come and go
        self._scanned = -RESCAN_SECONDS

    def runs(self) -> list[OpenRun]:
        """Return the runs, newest first."""
        with self._lock:
            if time.monotonic() - self._scanned > RESCAN_SECONDS:
                self._scan()
                self._scanned = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> OpenRun:
        for run in self.runs():
            if run.name == name and (run.reader.path / "config.json").is_file():
                return run
        raise NotFound(f"there is no run {name!r} here, or not any more: its folder was moved, renamed or deleted")

    def _scan(self) -> None:
        paths = dict.fromkeys(path for place in self.places for path in find_runs(place))
        self._runs = {run.name: run for path in paths for run in [self._known(path)]}

    def _known(self, path: Path) -> OpenRun:
        name = self._names.get(path)
        if name is None:
            name = re.sub(r"[^\w.\-]", "_", path.name) or "run"
            if name in self._names.values():
                name += "~" + hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:6]
            self._names[path] = name
        return self._runs.get(name) or OpenRun(name, path)


def find_runs(place: Path, deep: int = FOLDERS_DEEP) -> list[Path]:
    """Return the place if it is a run, else the runs below it, newest first."""
    if is_run(place):
        return [place]
    try:
        folders = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []
    found = [run for folder in folders if deep > 0 for run in find_runs(folder, deep - 1)]
    return sorted(found, key=_config_time, reverse=True)


def _config_time(run: Path) -> float:
    try:
        return (run / "config.json").stat().st_mtime
    except OSError:
        return 0.0


def check_places(places: Sequence[Path]) -> None:
    """Refuse places that do not exist; a folder without runs is fine, as they may come."""
    for place in places:
        if not anchored(place).is_dir():
            raise ConfigError(f"{place} is not a folder: name a run directory, or a folder of runs")
