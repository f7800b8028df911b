"""`agent-r1 eval`: evaluate a checkpoint on held-out rows and keep the result for `agent-r1 compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.build.collectors import eval_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.device import model_dtype
from agent_r1.build.models.load import load_model
from agent_r1.build.models.source import find_model
from agent_r1.build.task import Task, build_task
from agent_r1.cli.display import Display, eval_summary, program
from agent_r1.cli.remarks import eval_failures
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.config.schema import EvalConfig
from agent_r1.data.panels import panel_hash
from agent_r1.places import shown
from agent_r1.runs.outcomes import EvalRecord, Subject, eval_file, keep, row_outcomes, stem_of
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.seeds import stable_seed
from agent_r1.train.evaluate import evaluate
from agent_r1.train.garbage import parts_frozen
from agent_r1.train.trainer import EVAL_SEED
from agent_r1.types import TaskRow


def run_eval(
    config: RunConfig, run: RunDir, console: Console, *, model: str | None = None, name: str | None = None
) -> Evaluation:
    """Evaluate the run's newest checkpoint, or another `model` in its place, and keep the result in `run`."""
    with logging_to(run.log_file):
        task = build_task(config)
        work = task.run(_eval(config, task, run, console, model=model, name=name))
        return interruptible(work, config, console, lambda: "the evaluation was not kept")


async def _eval(
    config: RunConfig, task: Task, run: RunDir, console: Console, *, model: str | None, name: str | None
) -> Evaluation:
    path, rows = find_model(model or str(run.path)), task.test_rows()
    where = str(Path(path).resolve()) if Path(path).exists() else path  # a hub id is not a path
    dtype = str(model_dtype(config)).removeprefix("torch.")
    subject = Subject.of(config.model_dump(mode="json"), model=where, panel=panel_hash(rows), dtype=dtype)
    stem = name or stem_of(model or path)
    eval_file(run.evals, subject, name=name, stem=stem)  # refuses a taken name before anything is played
    result = await evaluate_model(config, task, rows, path, console)
    outcomes = row_outcomes(
        {group.row.row_id: group.trajectories for group in result.groups}, success_reward=task.success_reward
    )
    record = EvalRecord(subject=subject, outcomes=outcomes, metrics=result.metrics)
    file = keep(record, run.evals, stem=stem)
    failures = eval_failures([t for group in result.groups for t in group.trajectories], run)
    _show(record, config.eval, file, console, failures)
    return result


async def evaluate_model(
    config: RunConfig, task: Task, rows: Sequence[TaskRow], directory: str | Path, console: Console
) -> Evaluation:
    """Load a model as a user would, and evaluate it. A network prepared for learning may differ, and have adapters."""
    with Display(console, "evaluating", total=len(rows) * config.eval.samples) as display:
        model = load_model(config, directory)
        engine = build_engine(config, model)

        def show(finished: int, total: int, success: float) -> None:
            display.advance(finished)
            display.evaluating(finished, total, success)

        try:
            with parts_frozen():
                return await evaluate(
                    rows,
                    collector=eval_collector(config, task, model.renderer, engine),
                    scorer=task.scorer,
                    max_error_fraction=config.rollout.max_error_fraction,
                    success_reward=task.success_reward,
                    seed=stable_seed(config.seed, EVAL_SEED),
                    on_progress=show,
                )
        finally:
            await engine.close()


def describe_sampling(settings: EvalConfig) -> str:
    if settings.temperature == 0:
        return "greedy"
    return f"{settings.samples} sample(s) per row at temperature {settings.temperature:g}"


def _show(record: EvalRecord, settings: EvalConfig, file: Path, console: Console, failures: str) -> None:
    metrics, subject = record.metrics, record.subject
    shown_counts = ("episode/steps", "episode/tool_calls", "episode/bad_calls", "episode/response_tokens")
    lines = {"panel": f"{subject.panel} (split {subject.split})"}
    for measure in record.measures[1:]:
        mean, error = record.mean_and_error(measure)
        lines[measure] = f"{mean:.3f} +- {error:.3f}"
    for measure in (*shown_counts, *(name for name in metrics if name.startswith("context/"))):
        lines[measure] = f"{metrics[measure]:.3f}"
    lines |= {name: f"{share:.1%}" for name, share in metrics.items() if name.startswith("stop/") and share > 0}
    if failures:
        lines["failed"] = failures
    how = describe_sampling(settings)
    console.print(f"[bold]success {eval_summary(metrics)}[/]  ({how})", highlight=False, soft_wrap=True)
    for label, text in lines.items():
        console.print(Text(f"  {label:26s} {text}"), soft_wrap=True)
    console.print(Text(f"  kept in {shown(file)}; compare it: {program()} compare {shown(file)} OTHER"), soft_wrap=True)
