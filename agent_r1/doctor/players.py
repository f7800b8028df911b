"""Agents that play a task without a model, through its real flow, environment, tools and reward.

One replays the demonstrations, one says nothing, one makes random calls and says random words, and one says the
answer: the ground truth of the row.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from agent_r1.build.collectors import train_collector
from agent_r1.build.plan import Plan
from agent_r1.build.start import load_demos, play_demos
from agent_r1.config import RunConfig
from agent_r1.data.downloads import Report
from agent_r1.data.rows import Demo
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.rollout.collect import Collector, too_many
from agent_r1.runs.outcomes import is_success
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Group, StopReason, TaskRow, ToolCallRecord, Trajectory

Agent = Callable[[str], str]  # prompt -> response

DEMOS = "demonstrations"
MUCH_BY_CHANCE = 0.1  # a random agent that succeeds more often than this deserves a warning
WORDINGS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "Answer: {}")  # of the ground truth
CALLS_MADE = 0.7  # the share of calls among the turns of the random agent; the rest is text, which may end an episode


@dataclass(frozen=True, kw_only=True)
class Played:
    """The episodes of one agent."""

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

    @property
    def is_late(self) -> bool:
        """Whether most episodes did not end in time."""
        return 2 * sum(each.stop is StopReason.TIMEOUT for each in self.episodes) > len(self.episodes)

    def fails_often(self, config: RunConfig) -> bool:
        """Whether a run would stop if as many episodes failed."""
        return too_many(self.failures, self.episodes, config.rollout.max_error_fraction)


def load_few_demos(config: RunConfig, count: int) -> list[Demo]:
    if config.sft.demos is None:
        return []
    sft = config.sft.model_copy(update={"count": min(count, config.sft.count)})
    return load_demos(config.model_copy(update={"sft": sft}))[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The episodes of the agents, for checks to read."""

    config: RunConfig
    plan: Plan
    renderer: Renderer
    rows: Sequence[TaskRow]
    demonstrated: Played | None
    unskilled: list[Played]

    @property
    def played(self) -> list[Played]:
        return [each for each in (self.demonstrated, *self.unskilled) if each is not None]


async def play_demonstrations(
    config: RunConfig, plan: Plan, renderer: Renderer, demos: Sequence[Demo], report: Report
) -> Played | None:
    """None if there are none. Raises DataError for one that cannot be played."""
    if not demos:
        return None
    episodes = await play_demos(config, plan.task, renderer, demos, report)
    rows = [demos[int(episode.trajectory_id.rpartition("#demo")[2])][0] for episode in episodes]
    return await score(
        DEMOS, [Group(row=row, trajectories=[each]) for row, each in zip(rows, episodes, strict=True)], plan
    )


async def play_unskilled(config: RunConfig, plan: Plan, renderer: Renderer, rows: Sequence[TaskRow]) -> list[Played]:
    """Let the empty and the random agent play these rows; only the first one if most episodes do not end in time."""
    played: list[Played] = []
    for name in UNSKILLED:
        if not (played and played[-1].is_late):
            played.append(await score(name, await play(config, plan, renderer, name, rows), plan))
    return played


async def play(config: RunConfig, plan: Plan, renderer: Renderer, name: str, rows: Sequence[TaskRow]) -> list[Group]:
    """Let one of the agents in `UNSKILLED` play each row once. Nothing is scored."""
    collector = silent_collector(config, plan, renderer)
    env = make_env(collector, rows[0])

    @cache
    def agent(session: str) -> Agent:
        """Each episode has its own, so that what one draws does not depend on when others act."""
        return UNSKILLED[name](session, env)

    def respond(call: ScriptedCall) -> list[int]:
        return renderer.encode_response(agent(call.session)(read(renderer, call.prompt_ids)))

    return await replace(collector, sampler=ScriptedEngine(respond))(rows, seed=config.seed)


async def play_answers(
    config: RunConfig, plan: Plan, renderer: Renderer, rows: Sequence[TaskRow]
) -> tuple[str, Played] | None:
    """Answer each row with its ground truth, in the wording that earns most. None if no row has one that is text."""
    collector = silent_collector(config, plan, renderer)
    answers = [(row, text) for row in rows if (text := answer_text(row.ground_truth)) is not None]

    async def say(row: TaskRow, text: str) -> Group:
        engine = ScriptedEngine(lambda call: renderer.encode_response(text))
        [group] = await replace(collector, sampler=engine)([row], seed=config.seed)
        return group

    best: tuple[str, Played] | None = None
    for wording in WORDINGS if answers else ():
        groups = await asyncio.gather(*(say(row, wording.format(text)) for row, text in answers))
        played = await score("answer", list(groups), plan)
        if best is None or (played.success, sum(played.rewards)) > (best[1].success, sum(best[1].rewards)):
            best = wording, played
        if played.success == 1 or played.is_late:
            break
    return best


def answer_text(truth: Any) -> str | None:
    """A ground truth as an agent could say it: the first of several; None if it is more than an answer."""
    if isinstance(truth, str):
        return truth.strip() or None
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return str(truth)
    if isinstance(truth, list | tuple) and truth:
        return answer_text(truth[0])
    if isinstance(truth, Mapping) and len(truth) == 1:
        return answer_text(next(iter(truth.values())))
    return None


def silent_collector(config: RunConfig, plan: Plan, renderer: Renderer) -> Collector:
    return replace(train_collector(config, plan.task, renderer, ScriptedEngine([])), group_size=1)


def make_env(collector: Collector, row: TaskRow) -> AgentEnv | None:
    """The env that will play a row; None if its flow has none."""
    flow = collector.make_flow(row)
    return flow.make_env(row) if isinstance(flow, AgentEnvLoop) else None


async def score(agent: str, groups: list[Group], plan: Plan) -> Played:
    episodes = [episode for group in await plan.task.scorer(groups) for episode in group.trajectories]
    return Played(agent=agent, episodes=episodes, success_reward=plan.task.success_reward)


def read(renderer: Renderer, prompt_ids: Sequence[int]) -> str:
    """The text of a prompt, without its pictures, whose ids are negative."""
    return renderer.decode([token for token in prompt_ids if token >= 0])


class RandomAgent:
    """Calls a random tool with random arguments of the right types, or says random words.

    Words come from the prompt, so that names of items or commands of a game have a chance.
    """

    def __init__(self, seed: int | str, env: AgentEnv | None) -> None:
        self._rng = random.Random(f"check:{seed}")
        self._format = env.tool_format if isinstance(env, ToolEnv) else None
        self._tools = [schema["function"] for schema in env.tool_schemas] if isinstance(env, ToolEnv) else []

    def __call__(self, prompt: str) -> str:
        words = re.findall(r"\w+", prompt) or ["nothing"]
        if self._format is not None and self._tools and self._rng.random() < CALLS_MADE:
            tool = self._rng.choice(self._tools)
            arguments = self.arguments(tool, words)
            with suppress(ValueError):  # not every format can write every value
                return self._format.write_call(tool["name"], arguments)
        return self._text(words, 8)

    def arguments(self, tool: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
        properties = tool["parameters"].get("properties", {})
        return {name: self._value(schema, words) for name, schema in properties.items()}

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


UNSKILLED: dict[str, Callable[[str, AgentEnv | None], Agent]] = {
    "empty": lambda session, env: lambda prompt: "",
    "random": RandomAgent,
}
