"""`agent-r1 check`: play a task without a model and say whether it can be learned as configured.

Three agents play through the real flow, environment, tools and reward: one replays the demonstrations, one says
nothing, one makes random calls and says random words. What they earn shows most mistakes in a task before any training.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.build.collectors import train_collector
from agent_r1.build.models.load import find_picture_format, load_tokenizer
from agent_r1.build.models.source import as_directory
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model, load_demos, play_demos
from agent_r1.cli.log import logging_to
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import DataError
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.rollout.collect import Collector, most_common_failure
from agent_r1.runs.outcomes import is_success
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Group, TaskRow, ToolCallRecord, Trajectory

Agent = Callable[[str], str]  # prompt -> response

DEMOS = "demonstrations"
MUCH_BY_CHANCE = 0.1  # a random agent that succeeds more often than this deserves a warning
CALLS_MADE = 0.7  # the share of calls among the turns of the random agent; the rest is text, which may end an episode


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one agent did."""

    agent: str
    episodes: list[Trajectory]
    success_reward: float

    @property
    def rewards(self) -> list[float]:
        return [0.0 if each.stop.is_failure else each.total_reward for each in self.episodes]

    @property
    def successes(self) -> int:
        return sum(is_success(each, self.success_reward) for each in self.episodes)

    @property
    def success(self) -> float:
        return self.successes / len(self.episodes)

    @property
    def calls(self) -> list[ToolCallRecord]:
        return [call for each in self.episodes for step in each.steps for call in step.calls]

    @property
    def failures(self) -> list[Trajectory]:
        return [each for each in self.episodes if each.stop.is_failure]


@dataclass
class Findings:
    errors: list[str] = field(default_factory=list)  # the task cannot be learned as configured
    warnings: list[str] = field(default_factory=list)


def run_check(config: RunConfig, plan: Plan, console: Console, *, rows: int) -> bool:
    """Return whether the task can be learned as configured, as far as playing it shows."""
    with logging_to(Path(os.devnull)):  # failures are summed up below
        work = plan.task.run(_check(config, plan, console, rows))
        return interruptible(work, config, console, lambda: "nothing was written")


async def _check(config: RunConfig, plan: Plan, console: Console, count: int) -> bool:
    found = Findings()
    directory = as_directory(str(base_model(config)))
    tokenizer = load_tokenizer(config, directory)
    pictures = find_picture_format(config, directory, tokenizer)
    renderer = Renderer(tokenizer, template_kwargs=config.model.template_kwargs, pictures=pictures)
    played = await _play_demos(config, plan, renderer, count, found)
    collector = replace(train_collector(config, plan.task, renderer, ScriptedEngine([])), group_size=1)
    rows = plan.train_rows[:count]
    agents: dict[str, Agent] = {
        "empty": lambda prompt: "",
        "random": _RandomAgent(config.seed, _make_env(collector, rows[0])),
    }
    for name, respond in agents.items():
        groups = await replace(collector, sampler=_player(respond, renderer))(rows, seed=config.seed)
        played.append(await _score(name, groups, plan))
    _judge(played, config, found)
    _judge_rows(plan, found)
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


async def _play_demos(config: RunConfig, plan: Plan, renderer: Renderer, count: int, found: Findings) -> list[Played]:
    if config.sft.demos is None:
        return []
    few = config.model_copy(update={"sft": config.sft.model_copy(update={"count": min(count, config.sft.count)})})
    try:
        demos = load_demos(few)[:count]
        episodes = await play_demos(few, plan.task, renderer, demos, found.warnings.append)
    except DataError as error:
        found.errors.append(str(error))
        return []
    rows = [demos[int(episode.trajectory_id.rpartition("#demo")[2])][0] for episode in episodes]
    groups = [Group(row=row, trajectories=[episode]) for row, episode in zip(rows, episodes, strict=True)]
    return [await _score(DEMOS, groups, plan)]


def _player(respond: Agent, renderer: Renderer) -> ScriptedEngine:
    def answer(call: ScriptedCall) -> list[int]:
        words = [token for token in call.prompt_ids if token >= 0]  # others belong to pictures
        return renderer.encode_response(respond(renderer.decode(words)))

    return ScriptedEngine(answer)


def _make_env(collector: Collector, row: TaskRow) -> AgentEnv | None:
    flow = collector.make_flow(row)
    return flow.make_env(row) if isinstance(flow, AgentEnvLoop) else None


