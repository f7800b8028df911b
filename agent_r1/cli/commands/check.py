"""`agent-r1 check`: play a task without a model and say whether it can be learned as configured."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from agent_r1.build.plan import Plan
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.doctor.check_task import check_task
from agent_r1.runs.run_log import logging_to


def run_check(config: RunConfig, plan: Plan, console: Console, *, rows: int) -> bool:
    with logging_to(Path(os.devnull)):  # failures are summed up below
        work = plan.task.run(check_task(config, plan, console, rows))
        return interruptible(work, config, console, lambda: "nothing was written")
