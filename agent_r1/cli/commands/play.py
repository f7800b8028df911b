"""`agent-r1 eval`, `collect` and `sft`: play rows with a model to judge it, to keep its episodes, or to see what
imitation has changed."""

from __future__ import annotations

import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.build.collectors import eval_collector, train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.device import model_dtype
from agent_r1.build.models.load import Model, load_model
from agent_r1.build.models.source import find_model
from agent_r1.build.start import base_model, warm_start
from agent_r1.build.task import Task, build_task
from agent_r1.cli.commands.train import seeded_start
from agent_r1.cli.display import (
    Display,
    clock,
    describe_sampling,
    errors_summary,
    eval_summary,
    program,
    warm_start_progress,
)
from agent_r1.cli.remarks import eval_failures
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.data.panels import panel_hash
from agent_r1.places import shown
from agent_r1.rollout.collect import Collector, check_failures
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.outcomes import EvalRecord, Outcomes, Subject, eval_file, keep, row_outcomes, stem_of
from agent_r1.runs.reader import list_checkpoints
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.runs.statistics import standard_error
from agent_r1.seeds import stable_seed
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.train.checkpoint import save_checkpoint
from agent_r1.train.evaluate import episode_metrics, evaluate
from agent_r1.train.garbage import parts_frozen
from agent_r1.train.trainer import EVAL_SEED
from agent_r1.types import TaskRow, Trajectory

EPISODES_PER_FILE = 4096  # an interruption loses at most this many, and this many are in memory at once


@asynccontextmanager
async def playing(
    config: RunConfig, task: Task, path: str | Path, make_collector: Callable[..., Collector]
) -> AsyncIterator[tuple[Model, Collector]]:
    """Load a model as a user would, and play rows with it. A network prepared for learning may differ."""
    model = load_model(config, path)
    engine = build_engine(config, model)
    try:
        with parts_frozen():
            yield model, make_collector(config, task, model.renderer, engine)
    finally:
        await engine.close()


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
    by_row = {group.row.row_id: group.trajectories for group in result.groups}
    outcomes = row_outcomes(by_row, success_reward=task.success_reward)
    record = EvalRecord(subject=subject, outcomes=outcomes, metrics=result.metrics)
    file = shown(keep(record, run.evals, stem=stem))
    lines = _details(record)
    if failures := eval_failures([t for group in result.groups for t in group.trajectories], run):
        lines["failed"] = failures
    how = describe_sampling(config.eval)
    console.print(f"[bold]success {eval_summary(record.metrics)}[/]  ({how})", highlight=False, soft_wrap=True)
    for label, text in lines.items():
        console.print(Text(f"  {label:26s} {text}"), soft_wrap=True)
    console.print(Text(f"  kept in {file}; compare it: {program()} compare {file} OTHER"), soft_wrap=True)
    return result


def _details(record: EvalRecord) -> dict[str, str]:
    metrics, subject = record.metrics, record.subject
    counts = ("episode/steps", "episode/tool_calls", "episode/bad_calls", "episode/response_tokens")
    lines = {"panel": f"{subject.panel} (split {subject.split})"}
    for measure in record.measures[1:]:
        mean, error = record.mean_and_error(measure)
        lines[measure] = f"{mean:.3f} +- {error:.3f}"
    for measure in (*counts, *(name for name in metrics if name.startswith("context/"))):
        lines[measure] = f"{metrics[measure]:.3f}"
    return lines | {name: f"{share:.1%}" for name, share in metrics.items() if name.startswith("stop/") and share > 0}


async def evaluate_model(
    config: RunConfig, task: Task, rows: Sequence[TaskRow], directory: str | Path, console: Console
) -> Evaluation:
    with Display(console, "evaluating", total=len(rows) * config.eval.samples) as display:

        def show(finished: int, total: int, success: float) -> None:
            display.advance(finished)
            display.evaluating(finished, total, success)

        async with playing(config, task, directory, eval_collector) as (_, collector):
            return await evaluate(
                rows,
                collector=collector,
                scorer=task.scorer,
                max_error_fraction=config.rollout.max_error_fraction,
                success_reward=task.success_reward,
                seed=stable_seed(config.seed, EVAL_SEED),
                on_progress=show,
            )


