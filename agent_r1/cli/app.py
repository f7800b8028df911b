"""The command line: agent-r1 train | sft | collect | eval | compare | chat | bench.

Parses arguments, loads the config, calls `build/` and `train/`, and turns the errors we raise on purpose into one clear
line. Slow imports wait for the command that needs them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from omegaconf.errors import OmegaConfBaseException
from rich.syntax import Syntax
from rich.text import Text
from typer.core import TyperGroup

from agent_r1 import __version__
from agent_r1.cli.bench_command import app as bench
from agent_r1.cli.completion import complete_recipe, complete_run, complete_setting
from agent_r1.cli.data_command import app as data
from agent_r1.cli.search_command import app as search
from agent_r1.cli.terminal import Terminal, exit_despite_threads, steady_streams, tell
from agent_r1.config import RunConfig, bundled_recipes, load_config, parse_config, recipe_name
from agent_r1.config.layers import plain, read_overrides
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.places import started_here

if TYPE_CHECKING:
    from agent_r1.build.plan import Plan


class Stopped(Exception):
    """Ctrl-C where nothing had begun that could be kept."""


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # which typer would swallow, without a word to the user
            raise Stopped from None


app = typer.Typer(
    cls=Commands,
    help="Train language-model agents end to end with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # all commands below inherit it
)
console = Terminal()
ON_DEVICE = "model.device="  # a run may go on elsewhere than it began
ASKING, ASKING_FORM = ("task.test_split=", "data.path="), "task.test_split, data.path"  # which rows

RECIPE_HELP = f"A bundled recipe ({', '.join(bundled_recipes())}), a YAML file, or a folder with base.yaml."
RecipeArg = Annotated[str, typer.Argument(help=RECIPE_HELP, autocompletion=complete_recipe)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, as section.key=value.", autocompletion=complete_setting),
]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory; by default a new one under runs/.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and the plan, then stop.")]
RunArg = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)]

app.add_typer(bench, name="bench", no_args_is_help=True)
app.add_typer(data, name="data", no_args_is_help=True)
app.add_typer(search, name="search", no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"agent-r1 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("init")
def init_command(
    directory: Annotated[Path, typer.Argument(help="Where to write it: a directory that is new or empty.")],
) -> None:
    """Write a small task of your own to start from: tools, rows, reward, demonstrations, tests."""
    from agent_r1.cli.commands.init import write_task

    write_task(directory, console)


@app.command("check")
def check_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to play with each agent.")] = 32,
) -> None:
    """Play a task without a model: do demonstrations earn the reward, and do silence and chance not?"""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.check import run_check

    with _signals_told():
        if not run_check(config, build_plan(config), console, rows=rows):
            raise typer.Exit(1)


@app.command("train")
def train_command(
    recipe: Annotated[str | None, typer.Argument(help=RECIPE_HELP, autocompletion=complete_recipe)] = None,
    overrides: Overrides = None,
    run: RunOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            autocompletion=complete_run,
            help="Continue the run in this directory; trainer.steps=N extends it, trainer.max_minutes=N limits it.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train an agent: warm start where the recipe has one, then reinforcement learning."""
    if resume is not None:
        if run is not None:
            raise ConfigError(f"--resume {resume} says where the run is; give no --run with it")
        # Without a recipe, the first setting stands in its place.
        _resume(resume, [word for word in (recipe, *(overrides or ())) if word is not None], dry_run=dry_run)
        return
    if recipe is None:
        raise ConfigError(
            f"which recipe? Choose one of {', '.join(bundled_recipes())}, or give a YAML file or a folder with "
            "base.yaml in it"
        )
    config = load_config(recipe, overrides or ())  # before torch is imported, so that a misspelt key fails at once

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.train import run_training
    from agent_r1.runs.run_dir import RunDir

    plan = build_plan(config)  # finds what is wrong before a run directory or a model exists
    if dry_run:
        _print_plan(config, _training_plan(config, plan))
        return
    directory = RunDir.create(run or _new_run_path(config), config)
    console.print(Text(f"run directory {directory}"), soft_wrap=True)
    with _signals_told():
        run_training(config, plan, directory, console, resume=False)


