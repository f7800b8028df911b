"""Calls the functions that a user gave to `train`, in the thread that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.api.results import EvalResult
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.observer import Observer
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.types import Group, Trajectory

OnStep = Callable[[int, Metrics], object]
OnEpisode = Callable[[Trajectory], object]
OnEval = Callable[[EvalResult], object]


@dataclass(kw_only=True)
class Callbacks(Observer):
    trackers: Observer  # told first
    on_step: OnStep | None = None
    on_episode: OnEpisode | None = None  # for each scored training episode, before `on_step`
    on_eval: OnEval | None = None
    error: BaseException | None = None  # an exception that one of them raised; it ends the run

    def start(self, run: RunDir, *, step: int) -> None:
        self.trackers.start(run, step=step)

    def finish(self, run: RunDir) -> None:
        self.trackers.finish(run)

    def step(self, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
        self.trackers.step(step, groups, metrics)
        for trajectory in (each for group in groups for each in group.trajectories):
            self._call(self.on_episode, trajectory)
        self._call(self.on_step, step, dict(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.trackers.evaluation(step, evaluation)
        self._call(self.on_eval, EvalResult.of(evaluation, step))

    def _call(self, function: Callable[..., Any] | None, *args: Any) -> None:
        if function is None:
            return
        try:
            function(*args)
        except BaseException as error:
            self.error = error
            raise
