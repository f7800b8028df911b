"""The preparations of `agent-r1 train`: choose the run directory, print the plan, start or join the ranks.

Training itself is in `commands/train.py`, which imports transformers.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import typer
import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from agent_r1.cli.terminal import Interrupted, Terminal
from agent_r1.config import RunConfig, change_config, load_config, parse_config, recipe_name
from agent_r1.errors import ConfigError, RankError
from agent_r1.ranks.crew import Crew
from agent_r1.ranks.rank_env import place_of_rank
from agent_r1.runs.reader import is_run, list_checkpoints
from agent_r1.runs.run_dir import RunDir, new_run_path, present_versions

if TYPE_CHECKING:
    from agent_r1.build.plan import Plan
    from agent_r1.ranks.rank_crew import RankCrew

# The settings of an existing run that may be changed when it continues.
RESUME_SETTINGS = ("trainer.steps", "trainer.max_minutes", "model.device", "track")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to train, and its directory."""

    config: RunConfig
    path: Path | None  # None: a new one
    words: Sequence[str] = ()  # words of the command line, without the run directory
    resume: bool = False
    done: int | None = None  # the step of the checkpoint that training continues from
    changed: Sequence[str] = ()  # settings whose Python objects are no longer the same

    @classmethod
    def resumed(cls, directory: RunDir, config: RunConfig, words: Sequence[str], changed: Sequence[str] = ()) -> Self:
        saved = list_checkpoints(directory.checkpoints)
        done = saved[-1][0] if saved else None
        is_warm_start = bool(directory.read_metrics("sft"))  # refused when it is loaded
        if done is not None and config.trainer.steps < done and not is_warm_start:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps}: {directory} has already done {done} steps; set more"
            )
        return cls(config=config, path=directory.path, words=words, resume=True, done=done, changed=changed)

    def find_path(self) -> Path:
        return self.path or new_run_path(recipe_name(self.config.recipe), seed=self.config.seed)

    def open(self, console: Console) -> RunDir:
        """Create the run directory, or write the changed config to an existing one."""
        if not self.resume:
            directory = RunDir.create(self.find_path(), self.config)
            console.print(Text(f"run directory {directory}"), soft_wrap=True)
            return directory
        directory = RunDir.open(self.find_path())
        for name in self.changed:
            console.print(Text(f"warning: what {name} names has changed since {directory} was started"), soft_wrap=True)
        with directory.locked():
            directory.update_config(self.config)
        return directory


def new_job(recipe: str, overrides: Sequence[str], run: Path | None, *, may_continue: bool) -> Job:
    """Read a recipe. With `may_continue`, continue the run in the directory if there is one."""
    config = load_config(recipe, overrides)  # before torch is imported, so that a misspelt key fails at once
    if may_continue and run is None:
        raise ConfigError("--continue needs --run DIR: the directory of the run to start or to continue")
    if may_continue and run is not None and is_run(RunDir(run).path) and not (existing := RunDir.open(run)).is_bare():
        stored, given = flatten(parse_config(existing.settings).model_dump()), flatten(config.model_dump())
        changed = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
        if fixed := [name for name in changed if name not in RESUME_SETTINGS]:
            name = fixed[0]
            raise ConfigError(f"{existing} was started with {name}={stored.get(name)}, not {given.get(name)}")
        words = [f"{name}={'null' if given[name] is None else given[name]}" for name in changed]
        return Job.resumed(existing, config, words)
    return Job(config=config, words=[recipe, *overrides], path=run)


def resumed_job(path: Path, changes: Sequence[str]) -> Job:
    """Continue the run in this directory."""
    directory = RunDir.open(path)
    return Job.resumed(directory, change_config(parse_config(directory.settings), changes, RESUME_SETTINGS), changes)


