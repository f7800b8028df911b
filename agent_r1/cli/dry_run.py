"""Output of `--dry-run`: the resolved settings as YAML, and the plan in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from agent_r1.config import RunConfig

if TYPE_CHECKING:
    from agent_r1.build.plan import Plan


def print_training_plan(
    config: RunConfig, plan: Plan, console: Console, *, done: int | None = None, settings: dict[str, Any] | None = None
) -> None:
    """`done` is the step of the checkpoint that training continues from, `settings` are verl's settings."""
    rollout, trainer = config.rollout, config.trainer
    if done is not None:
        start = f"after step {done}, {trainer.steps - done} more"
    else:
        imitates = config.sft.demos is not None or config.sft.trajectories is not None
        start = f"{_warm_start(config)}, then {trainer.steps}" if imitates else f"{trainer.steps}"
    minutes = "" if trainer.max_minutes is None else f" or {trainer.max_minutes:g} minutes"
    text = (
        f"{start} steps{minutes} of {config.algorithm.name}, "
        f"{rollout.rows_per_step} rows x {rollout.group_size} attempts each, evaluated every {trainer.eval_every}"
    )
    _print(config, plan, text, console)
    if settings is not None:
        console.print(Text("\nverl's settings that follow from these:"), soft_wrap=True)
        console.print(Syntax(yaml.safe_dump(settings), "yaml", background_color="default"), soft_wrap=True)


def print_warm_start_plan(config: RunConfig, plan: Plan, console: Console) -> None:
    _print(config, plan, f"{_warm_start(config)}, evaluated", console)


def _warm_start(config: RunConfig) -> str:
    sft = config.sft
    if sft.demos is not None:
        what = f"at most {sft.count} demonstrations"
    else:
        what = f"the trajectories of {sft.trajectories} with a reward of at least {sft.min_reward:g}"
    return f"warm start of {sft.epochs} epochs on {what}"


def _print(config: RunConfig, plan: Plan, text: str, console: Console) -> None:
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Syntax(settings, "yaml", background_color="default"), soft_wrap=True)
    tools = f"; tool calls: {plan.tool_format}" if plan.tool_format else ""
    console.print(Text(f"plan: {text} on {len(plan.test_rows)} held-out rows{tools}"), soft_wrap=True)
