"""`train` and `evaluate`: what `agent-r1 train` and `agent-r1 eval` do, for settings and objects given in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from rich.text import Text

from agent_r1.api.callbacks import Callbacks, OnEpisode, OnEval, OnStep
from agent_r1.api.results import EvalResult
from agent_r1.api.resume import stored_config
from agent_r1.api.run import Run
from agent_r1.api.screen import is_interactive, screen
from agent_r1.api.settings import Config, Settings, check_names, read_keywords
from agent_r1.api.threads import apart
from agent_r1.build.plan import build_plan
from agent_r1.build.start import base_model, require_base
from agent_r1.build.task import build_task
from agent_r1.cli.commands.play import evaluate_model
from agent_r1.cli.commands.train import run_training
from agent_r1.cli.signals import interruptible
from agent_r1.cli.terminal import Interrupted
from agent_r1.cli.train_command import Job
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import Evaluation, RunDir


def train(
    config: Config | str | Path | None = None,
    /,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
    on_episode: OnEpisode | None = None,
    on_eval: OnEval | None = None,
    quiet: bool = False,
    **keywords: Unpack[Settings],
) -> Run:
    """Train an agent and return its run. The keywords are the same as for `Config`; see docs/python-api.md.

    `config`: a `Config` or a recipe to start from. `out`: the run directory, by default a new one under `runs/`.
    `resume`: continue the run in this directory.

    Callbacks: `on_step(step, metrics)`, `on_episode(trajectory)` for each scored training episode, and
    `on_eval(result)`. If one of them raises, the last finished step is saved and the exception is raised here.

    Ctrl-C saves the last finished step. In a notebook or at a prompt the run is then returned, with `stopped` set; a
    script gets the KeyboardInterrupt.
    """
    check_names(keywords, ("out", "resume", "on_step", "on_episode", "on_eval", "quiet"))
    console = screen(quiet=quiet)
    job = _new_job(config, keywords, out) if resume is None else _continued_job(config, keywords, out, Path(resume))
    if job.config.backend != "local":
        raise ConfigError(
            f"backend={job.config.backend!r} trains in processes that do not have the objects of this one: write a "
            "recipe and use agent-r1 train"
        )
    # Finds mistakes before a run directory or a model exists.
    plan = build_plan(job.config, resume=job.done is not None)
    callbacks = Callbacks(trackers=plan.observer, on_step=on_step, on_episode=on_episode, on_eval=on_eval)
    plan = replace(plan, observer=callbacks)
    if not job.resume:
        require_base(job.config)
    directory = job.open(console)
    try:
        apart(lambda: run_training(job.config, plan, directory, console, resume=job.resume))
    except Interrupted as stop:
        console.print(Text(f"stopped; {stop.kept}"), soft_wrap=True)
        if not is_interactive():
            raise KeyboardInterrupt from None
        return Run(directory, job.config, stopped=True)
    except BaseException:
        if callbacks.error is not None:
            raise callbacks.error from None
        raise
    return Run(directory, job.config)


def evaluate(
    config: Config | str | Path | None = None, /, *, quiet: bool = False, **keywords: Unpack[Settings]
) -> EvalResult:
    """Evaluate a model on a task without training, for example a baseline. The keywords are the same as for `train`.

    All `rows` of a list are played. Nothing is kept; `run.evaluate()` keeps the results of a run.
    """
    rows = keywords.get("rows")
    if (
        rows is not None
        and "test_rows" not in keywords
        and not callable(rows)
        and not isinstance(rows, str | Path | Mapping)
    ):
        keywords["rows"] = {"test": rows}
    settings, console = _config(config, keywords).resolved, screen(quiet=quiet)
    task = build_task(settings)
    chosen = task.test_rows()

    def work() -> Evaluation:
        playing = task.run(evaluate_model(settings, task, chosen, base_model(settings), console))
        return interruptible(playing, settings, console, lambda: "the evaluation was not kept")

    try:
        return EvalResult.of(apart(work))
    except Interrupted:
        raise KeyboardInterrupt from None


def _config(config: Config | str | Path | None, keywords: Settings) -> Config:
    return config.with_settings(**keywords) if isinstance(config, Config) else Config(config, **keywords)


def _new_job(config: Config | str | Path | None, keywords: Settings, out: str | Path | None) -> Job:
    return Job(config=_config(config, keywords).resolved, path=None if out is None else Path(out))


def _continued_job(config: Config | str | Path | None, keywords: Settings, out: str | Path | None, path: Path) -> Job:
    if out is not None:
        raise ConfigError(f"resume={str(path)!r} already names the run directory: leave out out={str(out)!r}")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"resume={str(path)!r} knows its recipe: leave out {str(config)!r}")
    directory = RunDir.open(path)
    given: dict[str, Any] = {**(config.keywords if config is not None else {}), **keywords}
    wanted, changed = stored_config(directory, read_keywords(given))
    return Job.resumed(directory, wanted, words=(), changed=changed)
