"""The commands as functions: what `agent-r1 train | sft | eval | collect` do, apart from reading the command line.

Each ends with what to do next. Chat and compare have modules of their own.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from agent_r1.build.plan import (
    Model,
    Plan,
    Task,
    build_engine,
    build_task,
    eval_collector,
    find_model,
    load_model,
    model_dtype,
    train_collector,
)
from agent_r1.cli.log import logging_to
from agent_r1.cli.remarks import eval_failures, has_text, remarks
from agent_r1.cli.signals import interruptible
from agent_r1.config import EvalConfig, RunConfig, recipe_name
from agent_r1.data.panels import panel_hash
from agent_r1.errors import ConfigError, DataError, RolloutError
from agent_r1.places import shown
from agent_r1.rollout.collect import OnEpisode
from agent_r1.runs.checkpoint import latest_checkpoint, list_checkpoints, load_state, save_checkpoint
from agent_r1.runs.metrics import Metrics, rollout_metrics
from agent_r1.runs.outcomes import EvalRecord, Outcomes, Subject, eval_file, is_success, keep, row_outcomes, stem_of
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.runs.statistics import standard_error
from agent_r1.seeds import stable_seed
from agent_r1.train.display import (
    Display,
    clock,
    curve_picture,
    errors_summary,
    eval_summary,
    program,
    transcript_panel,
)
from agent_r1.train.evaluate import evaluate
from agent_r1.train.garbage import parts_set_aside
from agent_r1.train.loop import train
from agent_r1.train.rng import seed_all
from agent_r1.train.sft import warm_start
from agent_r1.train.start import base_model, needs_reference, reference_model, sft_progress, starting_model
from agent_r1.train.trainer import EVAL_SEED, Trainer
from agent_r1.types import Group, TaskRow

EPISODES_PER_FILE = 4096  # of `collect`: what an interruption loses at most, and what is in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training run came to; also what tests look at."""

    run: RunDir
    before: Metrics
    after: Metrics


def run_training(config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool) -> Outcome:
    def kept() -> str:
        saved = list_checkpoints(run.checkpoints)
        what = f"saved after step {saved[-1][0]}" if saved else "no step was finished yet"
        return f"{what}; continue with: {program()} train --resume {run}"

    try:
        with run.locked(), logging_to(run.log_file), closing(plan.task):
            return interruptible(_train(config, plan, run, console, resume=resume), config, console, kept)
    except RolloutError as error:  # a server that is down, say: once that is mended, nothing is lost
        if not list_checkpoints(run.checkpoints):
            raise
        raise RolloutError(f"{error}\n{kept()}") from error


async def _train(config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool) -> Outcome:
    began = time.monotonic()
    if run.read_metrics("collect"):
        raise ConfigError(f"{run} holds collected episodes, not a training run: train in another directory")
    checkpoint = _resume_point(config, run) if resume else None
    if checkpoint is None:
        start = done = 0
        weights = await _seeded_start(config, plan.task, console)
    else:
        start = done = checkpoint[0]
        # Adapters continue on the weights they were made for; a checkpoint has them merged already.
        weights = run.reference if config.lora is not None else checkpoint[1]
    model = load_model(config, weights)
    with Display(console, "training", total=config.trainer.steps, done=done) as display:
        reference = reference_model(config, model, run.reference)
        trainer = Trainer.build(config, run=run, plan=plan, model=model, reference=reference, display=display)
        if config.task.tools:
            for problem in model.template.problems:
                display.note(f"warning: chat template: {problem}")
        if checkpoint is not None:
            trainer.restore(load_state(checkpoint[1]))
            if done < config.trainer.steps:
                display.note(f"continuing {run} after step {done}")
        trainer.rehearse()
        run.forget_after(done)
        with parts_set_aside():
            if not any(record["step"] == done for record in run.read_metrics("eval")) and _eval_due(config, done):
                await trainer.evaluate(done)
            done = await train(
                trainer,
                start=done,
                steps=config.trainer.steps,
                eval_every=config.trainer.eval_every,
                save_every=config.trainer.save_every,
                max_minutes=config.trainer.max_minutes,
            )
        if config.trainer.steps == 0:
            trainer.save(0)  # nothing to learn, but something to talk to
        await trainer.engine.close()
    took = time.monotonic() - began
    return _conclude(run, trainer.last_evaluation, console, config, start=start, steps=done, seconds=took)


def _eval_due(config: RunConfig, step: int) -> bool:
    return step % config.trainer.eval_every == 0 or step == config.trainer.steps


