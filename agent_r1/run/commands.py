"""The commands as functions: what `agent-r1 train | sft | eval` do, apart from reading the command line.

Each ends with what to do next. Chat has a module of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from agent_r1.agent.flow import stable_seed
from agent_r1.agent.guard import CANCEL_SECONDS
from agent_r1.config import EvalConfig, RunConfig, recipe_name
from agent_r1.run.build import Model, Plan, build_engine, build_task, eval_collector, find_model, load_model
from agent_r1.run.checkpoint import latest_checkpoint, list_checkpoints, load_state, save_checkpoint
from agent_r1.run.evaluate import Evaluation, evaluate
from agent_r1.run.garbage import parts_set_aside
from agent_r1.run.metrics import Metrics, is_success
from agent_r1.run.rng import deterministic, seed_all
from agent_r1.run.run_dir import RunDir
from agent_r1.run.sft import warm_start
from agent_r1.run.start import base_model, reference_model, sft_progress, starting_model
from agent_r1.run.track import Display, clock, curve_picture, eval_summary, program, transcript_panel
from agent_r1.run.train import train
from agent_r1.run.trainer import EVAL_SEED, Trainer

T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; `kept` says what was saved and how to go on."""

    def __init__(self, number: int, kept: str) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.kept = kept


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
        return f"{what}; continue with: {program()} train --resume {run.path}"

    with run.locked():
        _log_to(run.log_file)
        return _interruptible(_train(config, plan, run, console, resume=resume), config, kept)


async def _train(config: RunConfig, plan: Plan, run: RunDir, console: Console, *, resume: bool) -> Outcome:
    began = time.monotonic()
    seed_all(config.seed)
    checkpoint = _resume_point(run) if resume else None
    initial = run.path / "reference"
    # Adapters continue on the weights they were made for; a checkpoint has them merged already.
    continued = initial if checkpoint is not None and config.lora is not None else checkpoint
    model = load_model(config, continued or await starting_model(config, console))
    done = load_state(checkpoint)["step"] if checkpoint is not None else 0
    with Display(console, "training", total=config.trainer.steps, done=done) as display:
        reference = reference_model(config, model, initial)
        trainer = Trainer.build(config, run=run, plan=plan, model=model, reference=reference, display=display)
        if config.task.tools:
            for problem in model.template.problems:
                display.note(f"warning: chat template: {problem}")
        if checkpoint is not None:
            trainer.restore(load_state(checkpoint))
            display.note(f"continuing {run.path} after step {done}")
        trainer.rehearse()
        run.forget_after(done)
        with parts_set_aside():
            if not any(record["step"] == done for record in run.read_metrics("eval")) and _eval_due(config, done):
                await trainer.evaluate(done)
            await train(
                trainer,
                start=done,
                steps=config.trainer.steps,
                eval_every=config.trainer.eval_every,
                save_every=config.trainer.save_every,
            )
        if config.trainer.steps == 0:
            trainer.save(0)  # nothing to learn, but something to talk to
        await trainer.engine.close()
    return _conclude(run, trainer.last_evaluation, console, config, time.monotonic() - began)


def _eval_due(config: RunConfig, step: int) -> bool:
    return step % config.trainer.eval_every == 0 or step == config.trainer.steps


def _resume_point(run: RunDir) -> Path | None:
    """The newest checkpoint; None when the run was stopped before its first save, and simply starts over."""
    return latest_checkpoint(run.checkpoints)[1] if list_checkpoints(run.checkpoints) else None


def _conclude(run: RunDir, last: Evaluation | None, console: Console, config: RunConfig, seconds: float) -> Outcome:
    records = run.read_metrics()
    evaluations = [record for record in records if record["kind"] == "eval"]
    before, after = evaluations[0], evaluations[-1]
    title = f"{recipe_name(config.recipe)}, {config.algorithm.name}, seed {config.seed}"
    curve_picture(records, run.path / "curve.png", title, f"held-out rows ({_how(config.eval)})")
    if last is not None and (shown := _show_piece(last, config.task.success_reward)) is not None:
        console.print(shown)
    console.print(
        f"\n[bold]held-out success {before['success']:.1%} -> {after['success']:.1%}[/] in {config.trainer.steps} "
        f"steps; this took {clock(seconds)} min\n"
        f"  picture     {run.path}/curve.png\n"
        f"  talk to it  {program()} chat {run.path}\n"
        f"  evaluate    {program()} eval {run.path}\n"
        f"  look inside {run.path}/metrics.jsonl, {run.path}/trajectories/",
        highlight=False,
        soft_wrap=True,
    )
    return Outcome(run=run, before=before, after=after)


