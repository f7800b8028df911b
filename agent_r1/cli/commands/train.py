"""`agent-r1 train`: warm start, reinforcement learning, and what to do next."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from agent_r1.build.learner import rehearse
from agent_r1.build.models.device import device_name
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model, needs_reference, reference_model, starting_model
from agent_r1.build.task import Task
from agent_r1.build.trainer import build_trainer
from agent_r1.cli.display import Display, clock, describe_sampling, program, transcript_panel, warm_start_progress
from agent_r1.cli.remarks import has_text, remarks
from agent_r1.cli.signals import interruptible
from agent_r1.config import PYTHON, RunConfig, recipe_name
from agent_r1.errors import ConfigError, DataError, RolloutError
from agent_r1.guard import CANCEL_SECONDS
from agent_r1.places import shown
from agent_r1.ranks.crew import Crew
from agent_r1.ranks.launch import GPUS
from agent_r1.ranks.rank_crew import RankCrew
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.reader import list_checkpoints
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.train.async_loop import train_async
from agent_r1.train.async_trainer import AsyncTrainer
from agent_r1.train.checkpoint import load_state
from agent_r1.train.garbage import parts_frozen
from agent_r1.train.loop import Schedule, train
from agent_r1.train.rng import restore_rng, rng_state, seed_all
from agent_r1.train.trainer import Trainer

if TYPE_CHECKING:
    from agent_r1.backends.verl.watch import Watch
    from agent_r1.doctor.quick import Parts


Checkpoint = tuple[int, Path]  # its step and folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training run."""

    run: RunDir
    before: Metrics
    after: Metrics


def run_training(
    config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool, crew: Crew | None = None
) -> Outcome:
    """Train in this process, which may be one of several ranks. Only rank 0 writes to the run directory."""
    training = Training(config, plan, run, console, crew or Crew(), resume=resume)
    try:
        return training.run_interruptible()
    except RolloutError as error:  # such as a server that is down; nothing is lost
        if not list_checkpoints(run.checkpoints):
            raise
        raise RolloutError(f"{error}\n{describe_kept(run)}") from error


def describe_kept(run: RunDir, gpus: int | None = None) -> str:
    """Say what was saved, and how to continue."""
    saved = list_checkpoints(run.checkpoints)
    what = f"saved after step {saved[-1][0]}" if saved else "no step was finished yet"
    if run.settings.get("recipe") == PYTHON:
        return f"{what}; continue with: ar.train(resume={str(run)!r}) and the same objects"
    gpus = gpus or int(os.environ.get(GPUS, "0"))
    return f"{what}; continue with: {program()} train --resume {run}{f' --gpus {gpus}' if gpus else ''}"


def rank_log(run: RunDir, crew: Crew) -> Path:
    """Return the log file of this process; for rank 0, it is the log of the run."""
    return run.log_file if crew.ranks.is_main else run.path / f"rank_{crew.ranks.rank}.log"


