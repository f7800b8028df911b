"""`agent-r1 doctor`: what is wrong with a recipe. `agent_r1/doctor` does the work, imported when it is needed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_r1.build.plan import build_plan
from agent_r1.cli.terminal import Terminal
from agent_r1.config import load_config
from agent_r1.doctor.finding import Finding, Level, refused
from agent_r1.errors import AgentR1Error


@dataclass(slots=True, kw_only=True)
class Examination:
    """Which checks to run, how long they may take, and what they found."""

    quick: bool
    engine: bool
    rows: int
    seconds: float
    as_json: bool
    found: list[Finding] = field(default_factory=list)

    def run(self, recipe: str, overrides: Sequence[str]) -> bool:
        """Run the checks and print what they find; False if anything is red. A check that makes the next ones pointless
        is the last."""
        stage = "settings"
        try:
            config = load_config(recipe, overrides)
            stage = "task"
            plan = build_plan(config)

            from agent_r1.cli.commands.train import seeded_start
            from agent_r1.cli.signals import run_unkept
            from agent_r1.doctor.environment import check_environment
            from agent_r1.doctor.quick import prepare, run_quick
            from agent_r1.doctor.sampled import check_engine

            stage = "model"
            parts, screen = prepare(config, plan), Terminal(quiet=self.as_json)
            self.found += run_quick(parts)
            stage = "environment"

            async def play() -> None:
                nonlocal stage
                limits: dict[str, Any] = {"seconds": self.seconds, "end": self._end}
                if not self.quick:
                    self.found += await check_environment(config, plan, parts.renderer, self.rows, **limits)
                if self.engine:
                    stage = "engine"
                    start = await seeded_start(config, plan.task, screen)
                    self.found += await check_engine(config, plan, start, self.rows, **limits)

            if self.engine or not self.quick:
                run_unkept(plan.task.run(play()), config, screen)
        except AgentR1Error as error:
            self.found.append(refused(stage, error))
        self._show()
        return all(each.level is not Level.RED for each in self.found)

    def _show(self) -> None:
        from agent_r1.doctor.tables import show_findings

        console = Terminal()
        if self.as_json:
            console.print(json.dumps([asdict(each) for each in self.found], indent=1), soft_wrap=True, markup=False)
        else:
            show_findings(self.found, console)

    def _end(self, place: str) -> None:
        """Report from another thread, while user code blocks this one for good."""
        from agent_r1.doctor.environment import blocked

        self.found.append(blocked(place, self.seconds))
        self._show()
        sys.stdout.flush()
        os._exit(1)