def _show_piece(evaluation: Evaluation, success_reward: float) -> Any:
    """The most telling success: the one with the most steps; without any, the first episode."""
    played = [(group, group.trajectories[0]) for group in evaluation.groups]
    won = [pair for pair in played if is_success(pair[1], success_reward)]
    chosen = max(won, key=lambda pair: len(pair[1].steps)) if won else played[0]
    return transcript_panel(*chosen)


def run_sft(config: RunConfig, run: RunDir, console: Console) -> Path:
    """The warm start as a command of its own: a run directory whose checkpoint `model.path=` can name."""

    def kept() -> str:
        done = bool(list_checkpoints(run.checkpoints))
        return f"the warm start is in {run.path}" if done else "a warm start is saved at its end: nothing was kept"

    with run.locked():
        _log_to(run.log_file)
        return _interruptible(_sft(config, run, console), config, kept)


async def _sft(config: RunConfig, run: RunDir, console: Console) -> Path:
    model = load_model(config, base_model(config))
    with Display(console, "warm start", total=1) as display:
        show = sft_progress(display)

        def on_update(update: int, total: int, metrics: Metrics) -> None:
            run.append_metrics("sft", update, metrics)
            show(update, total, metrics)

        learner = await warm_start(config, model, on_update)
    updates = len(run.read_metrics("sft"))
    state = {"step": updates, "learner": learner.state_dict()}
    path = save_checkpoint(
        run.checkpoints, updates, model=learner.policy, tokenizer=model.tokenizer, state=state, keep=1
    )
    del model, learner, state  # evaluation needs their room
    # As anyone else would load it: the network in memory has been prepared for learning, and may have adapters.
    result = await _evaluate(config, load_model(config, path), config.eval)
    run.append_metrics("eval", updates, result.metrics)
    run.write_trajectories("eval", updates, result.groups)
    console.print(
        f"\n[bold]held-out success after the warm start: {eval_summary(result.metrics)}[/]\n"
        f"  train from it  {program()} train {config.recipe} model.path={run.path} model.make=null sft.demos=null "
        f"sft.trajectories=null\n"
        f"  talk to it     {program()} chat {run.path}",
        highlight=False,
        soft_wrap=True,
    )
    return path


def run_eval(config: RunConfig, model_path: str, console: Console, settings: EvalConfig) -> Evaluation:
    return _interruptible(_eval(config, model_path, console, settings), config, lambda: "an evaluation keeps nothing")


async def _eval(config: RunConfig, model_path: str, console: Console, settings: EvalConfig) -> Evaluation:
    result = await _evaluate(config, load_model(config, find_model(model_path)), settings)
    metrics = result.metrics
    console.print(f"[bold]success {eval_summary(metrics)}[/]  ({_how(settings)})", highlight=False)
    for name in ("reward/mean", "episode/steps", "episode/tool_calls", "episode/bad_calls", "episode/response_tokens"):
        console.print(f"  {name:26s} {metrics[name]:.3f}", highlight=False)
    for name, value in metrics.items():
        if name.startswith("stop/") and value > 0:
            console.print(f"  {name:26s} {value:.1%}", highlight=False)
    return result


async def _evaluate(config: RunConfig, model: Model, settings: EvalConfig) -> Evaluation:
    task = build_task(config.model_copy(update={"eval": settings}))
    engine = build_engine(config, model)
    try:
        with parts_set_aside():
            return await evaluate(
                task.test_rows(),
                collector=eval_collector(config, task, model.renderer, engine, settings),
                scorer=task.scorer,
                success_reward=task.success_reward,
                seed=stable_seed(config.seed, EVAL_SEED),
            )
    finally:
        await engine.close()


def _how(settings: EvalConfig) -> str:
    if settings.temperature == 0:
        return "greedy"
    return f"{settings.samples} sample(s) per row at temperature {settings.temperature:g}"


def _log_to(path: Path) -> None:
    """Tracebacks of failed episodes go to the run's log, not over the live display."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("agent_r1")
    for old in [h for h in package.handlers if isinstance(h, logging.FileHandler)]:
        package.removeHandler(old)
        old.close()
    package.addHandler(handler)
    package.propagate = False


def _interruptible(work: Coroutine[Any, Any, T], config: RunConfig, kept: Callable[[], str]) -> T:
    """Run `work`; the first Ctrl-C or SIGTERM lets it save and end, a second one ends it at once."""
    received: list[int] = []
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def stop(number: int) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            loop.add_signal_handler(number, stop, number)
    try:
        with deterministic(config.trainer.deterministic):
            return loop.run_until_complete(task)
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0], kept()) from None
    finally:
        _close(loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Like `asyncio.run` at its end, but it does not wait for ever for user code that ignores being cancelled."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