async def _seeded_start(config: RunConfig, task: Task, console: Console) -> str | Path:
    """Where training begins. The random streams are the same afterwards, whether a warm start drew from them or was
    found in the cache."""
    seed_all(config.seed)
    start = await starting_model(config, task, console)
    seed_all(config.seed)
    return start


def _resume_point(config: RunConfig, run: RunDir) -> tuple[int, Path] | None:
    """Step and place of the newest checkpoint; None when the run was stopped before its first save, and starts over."""
    if not list_checkpoints(run.checkpoints):
        done = max((record["step"] for record in run.read_metrics("train")), default=0)
        if done > config.trainer.save_every:  # so there was one: who starts over would forget all that was measured
            raise DataError(
                f"{run.checkpoints} is empty, and {done} steps were made: its checkpoints are gone. Put one back, or "
                "start a new run"
            )
        return None
    if run.read_metrics("sft"):
        raise ConfigError(f"{run} is a supervised warm start, not a training run: start from it with model.path={run}")
    if needs_reference(config) and not run.reference.is_dir():
        raise DataError(
            f"{run.reference} is gone: the policy before the first step, which this run's KL penalty or adapters need. "
            f"Put it back, or start a new run from the weights with model.path={run}"
        )
    return latest_checkpoint(run.checkpoints)


def _conclude(
    run: RunDir, last: Evaluation | None, console: Console, config: RunConfig, *, start: int, steps: int, seconds: float
) -> Outcome:
    records = run.read_metrics()
    evaluations = [record for record in records if record["kind"] == "eval"]
    before, after = evaluations[0], evaluations[-1]
    title = f"{recipe_name(config.recipe)}, {config.algorithm.name}, seed {config.seed}"
    curve_picture(records, run.path / "curve.png", title, f"held-out rows ({_how(config.eval)})")
    if last is not None:
        console.print(_show_piece(last, config.task.success_reward))
    went = f"{before['success']:.1%} -> {after['success']:.1%}[/] in {steps} steps"
    if before.get("panel") != after.get("panel"):  # numbers of different rows are never compared
        went = f"{after['success']:.1%}[/] after {steps} steps, on other rows than at the start"
    console.print(f"\n[bold]held-out success {went}; this took {clock(seconds)} min", highlight=False, soft_wrap=True)
    logged = f", {shown(run.log_file)}" if has_text(run.log_file) else ""
    trained = [record for record in records if record["kind"] == "train"]
    lines = [
        *remarks(run, trained, start=start, steps=steps, total=config.trainer.steps),
        f"picture     {run}/curve.png",
        f"talk to it  {program()} chat {run}",
        f"evaluate    {program()} eval {run}",
        f"how sure?   {program()} compare {run} --step first,last",
        f"look inside {run}/metrics.jsonl, {run}/trajectories/{logged}",
    ]
    console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)  # Text: messages are no markup
    return Outcome(run=run, before=before, after=after)


def _show_piece(evaluation: Evaluation, success_reward: float) -> Panel:
    """The most telling success: the one with the most steps; without any, the first episode."""
    played = [(group, group.trajectories[0]) for group in evaluation.groups]
    won = [pair for pair in played if is_success(pair[1], success_reward)]
    chosen = max(won, key=lambda pair: len(pair[1].steps)) if won else played[0]
    return transcript_panel(*chosen)


def run_sft(config: RunConfig, task: Task, run: RunDir, console: Console, *, given: Sequence[str] = ()) -> Path:
    """The warm start as a command of its own: a run directory whose checkpoint `model.path=` can name.

    `given` are the overrides that were typed: the command that goes on from here needs them too.
    """

    def kept() -> str:
        done = bool(list_checkpoints(run.checkpoints))
        return (
            f"the warm start is in {run}"
            if done
            else "nothing was kept: a warm start is saved only when it is complete"
        )

    with run.locked(), logging_to(run.log_file), closing(task):
        return interruptible(_sft(config, task, run, console, given), config, console, kept)


async def _sft(config: RunConfig, task: Task, run: RunDir, console: Console, given: Sequence[str]) -> Path:
    path = await _judged_sft(config, task, base_model(config), run, console)
    before, after = run.read_metrics("eval")
    going_on = f"{_typed(config, given)} model.path={run} sft.demos=null sft.trajectories=null"
    lines = [
        f"train from it  {program()} train {going_on}",
        f"talk to it     {program()} chat {run}",
        f"how sure?      {program()} compare {run} --step first,last",
    ]
    console.print(f"\n[bold]held-out success {eval_summary(before)} -> {eval_summary(after)}[/]", highlight=False)
    console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    return path


def _typed(config: RunConfig, given: Sequence[str]) -> str:
    """The recipe and what was changed about it, but for where training begins."""
    begins = ("sft.", "context.demo_summary", "model.path", "model.make")
    return " ".join([config.recipe, *(shlex.quote(word) for word in given if not word.startswith(begins))])