def flatten(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the settings by their dotted names."""
    if not isinstance(tree, dict) or not tree:
        return {name: tree}
    return {key: value for part in tree for key, value in flatten(tree[part], f"{name}{name and '.'}{part}").items()}


def run_job(job: Job, console: Console, *, gpus: int | None, dry_run: bool, crew: Crew) -> None:
    """Train here, or on as many ranks as there are `gpus`."""
    from agent_r1.build.plan import build_plan

    if type(crew) is not Crew:
        if gpus is not None:
            raise ConfigError("--gpus starts the ranks itself: leave it out under torchrun and srun")
        _join_group(cast("RankCrew", crew), job)
    if gpus is not None:
        _check_gpus(job.config, gpus)
    # Finds mistakes before a run directory or a model exists.
    plan = build_plan(job.config, resume=job.done is not None)
    settings = _check_verl(job, plan, gpus, crew, dry_run=dry_run) if job.config.backend == "verl" else None
    if dry_run:
        print_plan(job.config, plan, console, done=job.done, settings=settings)
    elif gpus is not None and gpus > 1:
        _launch(job, gpus)
    else:
        _train(job, plan, console, crew)


def _check_gpus(config: RunConfig, count: int) -> None:
    import torch

    from agent_r1.build.models.device import model_device

    if model_device(config).type == "cuda" and count > (found := torch.cuda.device_count()):
        raise ConfigError(f"--gpus {count}: this machine has only {found}. Use --gpus {found}, or torchrun on several")


def _check_verl(job: Job, plan: Plan, gpus: int | None, crew: Crew, *, dry_run: bool) -> dict[str, Any]:
    """Return the settings of verl."""
    from agent_r1.backends.verl.launch import check_verl, require_verl

    if gpus is not None or crew.ranks.size > 1:
        raise ConfigError(
            "backend=verl starts its own processes: set verl.workers in place of --gpus, torchrun and srun"
        )
    if not dry_run:
        require_verl()
    return check_verl(job.config, plan)


def print_plan(
    config: RunConfig,
    plan: Plan,
    console: Console,
    *,
    trains: bool = True,
    done: int | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Print the settings as YAML, and the plan in one sentence. `done` is the step of the checkpoint that training
    continues from, `settings` are verl's settings."""

    def show(tree: dict[str, Any]) -> None:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        console.print(Syntax(text, "yaml", background_color="default"), soft_wrap=True)

    sft, rollout, trainer, parts = config.sft, config.rollout, config.trainer, []
    if done is None and (sft.demos is not None or sft.trajectories is not None):
        made = f"at most {sft.count} demonstrations"
        kept = f"the trajectories of {sft.trajectories} with a reward of at least {sft.min_reward:g}"
        parts.append(f"warm start of {sft.epochs} epochs on {kept if sft.demos is None else made}")
    if trains:
        start = f"after step {done}, {trainer.steps - done} more" if done is not None else f"{trainer.steps}"
        minutes = "" if trainer.max_minutes is None else f" or {trainer.max_minutes:g} minutes"
        size = f"{rollout.rows_per_step} rows x {rollout.group_size} attempts each"
        parts.append(f"{'then ' if parts else ''}{start} steps{minutes} of {config.algorithm.name}, {size}")
    often = f" every {trainer.eval_every}" if trains else ""
    tools = f"; tool calls: {plan.tool_format}" if plan.tool_format else ""
    show(config.model_dump(mode="json"))
    text = f"plan: {', '.join(parts)}, evaluated{often} on {len(plan.test_rows)} held-out rows{tools}"
    console.print(Text(text), soft_wrap=True)
    if settings is not None:
        console.print(Text("\nverl's settings that follow from these:"), soft_wrap=True)
        show(settings)


def _launch(job: Job, size: int) -> None:
    from agent_r1.ranks.launch import launch

    path = job.find_path()
    place = ["--resume" if job.resume else "--run", str(path)]
    code, cause = launch([sys.executable, "-m", "agent_r1.cli", "train", *job.words, *place], size)
    if cause is not None:
        from agent_r1.cli.commands.train import describe_kept

        raise RankError(f"{cause}\n{describe_kept(RunDir(path), gpus=size)}")
    if code:
        raise typer.Exit(code)


def _train(job: Job, plan: Plan, console: Console, crew: Crew) -> None:
    from agent_r1.build.start import require_base
    from agent_r1.cli.commands.train import rank_log, run_training  # imports transformers

    if not crew.ranks.is_main:
        directory = RunDir(crew.ranks.broadcast(Path()))
        _write_to(rank_log(directory, crew))
    else:
        if not job.resume:
            require_base(job.config)
        directory = job.open(console)
        crew.ranks.broadcast(directory.path)
    crew.run = directory.path
    run_training(job.config, plan, directory, console, resume=job.resume, crew=crew)


def _write_to(log: Path) -> None:
    """Send everything that this process and its libraries print to a file."""
    stream = log.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = stream


@contextmanager
def joined(console: Console) -> Iterator[Crew]:
    """Become one of the ranks if torchrun, srun or our launcher started this process as one of several.

    Rank 0 prints; the others are silent, and their errors reach the user through rank 0.
    """
    place = place_of_rank(os.environ)
    if place is not None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
    if place is None or place.size == 1:
        yield Crew()
        return

    from agent_r1.ranks.rank_crew import RankCrew

    crew, screen = RankCrew(place), sys.stderr
    console.quiet = place.rank > 0
    crew.watch.report = lambda text: _report(crew, text, screen)
    try:
        yield crew
    except BaseException as error:
        _leave(crew, error, screen)
        raise
    crew.watch.stop(seconds=crew.watch.limit)


def _join_group(crew: RankCrew, job: Job) -> None:
    """Connect the ranks and check that all of them are about to do the same."""
    from agent_r1.build.models.device import model_device
    from agent_r1.build.recipe import code_digest
    from agent_r1.build.task import named_code

    if getattr(job.config.engine, "device", None) is not None:
        raise ConfigError("engine.device works with one rank: of several, each samples on its own GPU. Leave it out")
    crew.connect(on_gpu=model_device(job.config).type == "cuda")
    settings = job.config.model_dump(exclude={"recipe"})  # `recipe` is a path, which may differ between hosts
    facts = {**present_versions(), **flatten(settings)}
    facts["code of the recipe"] = code_digest(named_code(job.config), recipe=job.config.recipe)
    del facts["python"]  # may differ
    crew.check_same({**facts, "step to continue from": job.done})


def _leave(crew: RankCrew, error: BaseException, screen: Any) -> None:
    """End this rank after an error: find the cause, and let one rank report it. Returns if this rank should raise the
    error."""
    from agent_r1.ranks.rank_crew import error_line, is_lost_peer
    from agent_r1.ranks.watch import GRACE_SECONDS, claims_report, is_reported, posted_failure, wait_for

    watch, is_main = crew.watch, crew.place.rank == 0
    if isinstance(error, Interrupted | typer.Exit | SystemExit):  # all ranks end together
        watch.stop(seconds=watch.limit)
        if not is_main:  # the exit code of rank 0 counts
            raise SystemExit(0) from None
        return
    is_consequence = is_lost_peer(error)
    cause = wait_for(lambda: posted_failure(watch.store), watch.limit + 5) if is_consequence else None
    if cause is None:
        cause = str(error) if isinstance(error, RankError) else watch.fail(f"failed: {error_line(error)}")
    if not is_main:
        traceback.print_exception(error)  # into the log of this rank
        if not wait_for(lambda: is_reported(watch.store), 2 * GRACE_SECONDS) and claims_report(watch.store):
            _report(crew, cause, screen)
        else:
            watch.stop(seconds=GRACE_SECONDS)
        raise SystemExit(1) from None
    reports = claims_report(watch.store)
    watch.stop(seconds=GRACE_SECONDS)
    if not reports:
        raise SystemExit(1) from None
    if is_consequence or isinstance(error, RankError):
        raise RankError(_with_kept(crew, cause)) from None


def _report(crew: RankCrew, text: str, screen: Any) -> None:
    terminal = Terminal(file=screen)
    terminal.show_cursor()  # a live display may have hidden it
    terminal.print(Text.assemble(("error:", "bold red"), f" {_with_kept(crew, text)}"), soft_wrap=True)


def _with_kept(crew: RankCrew, text: str) -> str:
    if crew.run is None or "continue with:" in text:
        return text
    from agent_r1.cli.commands.train import describe_kept

    return f"{text}\n{describe_kept(RunDir(crew.run))}"
