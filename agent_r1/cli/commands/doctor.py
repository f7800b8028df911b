"""`agent-r1 doctor`, `rescore` and `replay`: what is wrong with a recipe, and with a run. `doctor/` does the work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from agent_r1.cli.completion import complete_recipe, complete_run, complete_setting
from agent_r1.cli.terminal import Terminal, report_signals
from agent_r1.config import RunConfig, load_config, parse_config
from agent_r1.errors import AgentR1Error

if TYPE_CHECKING:
    from agent_r1.doctor.finding import Finding

console = Terminal()


def doctor_command(
    recipe: Annotated[str, typer.Argument(help="A recipe, as for train.", autocompletion=complete_recipe)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change.", autocompletion=complete_setting)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run only the checks that play no episodes; takes seconds.")
    ] = False,
    engine: Annotated[bool, typer.Option("--engine", help="Also sample a few rows with the model.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows to play with each agent.")] = 16,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Longest time for an episode, and for code that blocks all of them.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what makes runs fail or learn nothing, before you train. Exit code 1 if anything is red."""
    from agent_r1.doctor.finding import Level

    found: list[Finding] = []

    def show() -> None:
        from agent_r1.doctor.tables import show_findings

        if as_json:
            console.print(json.dumps([asdict(each) for each in found], indent=1), soft_wrap=True, markup=False)
        else:
            show_findings(found, console)

    def end(place: str) -> None:
        """Report from another thread, while user code blocks this one for good."""
        from agent_r1.doctor.environment import blocked

        found.append(blocked(place, seconds))
        show()
        sys.stdout.flush()
        os._exit(1)

    with report_signals():
        _examine(found, recipe, overrides or [], Tiers(quick, engine, rows, seconds, end), Terminal(quiet=as_json))
    show()
    if any(each.level is Level.RED for each in found):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Which checks to run, and how long they may take."""

    quick: bool
    engine: bool
    rows: int
    seconds: float
    end: Callable[[str], None]  # called if user code blocks everything for so long


def _examine(found: list[Finding], recipe: str, overrides: Sequence[str], tiers: Tiers, screen: Terminal) -> None:
    """Run the checks and add what they find; one that makes the next ones pointless is the last."""
    from agent_r1.build.plan import build_plan
    from agent_r1.doctor.finding import refused

    stage = "settings"
    try:
        config = load_config(recipe, overrides)
        stage = "task"
        plan = build_plan(config)

        from agent_r1.cli.commands.train import seeded_start
        from agent_r1.cli.signals import interruptible
        from agent_r1.doctor.environment import check_environment
        from agent_r1.doctor.quick import prepare, run_quick
        from agent_r1.doctor.sampled import check_engine
        from agent_r1.runs.run_log import logging_to

        stage = "model"
        parts = prepare(config, plan)
        found += run_quick(parts)
        stage = "environment"

        async def play() -> None:
            nonlocal stage
            limits: dict[str, Any] = {"seconds": tiers.seconds, "end": tiers.end}
            if not tiers.quick:
                found.extend(await check_environment(config, plan, parts.renderer, tiers.rows, **limits))
            if tiers.engine:
                stage = "engine"
                start = await seeded_start(config, plan.task, screen)
                found.extend(await check_engine(config, plan, start, tiers.rows, **limits))

        if tiers.engine or not tiers.quick:
            with logging_to(Path(os.devnull)):  # failures are summed up in the findings
                interruptible(plan.task.run(play()), config, screen, lambda: "nothing was written")
    except AgentR1Error as error:
        found.append(refused(stage, error))


def rescore_command(
    run: Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)],
    reward: Annotated[str, typer.Option(help="module.function, looked up beside the recipe first.")],
    step: Annotated[int | None, typer.Option(help="Only the episodes of this training step.")] = None,
    largest: Annotated[int, typer.Option(min=0, help="Episodes to list: those that change most.")] = 10,
    allow_services: Annotated[
        bool, typer.Option("--allow-services", help="Allow rewards that call services, such as a judge.")
    ] = False,
    trust_records: Annotated[
        bool, typer.Option("--trust-records", help="Skip checking that the run's own reward gives the stored scores.")
    ] = False,
) -> None:
    """Score the stored episodes of a run with another reward, and show what would have changed."""
    from agent_r1.runs.reader import RunReader

    directory = RunReader.open(run)
    config = parse_config(directory.settings)

    from agent_r1.doctor.rescore import rescore, with_reward
    from agent_r1.doctor.tables import show_rescored

    other = with_reward(config, reward)
    options = {"step": step, "allow_services": allow_services, "trust_records": trust_records}
    found = _run(rescore(directory, other, **options), config)  # type: ignore[arg-type]
    show_rescored(found, console, reward=other.task.reward, largest=largest)


def _run(work: Any, config: RunConfig) -> Any:
    from agent_r1.cli.signals import interruptible
    from agent_r1.runs.run_log import logging_to

    with report_signals(), logging_to(Path(os.devnull)):
        return interruptible(work, config, console, lambda: "nothing was written")


def replay_command(
    run: Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)],
    first: Annotated[int, typer.Option("--from", min=1, help="The first step to train again.")],
    into: Annotated[Path | None, typer.Option("--run", help="Run directory; by default a new one under runs/.")] = None,
) -> None:
    """Train again from the stored episodes of a run, without sampling, and compare the weights. Exit code 1 if they
    differ, or if the run has no checkpoint to compare with."""
    from agent_r1.runs.reader import RunReader

    directory = RunReader.open(run)
    config = parse_config(directory.settings)

    from agent_r1.build.plan import build_plan
    from agent_r1.cli.display import Display
    from agent_r1.config import recipe_name
    from agent_r1.doctor.replay_run import compare_versions, plan_replay, replay
    from agent_r1.doctor.tables import show_comparisons
    from agent_r1.runs.run_dir import RunDir, new_run_path

    plan = build_plan(config, resume=True)
    route = plan_replay(directory, config, plan, first=first)  # finds what is missing before a directory exists
    changed = "; ".join(compare_versions(directory, config))
    if changed:
        console.print(Text(f"warning: weights may differ, because of: {changed}", style="yellow"), soft_wrap=True)
    made = RunDir.create(into or new_run_path(recipe_name(config.recipe), seed=config.seed, suffix="-replay"), config)
    console.print(f"steps {route.start + 1} to {route.last} of {directory}, into {made}", soft_wrap=True, markup=False)
    with made.locked(), Display(console, "replaying", total=route.last, done=route.start) as display:
        found = _run(replay(route, directory, config, plan, made, display), config)
    show_comparisons(found, console)
    if not found or not all(each.is_equal for each in found):
        raise typer.Exit(1)


COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor_command,
    "rescore": rescore_command,
    "replay": replay_command,
}