async def _judged_sft(config: RunConfig, task: Task, base: str | Path, run: RunDir, console: Console) -> Path:
    rows = task.test_rows()

    async def held_out(step: int, model: str | Path) -> None:
        # As anyone else would load it: a network that has been prepared for learning is another, and may have adapters.
        result = await _evaluate(config, task, rows, load_model(config, model), console)
        run.write_evaluation(step, result)

    await held_out(0, base)
    path, updates = await _imitate(config, task, base, run, console)
    await held_out(updates, path)
    return path


async def _imitate(config: RunConfig, task: Task, base: str | Path, run: RunDir, console: Console) -> tuple[Path, int]:
    """The checkpoint of the warm start, and the updates it took."""
    model = load_model(config, base)
    with Display(console, "warm start", total=1) as display:
        show = sft_progress(display, at_most=config.sft.target_loss is not None)

        def on_update(update: int, total: int, metrics: Metrics) -> None:
            run.append_metrics("sft", update, metrics)
            show(update, total, metrics)

        learner = await warm_start(config, task, model, on_update, display.note)
    updates = len(run.read_metrics("sft"))
    state = {"step": updates, "learner": learner.state_dict()}
    path = save_checkpoint(
        run.checkpoints, updates, model=learner.policy, tokenizer=model.tokenizer, state=state, keep=1
    )
    return path, updates


def run_eval(
    config: RunConfig, run: RunDir, console: Console, *, model: str | None = None, name: str | None = None
) -> Evaluation:
    """Evaluate the run's newest checkpoint, or another `model` in its place, and keep the result in `run`."""
    with logging_to(run.log_file):
        evaluated = _eval(config, run, console, model, name)
        return interruptible(evaluated, config, console, lambda: "the evaluation was not kept")


async def _eval(config: RunConfig, run: RunDir, console: Console, model: str | None, name: str | None) -> Evaluation:
    path = find_model(model or str(run.path))
    with closing(build_task(config)) as task:
        return await _kept_eval(config, task, run, console, path=path, model=model, name=name)


async def _kept_eval(
    config: RunConfig, task: Task, run: RunDir, console: Console, *, path: str, model: str | None, name: str | None
) -> Evaluation:
    rows = task.test_rows()
    where = str(Path(path).resolve()) if Path(path).exists() else path  # a hub id is no place
    dtype = str(model_dtype(config)).removeprefix("torch.")
    subject = Subject.of(config, model=where, panel=panel_hash(rows), dtype=dtype)
    stem = name or stem_of(model or path)
    eval_file(run.evals, subject, name=name, stem=stem)  # a name that is taken is told now
    result = await _evaluate(config, task, rows, load_model(config, path), console)
    record = EvalRecord(subject=subject, outcomes=_outcomes(result.groups, task.success_reward), metrics=result.metrics)
    file = keep(record, run.evals, stem=stem)
    failures = eval_failures([t for group in result.groups for t in group.trajectories], run)
    _show_evaluation(record, config.eval, file, console, failures)
    return result


def _show_evaluation(record: EvalRecord, settings: EvalConfig, file: Path, console: Console, failures: str) -> None:
    metrics, subject = record.metrics, record.subject
    console.print(f"[bold]success {eval_summary(metrics)}[/]  ({_how(settings)})", highlight=False, soft_wrap=True)
    console.print(Text(f"  {'panel':26s} {subject.panel} (split {subject.split})"))
    for measure in record.measures[1:]:
        mean, error = record.mean_and_error(measure)
        console.print(Text(f"  {measure:26s} {mean:.3f} +- {error:.3f}"))
    for measure in ("episode/steps", "episode/tool_calls", "episode/bad_calls", "episode/response_tokens"):
        console.print(Text(f"  {measure:26s} {metrics[measure]:.3f}"))
    for measure in (name for name in metrics if name.startswith("context/")):  # where a policy chose what was shown
        console.print(Text(f"  {measure:26s} {metrics[measure]:.3f}"))
    for stop, share in metrics.items():
        if stop.startswith("stop/") and share > 0:
            console.print(Text(f"  {stop:26s} {share:.1%}"))
    if failures:
        console.print(Text(f"  {'failed':26s} {failures}"), soft_wrap=True)
    console.print(Text(f"  kept in {shown(file)}; compare it: {program()} compare {shown(file)} OTHER"), soft_wrap=True)