def run_collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, *, given: Sequence[str] = ()
) -> Outcomes:
    """Play training rows without training and keep the episodes. `given`: see `run_sft`."""

    def kept() -> str:
        episodes = sum(int(record["episodes"]) for record in run.read_metrics("collect"))
        return f"{episodes} episodes are in {run}" if episodes else "no episodes were kept"

    with run.locked(), logging_to(run.log_file):
        work = task.run(_collect(config, task, rows, run, console, given))
        return interruptible(work, config, console, kept)


async def _collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, given: Sequence[str]
) -> Outcomes:
    began, outcomes, samples = time.monotonic(), Outcomes(), config.rollout.group_size
    size = max(1, EPISODES_PER_FILE // samples)
    start = await seeded_start(config, task, console)
    with Display(console, "collecting", total=len(rows) * samples) as display:
        finished = count(1)

        def on_episode(_: Trajectory) -> None:
            display.advance(done := next(finished))
            display.episodes(done, len(rows) * samples)

        async with playing(config, task, start, train_collector) as (model, collector):
            run.write_tokens(token_texts(model.tokenizer))
            for number, first in enumerate(range(0, len(rows), size)):
                seed = stable_seed(config.seed, "collect", number)
                played = await collector(rows[first : first + size], seed=seed, on_episode=on_episode)
                groups = await task.scorer(played)
                check_failures(groups, config.rollout.max_error_fraction)
                metrics = episode_metrics(groups, success_reward=task.success_reward)
                run.write_trajectories("train", number, groups)
                run.append_metrics("collect", number, metrics | {"episodes": float(len(groups) * samples)})
                by_row = {group.row.row_id: group.trajectories for group in groups}
                outcomes |= row_outcomes(by_row, success_reward=task.success_reward)
                summary = f"success {metrics['success']:.1%}{errors_summary(metrics)}"
                display.update(len(outcomes) * samples, summary, value=metrics["success"])
    success = [row["success"] for row in outcomes.values()]
    solved, mean, error = sum(value > 0 for value in success), sum(success) / len(success), standard_error(success)
    console.print(
        f"[bold]success {mean:.1%} +- {error:.1%} of {len(success)} rows x {samples} episodes[/]; {solved} rows were "
        f"solved at least once; this took {clock(time.monotonic() - began)} min",
        highlight=False,
        soft_wrap=True,
    )
    # Start from the policy that was sampled: imitating its own responses changes it least.
    least = f" sft.min_reward={task.success_reward:g}" if task.success_reward != 1 else ""
    imitate = f"{program()} sft {typed_words(config, given)} sft.trajectories={run}{least} model.path={start}"
    none = "  nothing to imitate yet: try more --samples, another --model, or easier rows"
    lines = [f"  look inside            {run}/trajectories/", f"  imitate the good ones  {imitate}" if solved else none]
    console.print(Text("\n".join(lines)), soft_wrap=True)
    return outcomes


def run_sft(config: RunConfig, task: Task, run: RunDir, console: Console, *, given: Sequence[str] = ()) -> Path:
    """Train a supervised warm start as a run of its own. `given` are the overrides that were typed; the suggested next
    command repeats them."""

    def kept() -> str:
        if list_checkpoints(run.checkpoints):
            return f"the warm start is in {run}"
        return "nothing was kept: a warm start is saved when it is complete"

    with run.locked(), logging_to(run.log_file):
        return interruptible(task.run(_sft(config, task, run, console, given)), config, console, kept)


async def _sft(config: RunConfig, task: Task, run: RunDir, console: Console, given: Sequence[str]) -> Path:
    base, rows = base_model(config), task.test_rows()
    run.write_evaluation(0, await evaluate_model(config, task, rows, base, console))
    path, updates = await _imitate(config, task, base, run, console)
    run.write_evaluation(updates, await evaluate_model(config, task, rows, path, console))
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