@dataclass(frozen=True, slots=True)
class Training:
    config: RunConfig
    plan: Plan
    run: RunDir
    console: Console
    crew: Crew
    resume: bool

    def run_interruptible(self) -> Outcome:
        run, is_main = self.run, self.crew.ranks.is_main
        with ExitStack() as stack:
            if is_main:
                stack.enter_context(run.locked())
            stack.enter_context(logging_to(rank_log(run, self.crew)))
            if is_main and self.resume:
                run.record_versions()  # the code may be newer than the run
            if is_main:
                stack.callback(self.plan.observer.finish, run)
            watch = stack.enter_context(self._verl_session())
            work = self.plan.task.run(self.train(watch))
            crew = self.crew if isinstance(self.crew, RankCrew) else None
            guarded = work if watch is None else watch.guard(work)
            return interruptible(guarded, self.config, self.console, lambda: describe_kept(run), crew)

    def _verl_session(self) -> AbstractContextManager[Watch | None]:
        if self.config.backend == "local":
            return nullcontext()
        from agent_r1.backends.verl.launch import session

        def report(cause: str) -> None:
            self.console.print(Text(f"error: {cause}\n{describe_kept(self.run)}"), soft_wrap=True)

        return session(self.config, self.run, report)

    async def train(self, watch: Watch | None = None) -> Outcome:
        config, run, is_main = self.config, self.run, self.crew.ranks.is_main
        began = time.monotonic()
        if run.read_metrics("collect"):
            raise ConfigError(f"{run} holds collected episodes: train in another directory")
        checkpoint = self.crew.ranks.broadcast(self._resume_point() if self.resume and is_main else None)
        if checkpoint is None:
            start = done = 0
            weights = await self._start()
        else:
            start = done = checkpoint[0]
            # Adapters continue on the weights they were added to; a checkpoint has them merged.
            weights = run.reference if config.lora is not None else checkpoint[1]
        with Display(self.console, "training", total=config.trainer.steps, done=done) as display:
            if watch is not None:
                trainer = await self._build_on_verl(display, weights, checkpoint, watch)
            else:
                trainer = await self._build_local(display, weights, checkpoint)
            async with _engine_closed(trainer):
                if checkpoint is not None and done < config.trainer.steps:
                    display.note(f"continuing {run} after step {done}")
                if is_main:
                    run.forget_after(done)
                    run.record_versions(device=device_name(config))
                    run.write_tokens(token_texts(trainer.tokenizer))
                    self.plan.observer.start(run, step=done)
                with parts_frozen():
                    done = await self._loop(trainer, done)
                if config.trainer.steps == 0:
                    trainer.save(0)  # so that chat and eval find a checkpoint
        return self._conclude(trainer, start=start, steps=done, seconds=time.monotonic() - began)

    async def _build_on_verl(
        self, display: Display, weights: str | Path, checkpoint: Checkpoint | None, watch: Watch
    ) -> Trainer:
        from agent_r1.backends.verl.launch import build_verl_trainer
        from agent_r1.doctor.quick import prepare

        if checkpoint is None:
            _examine(lambda: prepare(self.config, self.plan, weights), display)
        parts: dict[str, Any] = {"plan": self.plan, "progress": display, "watch": watch, "checkpoint": checkpoint}
        return await build_verl_trainer(self.config, run=self.run, weights=weights, **parts)

    async def _build_local(self, display: Display, weights: str | Path, checkpoint: Checkpoint | None) -> Trainer:
        """Build a trainer whose model is in this process."""
        config, crew, run = self.config, self.crew, self.run
        model = load_model(config, weights)
        reference = crew.main_first(lambda: reference_model(config, model, run.reference))
        trainer = build_trainer(
            config, run=run, plan=self.plan, model=model, reference=reference, progress=display, crew=crew
        )
        if checkpoint is None and crew.ranks.is_main:
            from agent_r1.doctor.quick import parts_of

            parts = model.tokenizer, model.renderer, model.template, model.network.config
            _examine(lambda: parts_of(config, self.plan, *parts), display)
        if checkpoint is not None:
            await trainer.restore(load_state(checkpoint[1], trainer.learner.ranks))
        display.note(rehearse(config, trainer.learner))
        return trainer

    async def _loop(self, trainer: Trainer, done: int) -> int:
        """Evaluate the policy that training begins with, then train; return the last step."""
        limits = self.config.trainer.model_dump(include={"steps", "eval_every", "save_every", "max_minutes"})
        evaluated = any(record["step"] == done for record in self.run.read_metrics("eval"))
        is_due = done % limits["eval_every"] == 0 or done == limits["steps"]
        if self.crew.ranks.broadcast(is_due and not evaluated):
            await trainer.evaluate(done)
        schedule = Schedule(start=done, **limits)
        if isinstance(trainer, AsyncTrainer):
            return await train_async(trainer, schedule, max_staleness=self.config.trainer.max_staleness)
        return await train(trainer, schedule, trainer.crew)

    async def _start(self) -> str | Path:
        """Return where training begins. Rank 0 creates the model and its warm start; the others find them in the
        cache."""

        async def part() -> str | Path | None:
            is_main = self.crew.ranks.is_main
            return await seeded_start(self.config, self.plan.task, self.console) if is_main else None

        made = await self.crew.all(part())
        return made[self.crew.ranks.rank] or await seeded_start(self.config, self.plan.task, self.console)

    def _resume_point(self) -> Checkpoint | None:
        """Step and path of the newest checkpoint; None if the run stopped before its first save and starts over."""
        run, saved = self.run, list_checkpoints(self.run.checkpoints)
        if not saved:
            done = max((record["step"] for record in run.read_metrics("train")), default=0)
            if done > self.config.trainer.save_every:  # starting over would delete the metrics
                raise DataError(f"{run.checkpoints} is empty after {done} steps: restore one or start a new run")
            return None
        if run.read_metrics("sft"):
            raise ConfigError(f"{run} is a supervised warm start: train from it with model.path={run}")
        if needs_reference(self.config) and not run.reference.is_dir():
            raise DataError(f"{run.reference} is missing: restore it, or start a new run with model.path={run}")
        return saved[-1]

    def _conclude(self, trainer: Trainer, *, start: int, steps: int, seconds: float) -> Outcome:
        config, run, records = self.config, self.run, self.run.read_metrics()
        evaluations = [record for record in records if record["kind"] == "eval"]
        before, after = evaluations[0], evaluations[-1]
        outcome = Outcome(run=run, before=before, after=after)
        if not self.crew.ranks.is_main:
            return outcome
        draw_curve(run, config)
        if trainer.last_evaluation is not None:
            self.console.print(_example(trainer.last_evaluation, config.task.success_reward))
        went = f"{before['success']:.1%} -> {after['success']:.1%}[/] in {steps} step{'s' * (steps != 1)}"
        if before.get("panel") != after.get("panel"):  # never compare numbers of different rows
            went = f"{after['success']:.1%}[/] after {steps} steps, on other rows than before"
        summary = f"\n[bold]held-out success {went}; this took {clock(seconds)} min"
        self.console.print(summary, highlight=False, soft_wrap=True)
        logged = f", {shown(run.log_file)}" if has_text(run.log_file) else ""
        trained = [record for record in records if record["kind"] == "train"]
        lines = [
            *remarks(run, trained, start=start, steps=steps, total=config.trainer.steps),
            f"picture     {run}/curve.png",
            f"talk to it  {program()} chat {run}",
            f"evaluate    {program()} eval {run}",
            f"how sure?   {program()} compare {run} --step first,last",
            f"look at it  {program()} view {run}",
            f"look inside {run}/metrics.jsonl, {run}/trajectories/{logged}",
        ]
        if config.recipe == PYTHON:  # its objects are in another process
            lines = [line for line in lines if not line.startswith(("talk", "evaluate"))]
        self.console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)  # messages have [brackets]
        return outcome


