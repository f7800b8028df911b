"""The rewards of three agents without a model (`players.py`), which reveal most mistakes before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.build.models.load import find_picture_format, load_tokenizer
from agent_r1.build.models.source import as_directory
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model
from agent_r1.config import RunConfig
from agent_r1.doctor.players import (
    DEMOS,
    MUCH_BY_CHANCE,
    Played,
    load_few_demos,
    play_demonstrations,
    play_unskilled,
)
from agent_r1.doctor.quick import row_problems
from agent_r1.errors import DataError
from agent_r1.rollout.collect import most_common_failure
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template


@dataclass
class Findings:
    errors: list[str] = field(default_factory=list)  # the task cannot be learned as configured
    warnings: list[str] = field(default_factory=list)


async def check_task(config: RunConfig, plan: Plan, console: Console, count: int) -> bool:
    """Return whether the task can be learned as configured, as far as playing it shows."""
    found = Findings()
    directory = as_directory(str(base_model(config)))
    tokenizer = load_tokenizer(config, directory)
    pictures = find_picture_format(config, directory, tokenizer)
    renderer = Renderer(tokenizer, template_kwargs=config.model.template_kwargs, pictures=pictures)
    played = []
    try:
        demos = load_few_demos(config, count)
        demonstrated = await play_demonstrations(config, plan, renderer, demos, found.warnings.append)
        played += [] if demonstrated is None else [demonstrated]
    except DataError as error:
        found.errors.append(str(error))
    played += await play_unskilled(config, plan, renderer, plan.train_rows[:count])
    _judge(played, config, found)
    found.warnings += row_problems(plan)
    if plan.task.calls_tools:
        found.warnings += [f"chat template: {problem}" for problem in verify_template(renderer).problems]
    console.print(_table(played))
    console.print(Text("\n".join(_facts(played, config, plan, renderer))), soft_wrap=True)
    for style, kind, lines in (("yellow", "warning", found.warnings), ("bold red", "error", found.errors)):
        for line in lines:
            console.print(Text.assemble((f"{kind}: ", style), line), soft_wrap=True)
    if not (found.errors or found.warnings):
        console.print(Text("no problems found", style="green"))
    return not found.errors


def _judge(played: Sequence[Played], config: RunConfig, found: Findings) -> None:
    wanted = f"task.success_reward={config.task.success_reward:g}"
    for each in played:
        if not each.failures:
            continue
        cause = " ".join(str(most_common_failure(each.failures)[0]).split())
        line = f"{len(each.failures)} of {len(each.episodes)} episodes of the {each.agent} agent failed: {cause}"
        (found.errors if each.fails_often(config) else found.warnings).append(line)
    for each in played:
        share = f"{each.successes} of {len(each.episodes)}"
        if each.agent == DEMOS and not each.successes:
            found.errors.append(f"no demonstration earns {wanted}: the highest reward is {max(each.rewards):g}")
        elif each.agent == DEMOS and each.success < 1:
            found.warnings.append(
                f"only {share} demonstrations earn {wanted}. This is fine if they are imperfect on purpose"
            )
        elif each.agent == "empty" and each.successes:
            found.warnings.append(f"saying nothing earns {wanted} in {share} episodes: check the reward")
        elif each.agent == "random" and each.success > MUCH_BY_CHANCE:
            found.warnings.append(f"chance earns {wanted} in {share} episodes: the reward may be too easy to get")
    rewards = {reward for each in played for reward in each.rewards}
    if len(rewards) == 1 and played[0].agent == DEMOS:
        found.errors.append(f"every episode of every agent earned {rewards.pop():g}: there is nothing to learn from")


def _table(played: Sequence[Played]) -> Table:
    """One column per agent."""
    columns = [_column(each) for each in played]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", *(each.agent for each in played)):
        table.add_column(name)
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return table


def _column(played: Played) -> dict[str, str]:
    failed = [call for call in played.calls if call.error is not None]
    ends = Counter(episode.stop.value for episode in played.episodes)
    return {
        "episodes": str(len(played.episodes)),
        "reward": f"{fmean(played.rewards):.2f} ({min(played.rewards):.3g} to {max(played.rewards):.3g})",
        "success": f"{played.success:.0%}",
        "steps per episode": f"{fmean(len(episode.steps) for episode in played.episodes):.1f}",
        "tool calls": str(len(played.calls)),
        "  failed": str(sum(bool(call.name) for call in failed)),
        "  malformed": str(sum(not call.name for call in failed)),
        "ended": ", ".join(f"{end} {number}" for end, number in ends.most_common()),
    }


def _facts(played: Sequence[Played], config: RunConfig, plan: Plan, renderer: Renderer) -> list[str]:
    lines = [f"rows        {len(plan.train_rows)} for training, {len(plan.test_rows)} held out"]
    first = [len(episode.steps[0].prompt_ids) for each in played for episode in each.episodes if episode.steps]
    if first:
        lines.append(f"prompts     {min(first)} to {max(first)} tokens before the first turn")
    steps = [step for each in played for episode in each.episodes for step in episode.steps if each.agent == DEMOS]
    if steps:
        context = max(len(step.prompt_ids) + len(step.response_ids) for step in steps)
        response = max(len(step.response_ids) for step in steps)
        lines.append(
            f"longest     demonstration {context} of {config.rollout.max_context_tokens} tokens "
            f"(rollout.max_context_tokens), turn {response} of {config.rollout.max_response_tokens} "
            "(rollout.max_response_tokens)"
        )
    if plan.task.calls_tools:
        lines.append(f"tool calls  {template_format(renderer)}")
    return lines
