"""Results of runs in Python: evaluations, transcripts and pictures. All of them show themselves in a notebook."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_r1.cli.display import eval_summary, transcript_panel
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.run_dir import Evaluation
from agent_r1.runs.trajectories import transcript
from agent_r1.types import Group, TaskRow, Trajectory
from agent_r1.vision.contents import text_of

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Transcript:
    """One episode as a conversation."""

    row: TaskRow = field(repr=False)
    trajectory: Trajectory = field(repr=False)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(speaker, text): user, agent, tool, env or memo."""
        asked = self.trajectory.opening or self.row.prompt
        said = [("user", text_of(message["content"])) for message in asked if message["role"] == "user"]
        return [*said, *transcript(self.trajectory)]

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)
        with console.capture() as captured:
            console.print(self._panel())
        return captured.get()

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Mapping[str, str]:
        console = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False)
        console.print(self._panel())
        style = "font-family:monospace;line-height:1.3;margin:0"
        shown = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
        return {"text/plain": str(self), "text/html": shown}

    def _panel(self) -> Any:
        return transcript_panel(Group(row=self.row, trajectories=[self.trajectory]), self.trajectory)


@dataclass(frozen=True, slots=True, repr=False)
class EvalResult:
    """An evaluation with its episodes. `step` is the step of the policy, if the evaluation was made while training."""

    metrics: Metrics
    groups: list[Group]
    panel: str  # hash of the rows; numbers on different rows cannot be compared
    step: int | None = None

    @classmethod
    def of(cls, evaluation: Evaluation, step: int | None = None) -> EvalResult:
        return cls(metrics=evaluation.metrics, groups=evaluation.groups, panel=evaluation.panel, step=step)

    @property
    def success(self) -> float:
        return self.metrics["success"]

    @property
    def stderr(self) -> float:
        """The standard error of the success, over rows."""
        return self.metrics["success_stderr"]

    @property
    def episodes(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def transcript(self, index: int = 0) -> Transcript:
        pairs = [(group.row, trajectory) for group in self.groups for trajectory in group.trajectories]
        return Transcript(*pairs[index])

    def __repr__(self) -> str:
        return f"success {eval_summary(self.metrics)}"


@dataclass(frozen=True, slots=True)
class Picture:
    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()