@asynccontextmanager
async def _engine_closed(trainer: Trainer) -> AsyncIterator[None]:
    """Close the engine even if training fails or is interrupted: in a notebook, the process stays alive."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the first error counts
            async with asyncio.timeout(CANCEL_SECONDS):
                await trainer.engine.close()
        raise
    await trainer.engine.close()


def _examine(read_parts: Callable[[], Parts], display: Display) -> None:
    """Say what looks wrong. The checks call user code, which must not change what the run draws."""
    from agent_r1.doctor.finding import Level
    from agent_r1.doctor.quick import run_quick

    before = rng_state()
    for found in run_quick(read_parts()):
        if found.level is not Level.GREEN:
            display.note(f"{found.name}: {found.evidence}. {found.fix}")
    restore_rng(before)


async def seeded_start(config: RunConfig, task: Task, console: Console) -> str | Path:
    """Return where training begins. Seeds again at the end: a cached warm start must leave the same random streams."""
    seed_all(config.seed)
    with Display(console, "warm start", total=1) as display:
        base = base_model(config)
        on_update = warm_start_progress(display, may_end_early=config.sft.target_loss is not None)
        start = await starting_model(config, task, base, on_update=on_update, report=display.note)
    seed_all(config.seed)
    return start


def draw_curve(run: RunDir, config: RunConfig) -> Path:
    """Draw success over steps as `RUN/curve.png`."""
    from agent_r1.track.plots import plot_curve  # loads matplotlib, after training

    title = f"{recipe_name(config.recipe)}, {config.algorithm.name}, seed {config.seed}"
    plot_curve(run.read_metrics(), run.path / "curve.png", title, f"held-out rows ({describe_sampling(config.eval)})")
    return run.path / "curve.png"


def _example(evaluation: Evaluation, success_reward: float) -> Panel:
    """The success with the most steps; without any success, the first episode."""
    played = [(group, group.trajectories[0]) for group in evaluation.groups]
    won = [pair for pair in played if is_success(pair[1], success_reward)]
    chosen = max(won, key=lambda pair: len(pair[1].steps)) if won else played[0]
    return transcript_panel(*chosen)
