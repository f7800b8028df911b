"""The command line: parse arguments, load the config, run the command, and print errors as one clear line.

The config is read before anything slow is imported, so that a misspelt word is answered at once. Each command's work is
in `commands/`, imported when the command runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from agent_r1 import __version__
from agent_r1.cli.bench_command import bench_command
from agent_r1.cli.commands.data import app as data
from agent_r1.cli.commands.doctor import COMMANDS
from agent_r1.cli.commands.publish import export_command, push_command
from agent_r1.cli.commands.serve import ApiKey, serve_command
from agent_r1.cli.completion import complete_recipe, complete_run, complete_setting
from agent_r1.cli.dry_run import print_warm_start_plan
from agent_r1.cli.help_panels import arrange
from agent_r1.cli.search_command import app as search
from agent_r1.cli.terminal import Terminal, exit_despite_threads, report_signals, steady_streams, tell
from agent_r1.config import RunConfig, bundled_recipes, change_config, load_config, parse_config, recipe_name
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
# The settings of an existing run that a command may change.
EVAL_SETTINGS = ("eval", "task.test_split", "data.path", "model.device")
CHAT_SETTINGS = ("eval.temperature", "eval.top_p", "eval.top_k", "task.test_split", "data.path", "model.device")

RECIPE_HELP = f"A bundled recipe ({', '.join(bundled_recipes())}), a YAML file, or a folder with base.yaml."
RecipeArg = Annotated[str, typer.Argument(help=RECIPE_HELP, autocompletion=complete_recipe)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, as section.key=value.", autocompletion=complete_setting),
]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory; by default a new one under runs/.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and the plan, then stop.")]
RunArg = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)]

app.command("bench", no_args_is_help=True)(bench_command)
app.add_typer(data, name="data", no_args_is_help=True)
app.add_typer(search, name="search", no_args_is_help=True)
app.command("serve")(serve_command)
for name, command in COMMANDS.items():
    app.command(name)(command)


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
    directory: Annotated[Path, typer.Argument(help="The directory to write; it must be new or empty.")],
) -> None:
    """Write a small task to start from: tools, rows, reward, demonstrations, tests."""
    from agent_r1.cli.commands.init import write_task

    write_task(directory, console)


@app.command("check")
def check_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to play with each agent.")] = 32,
) -> None:
    """Play a task without a model: demonstrations should earn the reward, empty and random agents should not."""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.commands.check import run_check

    with report_signals():
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
    may_continue: Annotated[
        bool, typer.Option("--continue", help="Continue the run in --run DIR if there is one, or start it.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, one per GPU (or all on the CPU).")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train an agent: warm start from demonstrations if the recipe has any, then reinforcement learning."""
    from agent_r1.cli.train_command import joined, new_job, resumed_job, run_job

    with report_signals(), joined(console) as crew:
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


@app.command("plan")
def plan_command(  # noqa: PLR0913 (each is an option)
    recipe: RecipeArg,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100 or b200.")] = "h200",
    model: Annotated[str | None, typer.Option(help="A size such as 8b, or a model; default: the recipe's.")] = None,
    like: Annotated[
        Path | None, typer.Option(help="A run whose episodes are typical.", autocompletion=complete_run)
    ] = None,
    tool_seconds: Annotated[float, typer.Option(min=0, help="Mean time that tools take in a step.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, speed and GPU hours of a run from measured constants, and recommend a setup."""
    from agent_r1.plan.report import run_plan

    options: dict[str, Any] = {"gpus": gpus, "gpu": gpu, "model": model, "like": like, "tool_seconds": tool_seconds}
    run_plan(load_config(recipe, overrides or ()), console, **options, as_json=as_json)


@app.command("sft")
def sft_command(recipe: RecipeArg, overrides: Overrides = None, run: RunOption = None, dry_run: DryRun = False) -> None:
    """Supervised warm start on the recipe's demonstrations or on a run's own trajectories."""
    config = load_config(recipe, overrides or ())

    from agent_r1.build.plan import build_plan
    from agent_r1.runs.run_dir import RunDir

    if config.sft.demos is None and config.sft.trajectories is None:
        raise ConfigError(f"{recipe} has nothing to imitate: set sft.demos (a function) or sft.trajectories (a run)")
    plan = build_plan(config)  # finds mistakes before a run directory or a model exists
    if dry_run:
        print_warm_start_plan(config, plan, console)
        return

    from agent_r1.cli.commands.sft import run_sft

    directory = RunDir.create(run or _new_run_path(config, "-sft"), config)
    console.print(Text(f"run directory {directory}"), soft_wrap=True)
    with report_signals():
        run_sft(config, plan.task, directory, console, given=overrides or ())


@app.command("collect")
def collect_command(
    recipe: RecipeArg,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Sample from this model or run instead of the model that training starts from.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of training rows to play, from the first (default: all).")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes per row; by default rollout.group_size.")] = None,
    run: RunOption = None,
) -> None:
    """Play training rows without training and keep the episodes, for sft.trajectories to imitate."""
    given = load_config(recipe, overrides or ())

    from agent_r1.build.checks import check_start
    from agent_r1.build.task import build_task
    from agent_r1.cli.commands.collect import collect_config, run_collect
    from agent_r1.runs.run_dir import RunDir

    config = collect_config(given, model=model, rows=rows, samples=samples)
    task = build_task(config)  # finds mistakes before a run directory exists
    check_start(config)
    chosen = task.train_rows()
    directory = RunDir.create(run or _new_run_path(config, "-collect"), config)
    console.print(Text(f"run directory {directory}"), soft_wrap=True)
    with report_signals():
        run_collect(config, task, chosen, directory, console, given=overrides or ())


@app.command("eval")
def eval_command(
    run: RunArg,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model instead of the run's newest checkpoint.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Evaluate on this split; by default task.test_split.")] = None,
    name: Annotated[str | None, typer.Option(help="Keep the result as RUN/evals/NAME.json.")] = None,
) -> None:
    """Evaluate a run's newest checkpoint on held-out rows: mean, standard error, pass@k. Stored for `compare`."""
    from agent_r1.runs.run_dir import RunDir

    directory = RunDir.open(run)
    config = change_config(parse_config(directory.settings), overrides or [], EVAL_SETTINGS)
    if split is not None:
        if any(word.startswith("task.test_split=") for word in overrides or ()):
            raise ConfigError(f"--split {split} and task.test_split= set the same thing: give one of them")
        config = config.model_copy(update={"task": config.task.model_copy(update={"test_split": split})})

    from agent_r1.cli.commands.eval import run_eval

    with report_signals():
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
        typer.Option(
            help="Evaluation made while training: first, last or a step. One for all runs, or one each: 0,last."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Evaluations made by eval: RUN/evals/NAME.json of each run.")] = None,
    measure: Annotated[str, typer.Option(help="Compare by success, reward or reward_part/NAME.")] = "success",
) -> None:
    """Is B better than A? Their difference on the same rows, with a 95 % interval, and the rows won and lost."""
    from agent_r1.runs.compare import find_sides, show_comparisons

    show_comparisons(find_sides(places, step=step, name=name), console, measure=measure)


@app.command("view")
def view_command(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Run directories, or folders of them; by default runs/.", autocompletion=complete_run),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any but localhost requires a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8200,
    export: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file and exit.")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Maximum number of episodes in that file.")] = 300,
) -> None:
    """Look at runs in the browser: curves, episodes, tokens. Live while they train."""
    from agent_r1.serve.view.commands import run_view

    run_view(places, console, host=host, port=port, export=export, episodes=episodes)