async def _score(agent: str, groups: list[Group], plan: Plan) -> Played:
    episodes = [episode for group in await plan.task.scorer(groups) for episode in group.trajectories]
    return Played(agent=agent, episodes=episodes, success_reward=plan.task.success_reward)


class _RandomAgent:
    """Calls a random tool with random arguments of the right types, or says random words.

    Words come from the prompt, so that names of items or commands of a game have a chance.
    """

    def __init__(self, seed: int, env: AgentEnv | None) -> None:
        self._rng = random.Random(f"check:{seed}")
        self._format = env.tool_format if isinstance(env, ToolEnv) else None
        self._tools = [schema["function"] for schema in env.tool_schemas] if isinstance(env, ToolEnv) else []

    def __call__(self, prompt: str) -> str:
        words = re.findall(r"\w+", prompt) or ["nothing"]
        if self._format is not None and self._tools and self._rng.random() < CALLS_MADE:
            tool = self._rng.choice(self._tools)
            properties = tool["parameters"].get("properties", {})
            arguments = {name: self._value(schema, words) for name, schema in properties.items()}
            with suppress(ValueError):  # not every format can write every value
                return self._format.write_call(tool["name"], arguments)
        return self._text(words, 8)

    def _value(self, schema: Mapping[str, Any], words: Sequence[str]) -> Any:
        rng = self._rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                return rng.randrange(100)
            case "number":
                return round(rng.uniform(0, 100), 1)
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return [self._value(schema.get("items", {}), words) for _ in range(rng.randint(1, 3))]
            case "object":
                return {}
        return self._text(words, 3)

    def _text(self, words: Sequence[str], most: int) -> str:
        return " ".join(self._rng.choices(words, k=self._rng.randint(1, most)))


def _judge(played: Sequence[Played], config: RunConfig, found: Findings) -> None:
    wanted = f"task.success_reward={config.task.success_reward:g}"
    for each in played:
        if not each.failures:
            continue
        many = len(each.failures) > config.rollout.max_error_fraction * len(each.episodes)
        cause = " ".join(str(most_common_failure(each.failures)[0]).split())
        line = f"{len(each.failures)} of {len(each.episodes)} episodes of the {each.agent} agent failed: {cause}"
        (found.errors if many else found.warnings).append(line)
    for each in played:
        share = f"{each.successes} of {len(each.episodes)}"
        if each.agent == DEMOS and not each.successes:
            found.errors.append(f"no demonstration earns {wanted}: the highest reward is {max(each.rewards):g}")
        elif each.agent == DEMOS and each.success < 1:
            found.warnings.append(
                f"only {share} demonstrations earn {wanted}. Intended, if they are imperfect on purpose"
            )
        elif each.agent == "empty" and each.successes:
            found.warnings.append(f"saying nothing earns {wanted} in {share} episodes: check the reward")
        elif each.agent == "random" and each.success > MUCH_BY_CHANCE:
            found.warnings.append(f"chance earns {wanted} in {share} episodes: the reward may be too easy to get")
    rewards = {reward for each in played for reward in each.rewards}
    if len(rewards) == 1 and played[0].agent == DEMOS:
        found.errors.append(f"every episode of every agent earned {rewards.pop():g}: there is nothing to learn from")


def _judge_rows(plan: Plan, found: Findings) -> None:
    """Duplicate ids, and test rows that are training rows, are errors wherever rows are read."""
    asked = [_question(row) for row in plan.train_rows]
    repeated = len(asked) - len(set(asked))
    if 2 * repeated > len(asked):
        found.warnings.append(f"{repeated} of {len(asked)} training rows repeat the prompt of another row")
    known = set(asked)
    common = sum(_question(row) in known for row in plan.test_rows if row.prompt)
    if common:
        found.warnings.append(f"{common} of {len(plan.test_rows)} test rows have the prompt of a training row")
    missing = sum(row.ground_truth is None for row in [*plan.train_rows, *plan.test_rows])
    if 0 < missing < len(plan.train_rows) + len(plan.test_rows):
        found.warnings.append(f"{missing} rows have no reward_model.ground_truth, while others do")


def _question(row: TaskRow) -> str:
    return json.dumps([row.prompt, row.env_kwargs], default=str, sort_keys=True)


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
