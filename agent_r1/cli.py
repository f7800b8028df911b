"""The command line: agent-r1 train | sft | eval | chat.

Parses arguments, loads the config, calls `run/`, and turns the errors we raise on purpose into one clear line.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from agent_r1.config import RunConfig, bundled_recipes, load_config, parse_config
from agent_r1.errors import AgentR1Error, ConfigError

app = typer.Typer(
    help="Train language-model agents end to end with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

RecipeArg = Annotated[str, typer.Argument(help=f"A bundled recipe ({', '.join(bundled_recipes())}) or a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, as section.key=value.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory; by default a new one under runs/.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and the plan, then stop.")]
RunArg = Annotated[Path, typer.Argument(help="A run directory.")]


@app.command("train")
def train_command(
    recipe: Annotated[str | None, typer.Argument(help="A bundled recipe, or a YAML file.")] = None,
    overrides: Overrides = None,
    run: RunOption = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue the run in this directory.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Train an agent: warm start where the recipe has one, then reinforcement learning."""
    from agent_r1.run.build import build_plan
    from agent_r1.run.commands import run_training
    from agent_r1.run.run_dir import RunDir, new_run_path

    if resume is not None:
        if run is not None or overrides or recipe is not None:
            raise ConfigError("--resume continues a run as it was described; give no recipe, settings or --run with it")
        directory = RunDir.open(resume)
        run_training(directory.config, build_plan(directory.config), directory, console, resume=True)
        return
    if recipe is None:
        raise ConfigError(f"which recipe? Choose one of {', '.join(bundled_recipes())}, or give a YAML file")
    config = load_config(recipe, overrides or ())
    plan = build_plan(config)  # finds what is wrong before a run directory or a model exists
    if dry_run:
        _print_plan(config)
        return
    directory = RunDir.create(run or new_run_path(config), config)
    console.print(f"run directory {directory.path}", highlight=False, soft_wrap=True)
    run_training(config, plan, directory, console, resume=False)


@app.command("sft")
def sft_command(recipe: RecipeArg, overrides: Overrides = None, run: RunOption = None, dry_run: DryRun = False) -> None:
    """Supervised warm start on the recipe's demonstrations or on a run's own trajectories."""
    from agent_r1.run.commands import run_sft
    from agent_r1.run.run_dir import RunDir, new_run_path

    config = load_config(recipe, overrides or ())
    if config.sft.demos is None and config.sft.trajectories is None:
        raise ConfigError(f"{recipe} has nothing to imitate: set sft.demos (a function) or sft.trajectories (a run)")
    if dry_run:
        _print_plan(config)
        return
    directory = RunDir.create(run or new_run_path(config).with_name(f"{new_run_path(config).name}-sft"), config)
    run_sft(config, directory, console)


@app.command("eval")
def eval_command(
    run: RunArg,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model instead of the run's newest checkpoint.")
    ] = None,
) -> None:
    """Evaluate a run's newest checkpoint on held-out rows: mean, standard error, pass@k."""
    from agent_r1.run.commands import run_eval
    from agent_r1.run.run_dir import RunDir

    config = _with_overrides(RunDir.open(run).config, overrides or [], allowed="eval")
    run_eval(config, model or str(run), console, config.eval)


@app.command("chat")
def chat_command(
    run: RunArg,
    row: Annotated[int, typer.Option(help="The test row whose world the agent lives in.")] = 0,
    ask: Annotated[str | None, typer.Option(help="Ask one question and end; '' asks the row's own.")] = None,
) -> None:
    """Talk to a trained agent and watch its tool calls."""
    from agent_r1.run.chat import answer, chat_loop, open_chat
    from agent_r1.run.run_dir import RunDir

    chat = open_chat(RunDir.open(run).config, str(run))
    chat.enter(row)
    if ask is not None:
        asyncio.run(answer(chat, ask or chat.question, console))
    else:
        asyncio.run(chat_loop(chat, console))


def _with_overrides(config: RunConfig, overrides: list[str], *, allowed: str) -> RunConfig:
    """A finished run's settings are history; only those of the section at hand may be changed."""
    from omegaconf import OmegaConf

    for item in overrides:
        if not item.startswith(f"{allowed}.") or "=" not in item:
            raise ConfigError(f"{item!r}: only {allowed}.key=value can be changed here")
    changes = OmegaConf.to_container(OmegaConf.from_dotlist(overrides))
    tree = config.model_dump()
    tree[allowed] |= changes.get(allowed, {}) if isinstance(changes, dict) else {}
    return parse_config(tree)


def _print_plan(config: RunConfig) -> None:
    from omegaconf import OmegaConf

    console.print(Syntax(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())), "yaml", background_color="default"))
    rollout, trainer, sft = config.rollout, config.trainer, config.sft
    warm = f"warm start on {sft.count} demonstrations x {sft.epochs} epochs, then " if sft.demos else ""
    episodes = f"{rollout.rows_per_step} rows x {rollout.group_size} attempts"
    console.print(
        f"plan: {warm}{trainer.steps} steps of {config.algorithm.name}, {episodes} each, evaluated every "
        f"{trainer.eval_every} on {config.eval.rows or 'all'} held-out rows",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    from agent_r1.run.commands import Interrupted

    try:
        app(standalone_mode=True)
    except (AgentR1Error, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted as stop:
        Console(stderr=True).print(
            f"stopped by {stop}; saved. Continue with: agent-r1 train --resume RUN", highlight=False
        )
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    main()