def _resume(path: Path, changes: list[str], *, dry_run: bool) -> None:
    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.train import run_training
    from agent_r1.runs.reader import list_checkpoints
    from agent_r1.runs.run_dir import RunDir

    directory = RunDir.open(path)
    allowed, form = ("trainer.steps=", "trainer.max_minutes=", ON_DEVICE), "trainer.steps=N, trainer.max_minutes=N"
    config = _with_overrides(parse_config(directory.settings), changes, only=allowed, form=form)
    saved = list_checkpoints(directory.checkpoints)
    done = saved[-1][0] if saved else None
    if changes and done is not None and config.trainer.steps < done:
        raise ConfigError(f"trainer.steps={config.trainer.steps}: {path} has done {done} steps already; give more")
    plan = build_plan(config, resume=done is not None)
    if dry_run:
        _print_plan(config, _training_plan(config, plan, done))
        return
    if changes:
        with directory.locked():
            directory.update_config(config)
    with _signals_told():
        run_training(config, plan, directory, console, resume=True)


@app.command("sft")
def sft_command(recipe: RecipeArg, overrides: Overrides = None, run: RunOption = None, dry_run: DryRun = False) -> None:
    """Supervised warm start on the recipe's demonstrations or on a run's own trajectories."""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.sft import run_sft
    from agent_r1.runs.run_dir import RunDir

    if config.sft.demos is None and config.sft.trajectories is None:
        raise ConfigError(f"{recipe} has nothing to imitate: set sft.demos (a function) or sft.trajectories (a run)")
    plan = build_plan(config)  # finds what is wrong before a run directory or a model exists
    if dry_run:
        _print_plan(
            config, f"{_warm_start_plan(config)}, evaluated on {len(plan.test_rows)} held-out rows{_tool_plan(plan)}"
        )
        return
    directory = RunDir.create(run or _new_run_path(config, "-sft"), config)
    with _signals_told():
        run_sft(config, plan.task, directory, console, given=overrides or ())


@app.command("collect")
def collect_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Sample from this model or run, not from where training starts.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Training rows to play, from the first; by default all.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes per row; by default rollout.group_size.")] = None,
    run: RunOption = None,
) -> None:
    """Play training rows without training, and keep the episodes for sft.trajectories."""
    given = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_task, check_beginning
    from agent_r1.cli.commands.collect import collect_config, run_collect
    from agent_r1.runs.run_dir import RunDir

    config = collect_config(given, model=model, rows=rows, samples=samples)
    task = build_task(config)  # as always: what is wrong is found before there is a run directory
    check_beginning(config)
    chosen = task.train_rows()
    directory = RunDir.create(run or _new_run_path(config, "-collect"), config)
    console.print(Text(f"run directory {directory}"), soft_wrap=True)
    with _signals_told():
        run_collect(config, task, chosen, directory, console, given=overrides or ())


@app.command("eval")
def eval_command(
    run: RunArg,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model instead of the run's newest checkpoint.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="The split whose rows are asked; by default task.test_split.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Keep the result as RUN/evals/NAME.json.")] = None,
) -> None:
    """Evaluate a run's newest checkpoint on a panel of rows: mean, standard error, pass@k; kept for compare."""
    from agent_r1.cli.commands.eval import run_eval
    from agent_r1.runs.run_dir import RunDir

    directory = RunDir.open(run)
    allowed, form = ("eval.", *ASKING, ON_DEVICE), f"eval.key=value, {ASKING_FORM}"
    config = _with_overrides(parse_config(directory.settings), overrides or [], only=allowed, form=form)
    if split is not None:
        if any(word.startswith("task.test_split=") for word in overrides or ()):
            raise ConfigError(f"--split {split} and task.test_split= say the same thing: give one of them")
        config = config.model_copy(update={"task": config.task.model_copy(update={"test_split": split})})
    with _signals_told():
        run_eval(config, directory, console, model=model, name=name)


