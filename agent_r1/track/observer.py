"""Sends a run to its trackers while it trains, each from a thread of its own.

A tracker that raises, hangs or is slow never holds up training: its first exception is reported and disables it, and
messages it cannot take in time are dropped.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from agent_r1.data.files import dump_json, read_json
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError
from agent_r1.guard import describe
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.observer import Observer
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.runs.trajectories import transcript
from agent_r1.text import visible
from agent_r1.track.base import Kind, Start, Table, Tracker, missing
from agent_r1.types import Group, TaskRow, Trajectory
from agent_r1.vision.contents import text_of

KINDS = {name: f"agent_r1.track.{name}_tracker" for name in ("wandb", "tensorboard", "mlflow", "trackio", "swanlab")}
IDS = "trackers.json"  # in the run directory: the id of the run in each tracker
MAX_WAITING = 1000  # messages; a tracker that hangs gets no more
FINISH_SECONDS = 60.0  # time for the last messages at the end of a run
TABLE_ROWS = 200
TABLE_CHARS = 500  # characters of a cell
TRANSCRIPTS = 3
COLUMNS = ("row", "prompt", "answer", "reward", "success", "steps", "stop")

logger = logging.getLogger(__name__)


class Tracking(Observer):
    """`names` of trackers; `settings`: the resolved config. Raises ConfigError if one is not installed or set up."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any]) -> None:
        if len(set(names)) < len(names):
            raise ConfigError(f"track names a tracker twice: {', '.join(names)}")
        kinds = {name: cast(Kind, import_module(KINDS[name])) for name in names}
        for name, kind in kinds.items():
            if find_spec(kind.PACKAGE) is None:
                raise missing(name)
            kind.check()
        self._kinds, self._settings = kinds, settings
        self._workers: list[_Worker] = []
        self._last_step = 0

    def start(self, run: RunDir, *, step: int) -> None:
        ids = _Ids(run.path / IDS)
        for name, kind in self._kinds.items():
            about = Start(
                name=run.path.name, folder=run.path, settings=self._settings, known=ids.known.get(name), step=step
            )
            self._workers.append(_Worker(name, kind, about, ids))
        self._last_step = step

    def step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        numbers = _finite("train", metrics)
        self._send(lambda tracker: tracker.metrics(step, numbers))
        self._last_step = step

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        numbers, reward = _finite("eval", evaluation.metrics), self._settings["task"]["success_reward"]
        table, texts = evaluation_table(evaluation, reward), chosen_transcripts(evaluation, reward)
        self._send(lambda tracker: tracker.metrics(step, numbers))
        self._send(lambda tracker: tracker.table(step, table))
        self._send(lambda tracker: tracker.transcripts(step, texts))

    def finish(self, run: RunDir) -> None:
        picture, step = run.path / "curve.png", self._last_step
        if picture.is_file():
            self._send(lambda tracker: tracker.picture(step, picture))
        for worker in self._workers:
            worker.finish()
        deadline = time.monotonic() + FINISH_SECONDS  # shared by all: several that hang take no longer than one
        for worker in self._workers:
            worker.wait(deadline)
        self._warn()
        self._workers = []

    def _send(self, message: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.send(message)
        self._warn()

    def _warn(self) -> None:
        for worker in self._workers:
            if (problem := worker.problem()) is not None:
                text = f"{worker.name}: {problem}. Training goes on without it; the run directory has everything"
                logger.warning(text)
                try:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
                except RuntimeWarning:  # warnings are errors here, but a tracker never ends a run
                    continue


class _Worker:
    """The thread of one tracker, and the messages that it has not handled yet."""

    def __init__(self, name: str, kind: Kind, about: Start, ids: _Ids) -> None:
        self.name = name
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_WAITING)
        self._problem: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._work, args=(kind, about, ids), name=f"track {name}", daemon=True)
        self._thread.start()

    def send(self, message: Callable[[Tracker], None]) -> None:
        self._put(message)

    def finish(self) -> None:
        self._put(None)

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._problem = self._problem or f"it did not finish in {FINISH_SECONDS:g} s"

    def problem(self) -> str | None:
        """Return the first error of the tracker, once."""
        if self._problem is None or self._told:
            return None
        self._told = True
        return self._problem

    def _put(self, message: Callable[[Tracker], None] | None) -> None:
        try:
            if self._thread.is_alive():
                self._waiting.put_nowait(message)
        except queue.Full:
            self._problem = self._problem or f"it has not taken {MAX_WAITING} messages"

    def _work(self, kind: Kind, about: Start, ids: _Ids) -> None:
        try:
            tracker = kind.start(about)
            ids.keep(self.name, tracker.id)
            while (message := self._waiting.get()) is not None:
                message(tracker)
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 (reported by `problem`)
            self._problem = f"it failed with {describe(error)}"


class _Ids:
    """The ids of a run in its trackers, kept in the run directory."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.known: dict[str, str] = {}
        try:
            self.known = {str(name): str(found) for name, found in read_json(path.read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError):  # no file, or damaged: the tracker begins another run
            self.known = {}

    def keep(self, name: str, found: str) -> None:
        with self._lock, write_atomically(self._path) as part:
            self.known[name] = found
            part.write_text(dump_json(self.known) + "\n", encoding="utf-8")


def _finite(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items() if math.isfinite(value)}


def evaluation_table(evaluation: Evaluation, success_reward: float) -> Table:
    """The first attempt at each of the first rows."""
    shown = [(group.row, group.trajectories[0]) for group in evaluation.groups[:TABLE_ROWS]]
    return Table(columns=COLUMNS, rows=[_table_row(*pair, success_reward) for pair in shown])


def _table_row(row: TaskRow, trajectory: Trajectory, success_reward: float) -> list[str | float]:
    asked = "\n".join(text_of(message["content"]) for message in row.prompt if message["role"] == "user")
    won = float(is_success(trajectory, success_reward))
    texts = [visible(text)[:TABLE_CHARS] for text in (row.row_id, asked, trajectory.final_text)]
    return [*texts, trajectory.total_reward, won, float(len(trajectory.steps)), trajectory.stop.value]


def chosen_transcripts(evaluation: Evaluation, success_reward: float) -> list[str]:
    """A few episodes as text: a failure, a success, and the one with the most steps."""
    played = [(group.row, trajectory) for group in evaluation.groups for trajectory in group.trajectories]
    by_success = {is_success(trajectory, success_reward): (row, trajectory) for row, trajectory in reversed(played)}
    longest = max(played, key=lambda pair: len(pair[1].steps))
    unique = {pair[1].trajectory_id: pair for pair in [*by_success.values(), longest]}
    return [_text(*pair) for pair in list(unique.values())[:TRANSCRIPTS]]


def _text(row: TaskRow, trajectory: Trajectory) -> str:
    asked = [("user", text_of(message["content"])) for message in row.prompt if message["role"] == "user"]
    lines = [f"{speaker}: {text}" for speaker, text in [*asked, *transcript(trajectory)]]
    return visible("\n".join([f"row {row.row_id}, reward {trajectory.total_reward:g}", *lines]))
