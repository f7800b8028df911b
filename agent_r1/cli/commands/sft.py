"""`agent-r1 sft`: a supervised warm start as a separate run, from which training can start with `model.path=`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.build.models.load import load_model
from agent_r1.build.start import base_model, warm_start
from agent_r1.build.task import Task
from agent_r1.cli.commands.eval import evaluate_model
from agent_r1.cli.display import Display, eval_summary, program, warm_start_progress
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.reader import list_checkpoints
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.train.checkpoint import save_checkpoint


def run_sft(config: RunConfig, task: Task, run: RunDir, console: Console, *, given: Sequence[str] = ()) -> Path:
    """`given` are the overrides that were typed; the suggested next command repeats them."""

    def kept() -> str:
        if list_checkpoints(run.checkpoints):
            return f"the warm start is in {run}"
        return "nothing was kept: a warm start is saved when it is complete"

    with run.locked(), logging_to(run.log_file):
        return interruptible(task.run(_sft(config, task, run, console, given)), config, console, kept)


async def _sft(config: RunConfig, task: Task, run: RunDir, console: Console, given: Sequence[str]) -> Path:
    base, rows = base_model(config), task.test_rows()

    async def evaluate_on_disk(step: int, model: str | Path) -> None:
        run.write_evaluation(step, await evaluate_model(config, task, rows, model, console))

    await evaluate_on_disk(0, base)
    path, updates = await _imitate(config, task, base, run, console)
    await evaluate_on_disk(updates, path)
    before, after = run.read_metrics("eval")
    lines = [
        f"train from it  {program()} train {typed_words(config, given)} model.path={run} "
        "sft.demos=null sft.trajectories=null",
        f"talk to it     {program()} chat {run}",
        f"how sure?      {program()} compare {run} --step first,last",
    ]
    console.print(f"\n[bold]held-out success {eval_summary(before)} -> {eval_summary(after)}[/]", highlight=False)
    console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    return path


async def _imitate(config: RunConfig, task: Task, base: str | Path, run: RunDir, console: Console) -> tuple[Path, int]:
    """Return the checkpoint of the warm start and the number of updates it took."""
    with Display(console, "warm start", total=1) as display:
        model = load_model(config, base)
        show = warm_start_progress(display, may_end_early=config.sft.target_loss is not None)

        def on_update(update: int, total: int, metrics: Metrics) -> None:
            run.append_metrics("sft", update, metrics)
            show(update, total, metrics)

        learner = await warm_start(config, task, model, on_update, display.note)
    updates = len(run.read_metrics("sft"))
    state = {"step": updates, "learner": learner.state_dict()}
    path = save_checkpoint(
        run.checkpoints, updates, model=learner.policy, input_files=model.input_files, state=state, keep=1
    )
    return path, updates


def typed_words(config: RunConfig, given: Sequence[str]) -> str:
    """Return the recipe and the typed overrides, without those that choose the starting model."""
    begins = ("sft.", "context.demo_summary", "model.path", "model.make")
    return shlex.join([config.recipe, *(word for word in given if not word.startswith(begins))])