@app.command("compare")
def compare_command(
    places: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, or files that eval wrote; the first is the base.", autocompletion=complete_run
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(help="Evaluations made while training: first, last or a step; one, or one each: 0,last."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Evaluations made by eval: RUN/evals/NAME.json of each run.")] = None,
    measure: Annotated[
        str, typer.Option(help="What the verdict is on: success, reward or reward_part/NAME.")
    ] = "success",
) -> None:
    """Is B better than A? Their difference on the same rows, with a 95 % interval, and the rows won and lost."""
    from agent_r1.runs.compare import find_sides, show_comparisons

    show_comparisons(find_sides(places, step=step, name=name), console, measure=measure)


@app.command("chat")
def chat_command(
    run: RunArg,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(help="The test row whose world the agent lives in.")] = 0,
    ask: Annotated[str | None, typer.Option(help="Ask one question and end; '' asks the row's own.")] = None,
) -> None:
    """Talk to a trained agent and watch its tool calls."""
    from agent_r1.cli.commands.chat import ask_once, chat_loop, open_chat
    from agent_r1.cli.log import logging_to
    from agent_r1.guard import runner
    from agent_r1.runs.run_dir import RunDir

    sampling = ("eval.temperature=", "eval.top_p=", "eval.top_k=")
    allowed, form = (*sampling, *ASKING, ON_DEVICE), f"eval.temperature, eval.top_p, eval.top_k, {ASKING_FORM}"
    said = [word for word in overrides or [] if "=" not in word]
    if said:
        raise ConfigError(f"{' '.join(said)!r} is no setting; to ask it, write --ask {shlex.quote(' '.join(said))}")
    directory = RunDir.open(run)
    config = _with_overrides(parse_config(directory.settings), overrides or [], only=allowed, form=form)
    with logging_to(directory.log_file):
        chat = open_chat(config, str(run))
        chat.enter(row)
        if ask is not None:
            with runner() as running:
                running.run(ask_once(chat, ask or chat.question, console))
        else:
            chat_loop(chat, console)


def _new_run_path(config: RunConfig, suffix: str = "") -> Path:
    from agent_r1.runs.run_dir import new_run_path

    return new_run_path(recipe_name(config.recipe), seed=config.seed, suffix=suffix)


def _with_overrides(config: RunConfig, overrides: Sequence[str], *, only: tuple[str, ...], form: str) -> RunConfig:
    """An existing run is what its config.json says; only settings that begin with one of `only` may be changed."""
    for item in overrides:
        if not item.startswith(only):
            raise ConfigError(f"{item!r}: of an existing run only {form} and model.device can be changed here")
    try:
        changes = plain(read_overrides(overrides), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot make settings of {' '.join(overrides)}: {error}") from error
    tree = config.model_dump()
    for section, values in changes.items():
        tree[section] |= values
    return parse_config(tree)


def _training_plan(config: RunConfig, plan: Plan, done: int | None = None) -> str:
    """`done` is the step of the checkpoint to go on from, where there is one."""
    rollout, trainer = config.rollout, config.trainer
    imitates = config.sft.demos is not None or config.sft.trajectories is not None
    if done is not None:
        start = f"after step {done}, {trainer.steps - done} more"
    else:
        start = f"{_warm_start_plan(config)}, then {trainer.steps}" if imitates else f"{trainer.steps}"
    minutes = "" if trainer.max_minutes is None else f" or {trainer.max_minutes:g} minutes"
    return (
        f"{start} steps{minutes} of {config.algorithm.name}, "
        f"{rollout.rows_per_step} rows x {rollout.group_size} attempts each, "
        f"evaluated every {trainer.eval_every} on {len(plan.test_rows)} held-out rows{_tool_plan(plan)}"
    )


def _tool_plan(plan: Plan) -> str:
    return f"; tool calls: {plan.tool_format}" if plan.tool_format else ""


def _warm_start_plan(config: RunConfig) -> str:
    sft = config.sft
    if sft.demos is not None:
        what = f"at most {sft.count} demonstrations"
    else:
        what = f"the trajectories of {sft.trajectories} with a reward of at least {sft.min_reward:g}"
    return f"warm start of {sft.epochs} epochs on {what}"


def _print_plan(config: RunConfig, plan: str) -> None:
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Syntax(settings, "yaml", background_color="default"), soft_wrap=True)
    console.print(Text(f"plan: {plan}"), soft_wrap=True)


@contextmanager
def _signals_told() -> Iterator[None]:
    """What a signal stopped ends with one line about what was kept, and with the signal's exit code."""
    from agent_r1.cli.signals import Interrupted

    try:
        yield
    except Interrupted as stop:
        tell(Text(f"stopped by {stop}; {stop.kept}"))
        raise typer.Exit(stop.exit_code) from None


def command_line() -> None:
    """Run the command in `sys.argv`; always ends in SystemExit."""
    try:
        with started_here():
            app()
    except (AgentR1Error, OSError) as error:
        tell(Text.assemble(("error:", "bold red"), f" {error}"))
        sys.exit(2)
    except (KeyboardInterrupt, Stopped):
        tell(Text("stopped by SIGINT"))
        sys.exit(130)


def main() -> None:
    """The program `agent-r1`."""
    steady_streams()
    code = 1  # exit code of an unexpected error
    try:
        command_line()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        exit_despite_threads(code)


if __name__ == "__main__":
    main()
