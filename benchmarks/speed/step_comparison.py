"""One whole GRPO step, taking turns with another trainer in one process.

The other trainer owns its loop: it is asked for a number of steps and calls us after each of them. Each one is a file
`NAME_step.py` in this folder with a function `make_rival`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from agent_r1.bench.models import BenchModel
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.step_speed import OurStep, StepBench
from agent_r1.bench.workload import Workload
from agent_r1.errors import ConfigError, did_you_mean


class Rival(Protocol):
    """Another trainer, playing the same workload with a model of the same shape."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Added to the settings of the row."""
        ...

    def run(self, steps: int, between: Callable[[], None]) -> list[float]:
        """Seconds of each GRPO step; `between` is called after every step and is not timed."""
        ...


MakeRival = Callable[[Workload, BenchModel, torch.device], Rival]


def find_rival(name: str) -> MakeRival:
    known = sorted(path.name.removesuffix("_step.py") for path in Path(__file__).parent.glob("*_step.py"))
    if name not in known:
        raise ConfigError(f"--against {name}: there is no such trainer.{did_you_mean(name, known)}")
    try:
        found: MakeRival = importlib.import_module(f"benchmarks.speed.{name}_step").make_rival
    except ModuleNotFoundError as error:
        raise ConfigError(f"--against {name}: {error}; benchmarks/speed/{name}_step.py says what to install") from error
    return found


@dataclass(kw_only=True)
class StepComparison(StepBench):
    make_rival: MakeRival

    def measure(self, ours: OurStep) -> Row:
        rival = self.make_rival(self.sizes.workload, self.model, self.device)
        figures: list[Figures] = []
        seconds = rival.run(1 + self.repeats, between=lambda: figures.append(ours()))
        # The first step of each warms up.
        repeats = [
            mine | {f"{rival.name}_seconds": theirs, "speed_ratio": theirs / mine["seconds"]}
            for mine, theirs in zip(figures[1:], seconds[1:], strict=True)
        ]
        return self.row(f"agent-r1 and {rival.name}", dict(rival.settings), repeats)