@app.command("show")
def show_command(
    run: RunArg,
    episode: Annotated[str | None, typer.Argument(help="FILE/N as listed, such as eval_000010/0, or an id.")] = None,
    find: Annotated[list[str] | None, typer.Option("--find", help="Filter: step=4, stop=error, text=word ...")] = None,
    sort: Annotated[str, typer.Option(help="Sort by step, reward, calls ...; prefix with - for descending.")] = "-step",
    limit: Annotated[int, typer.Option(min=1, help="Episodes to list.")] = 15,
    tokens: Annotated[str | None, typer.Option(help="Colour its tokens: logprob, advantage, ratio or entropy.")] = None,
) -> None:
    """Look at a run, or one of its episodes, in the terminal."""
    from agent_r1.serve.view.commands import run_show

    run_show(run, episode, console, find=find or [], sort=sort, limit=limit, tokens=tokens)


@app.command("chat")
def chat_command(  # noqa: PLR0913 (the options of the command)
    run: Annotated[Path | None, typer.Argument(help="A run directory.", autocompletion=complete_run)] = None,
    overrides: Overrides = None,
    row: Annotated[int | None, typer.Option(help="Index of the test row to load; default: 0.")] = None,
    ask: Annotated[str | None, typer.Option(help="Ask one question and exit; '' asks the row's own question.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Show a picture with the first question; repeatable.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Instead of a run: the address of any OpenAI-compatible server.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: the model; default: the server's first.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a trained agent and watch its tool calls; with --url, to a server."""
    if url is not None:
        from agent_r1.cli.commands.remote_chat import check_options, run_remote_chat

        check_options(run=run, overrides=overrides or (), row=row)
        if image:
            raise ConfigError("--image has no effect with --url: pictures can be shown to the agent of a run only")
        run_remote_chat(url, console, model=model, key=api_key, ask=ask)
        return
    if run is None:
        raise ConfigError("which run? Name a run directory, or a server with --url")
    if model is not None:
        raise ConfigError(f"--model {model} has no effect without --url: the run has its model")

    from agent_r1.runs.run_dir import RunDir

    if words := " ".join(word for word in overrides or [] if "=" not in word):
        raise ConfigError(f"{words!r} is not a setting. To ask it, write --ask {shlex.quote(words)}")
    directory = RunDir.open(run)
    config = change_config(parse_config(directory.settings), overrides or [], CHAT_SETTINGS)

    from agent_r1.cli.commands.chat import run_chat

    run_chat(config, directory, console, row=row or 0, ask=ask, images=image or [])


app.command("export")(export_command)
app.command("push")(push_command)
arrange(app)


def _new_run_path(config: RunConfig, suffix: str = "") -> Path:
    from agent_r1.runs.run_dir import new_run_path

    return new_run_path(recipe_name(config.recipe), seed=config.seed, suffix=suffix)


def command_line() -> None:
    """Run the command in `sys.argv`; always ends in SystemExit."""
    try:
        with StartedHere():
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