async def _evaluate(
    config: RunConfig, task: Task, rows: Sequence[TaskRow], model: Model, console: Console
) -> Evaluation:
    engine = build_engine(config, model)
    try:
        with parts_set_aside(), Display(console, "evaluating", total=len(rows) * config.eval.samples) as display:
            return await evaluate(
                rows,
                collector=eval_collector(config, task, model.renderer, engine),
                scorer=task.scorer,
                success_reward=task.success_reward,
                seed=stable_seed(config.seed, EVAL_SEED),
                on_episode=_advancing(display),
            )
    finally:
        await engine.close()


def collect_config(config: RunConfig, *, model: str | None, rows: int | None, samples: int | None) -> RunConfig:
    """The description of what is collected; what is None is as the recipe has it."""
    task, rollout, start, sft = config.task, config.rollout, config.model, config.sft
    if rows is not None:
        task = task.model_copy(update={"train_count": rows})
    if samples is not None:
        rollout = rollout.model_copy(update={"group_size": samples})
    if model is not None:  # as it is: with no warm start
        start = start.model_copy(update={"path": find_model(model), "make": None})
        sft = sft.model_copy(update={"demos": None, "trajectories": None})
    return config.model_copy(update={"task": task, "rollout": rollout, "model": start, "sft": sft})


def run_collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, *, given: Sequence[str] = ()
) -> Outcomes:
    """Play rows without training and keep the episodes, for `sft` to imitate the good ones. `given`: see `run_sft`."""

    def kept() -> str:
        episodes = sum(int(record["episodes"]) for record in run.read_metrics("collect"))
        return f"{episodes} episodes are in {run}" if episodes else "no episodes were kept"

    with run.locked(), logging_to(run.log_file), closing(task):
        return interruptible(_collect(config, task, rows, run, console, given), config, console, kept)


async def _collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, given: Sequence[str]
) -> Outcomes:
    began, outcomes, samples = time.monotonic(), Outcomes(), config.rollout.group_size
    start = await _seeded_start(config, task, console)
    model = load_model(config, start)
    engine = build_engine(config, model)
    size = max(1, EPISODES_PER_FILE // samples)
    try:
        with parts_set_aside(), Display(console, "collecting", total=len(rows) * samples) as display:
            collector, on_episode = train_collector(config, task, model.renderer, engine), _advancing(display)
            for number, first in enumerate(range(0, len(rows), size)):
                seed = stable_seed(config.seed, "collect", number)
                played = await collector(rows[first : first + size], seed=seed, on_episode=on_episode)
                groups = await task.scorer(played)
                run.write_trajectories("train", number, groups)
                metrics = rollout_metrics(groups, success_reward=task.success_reward)
                run.append_metrics("collect", number, metrics | {"episodes": float(len(groups) * samples)})
                outcomes |= _outcomes(groups, task.success_reward)
                success = metrics["success"]
                display.step(len(outcomes) * samples, f"success {success:.1%}{errors_summary(metrics)}", value=success)
    finally:
        await engine.close()
    _conclude_collecting(config, run, outcomes, console, time.monotonic() - began)
    if any(row["success"] > 0 for row in outcomes.values()):
        least = f" sft.min_reward={config.task.success_reward:g}" if config.task.success_reward != 1 else ""
        policy = f"model.path={start}"  # the one that was sampled: its own words change it least
        words = f"sft {_typed(config, given)} sft.trajectories={run}{least} {policy}"
        console.print(Text(f"  imitate the good ones  {program()} {words}"), soft_wrap=True)
    return outcomes


def _conclude_collecting(config: RunConfig, run: RunDir, outcomes: Outcomes, console: Console, seconds: float) -> None:
    success = [row["success"] for row in outcomes.values()]
    solved = sum(value > 0 for value in success)
    mean, error = sum(success) / len(success), standard_error(success)
    console.print(
        f"[bold]success {mean:.1%} +- {error:.1%} of {len(success)} rows x {config.rollout.group_size} episodes[/]; "
        f"{solved} rows were solved at least once; this took {clock(seconds)} min",
        highlight=False,
        soft_wrap=True,
    )
    if not solved:
        console.print("  nothing to imitate yet: try more --samples, another --model, or easier rows", highlight=False)
    console.print(Text(f"  look inside            {run}/trajectories/"), soft_wrap=True)


def _outcomes(groups: Sequence[Group], success_reward: float) -> Outcomes:
    return row_outcomes({group.row.row_id: group.trajectories for group in groups}, success_reward=success_reward)


def _advancing(display: Display) -> OnEpisode:
    finished = count(1)
    return lambda _: display.advance(next(finished))


def _how(settings: EvalConfig) -> str:
    if settings.temperature == 0:
        return "greedy"
    return f"{settings.samples} sample(s) per row at temperature {settings.temperature:g}"
