"""`agent-r1 train`: warm start, reinforcement learning, and what to do next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from agent_r1.build.learner import rehearse
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model, needs_reference, reference_model, starting_model
from agent_r1.build.task import Task
from agent_r1.build.trainer import build_trainer
from agent_r1.cli.commands.eval import describe_sampling
from agent_r1.cli.display import Display, clock, curve_picture, program, transcript_panel, warm_start_progress
from agent_r1.cli.log import logging_to
from agent_r1.cli.remarks import has_text, remarks
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig, recipe_name
from agent_r1.errors import ConfigError, DataError, RolloutError
from agent_r1.places import shown
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.reader import latest_checkpoint, list_checkpoints
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.train.checkpoint import load_state
from agent_r1.train.garbage import parts_frozen
from agent_r1.train.loop import train
from agent_r1.train.rng import seed_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training run."""

    run: RunDir
    before: Metrics
    after: Metrics


def run_training(config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool) -> Outcome:
    def kept() -> str:
        saved = list_checkpoints(run.checkpoints)
        what = f"saved after step {saved[-1][0]}" if saved else "no step was finished yet"
        return f"{what}; continue with: {program()} train --resume {run}"

    try:
        with run.locked(), logging_to(run.log_file):
            work = plan.task.run(_train(config, plan, run, console, resume=resume))
            return interruptible(work, config, console, kept)
    except RolloutError as error:  # such as a server that is down; nothing is lost
        if not list_checkpoints(run.checkpoints):
            raise
        raise RolloutError(f"{error}\n{kept()}") from error


async def _train(config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool) -> Outcome:
    began = time.monotonic()
    if run.read_metrics("collect"):
        raise ConfigError(f"{run} holds collected episodes: train in another directory")
    checkpoint = _resume_point(config, run) if resume else None
    if checkpoint is None:
        start = done = 0
        weights = await seeded_start(config, plan.task, console)
    else:
        start = done = checkpoint[0]
        # Adapters continue on the weights they were added to; a checkpoint has them merged.
        weights = run.reference if config.lora is not None else checkpoint[1]
    with Display(console, "training", total=config.trainer.steps, done=done) as display:
        model = load_model(config, weights)
        reference = reference_model(config, model, run.reference)
        trainer = build_trainer(config, run=run, plan=plan, model=model, reference=reference, progress=display)
        if config.task.tools:
            for problem in model.template.problems:
                display.note(f"warning: chat template: {problem}")
        if checkpoint is not None:
            await trainer.restore(load_state(checkpoint[1]))
            if done < config.trainer.steps:
                display.note(f"continuing {run} after step {done}")
        display.note(rehearse(config, trainer.learner))
        run.forget_after(done)
        run.write_tokens(token_texts(model.tokenizer))
        with parts_frozen():
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
            trainer.save(0)  # for chat and eval
        await trainer.engine.close()
    took = time.monotonic() - began
    return _conclude(run, trainer.last_evaluation, console, config, start=start, steps=done, seconds=took)


def _eval_due(config: RunConfig, step: int) -> bool:
    return step % config.trainer.eval_every == 0 or step == config.trainer.steps


async def seeded_start(config: RunConfig, task: Task, console: Console) -> str | Path:
    """Return where training begins. Seeds again at the end: a cached warm start must leave the same random streams."""
    seed_all(config.seed)
    with Display(console, "warm start", total=1) as display:
        base = base_model(config)
        on_update = warm_start_progress(display, may_end_early=config.sft.target_loss is not None)
        start = await starting_model(config, task, base, on_update=on_update, report=display.note)
    seed_all(config.seed)
    return start


def _resume_point(config: RunConfig, run: RunDir) -> tuple[int, Path] | None:
    """Step and path of the newest checkpoint; None if the run stopped before its first save and starts over."""
    if not list_checkpoints(run.checkpoints):
        done = max((record["step"] for record in run.read_metrics("train")), default=0)
        if done > config.trainer.save_every:  # starting over would delete the metrics
            raise DataError(f"{run.checkpoints} is empty after {done} steps: restore a checkpoint or start a new run")
        return None
    if run.read_metrics("sft"):
        raise ConfigError(f"{run} is a supervised warm start: train from it with model.path={run}")
    if needs_reference(config) and not run.reference.is_dir():
        raise DataError(
            f"{run.reference} is missing, which this run's KL penalty or adapters need. Restore it, or start a new run "
            f"from the weights with model.path={run}"
        )
    return latest_checkpoint(run.checkpoints)


def _conclude(
    run: RunDir, last: Evaluation | None, console: Console, config: RunConfig, *, start: int, steps: int, seconds: float
) -> Outcome:
    records = run.read_metrics()
    evaluations = [record for record in records if record["kind"] == "eval"]
    before, after = evaluations[0], evaluations[-1]
    title = f"{recipe_name(config.recipe)}, {config.algorithm.name}, seed {config.seed}"
    curve_picture(records, run.path / "curve.png", title, f"held-out rows ({describe_sampling(config.eval)})")
    if last is not None:
        console.print(_example(last, config.task.success_reward))
    went = f"{before['success']:.1%} -> {after['success']:.1%}[/] in {steps} steps"
    if before.get("panel") != after.get("panel"):  # never compare numbers of different rows
        went = f"{after['success']:.1%}[/] after {steps} steps, on other rows than before"
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
    console.print(
        Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True
    )  # Text: messages may contain [brackets]
    return Outcome(run=run, before=before, after=after)


def _example(evaluation: Evaluation, success_reward: float) -> Panel:
    """The success with the most steps; without any success, the first episode."""
    played = [(group, group.trajectories[0]) for group in evaluation.groups]
    won = [pair for pair in played if is_success(pair[1], success_reward)]
    chosen = max(won, key=lambda pair: len(pair[1].steps)) if won else played[0]
    return transcript_panel(*chosen)
