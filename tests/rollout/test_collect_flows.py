"""Flows of one's own that play in an env: it sees no ground truth, is always closed, and what it answers is checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.flows.budgets import EpisodeLimit
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase, flow_class
from agent_r1.types import Action, Observation, StopReason, TaskRow, ToolCallRecord, Trajectory, Transition
from tests.chatml import collector, row, tokenizer

DOCS = Path(__file__).parents[2] / "docs"
ROW = row(reward_model={"ground_truth": 42})


class World(AgentEnv):
    """Ends on "stop"; writes down what it was shown and how often it was closed."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.closed = 0

    async def reset(self, row: TaskRow) -> Observation:
        self.shown.append(row.ground_truth)
        return Observation(messages=row.prompt)

    async def step(self, action: Action) -> Transition:
        return Transition(terminated=action.text == "stop", observation=Observation(text="on"), feedback="on")

    async def close(self) -> None:
        self.closed += 1


class Knowing(World):
    sees_ground_truth = True


class Once(AgentFlowBase):
    """One action."""

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row) as (env, observation):
            transition = await episode.step(env, await episode.act(observation))
            return transition.stop


def played(flow: type[AgentFlowBase], env: World, said: str = "stop", **limits: Any) -> Trajectory:
    engine = ScriptedEngine(lambda call: said, tokenizer=tokenizer())
    [group] = asyncio.run(collector(engine, make_flow=lambda _: flow(lambda _: env), **limits)([ROW], seed=0))
    return group.trajectories[0]


@pytest.mark.parametrize(("env", "shown"), [(World(), None), (Knowing(), 42)])
def test_an_env_is_shown_the_ground_truth_only_if_it_says_so_and_is_closed_once(env: World, shown: Any) -> None:
    assert played(Once, env).stop is StopReason.ANSWERED
    assert (env.shown, env.closed) == ([shown], 1)


class Breaks(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row):
            raise KeyError("flow bug")


class Waits(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row):
            await asyncio.Event().wait()
        raise AssertionError


class Endless(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row) as (env, observation):
            while True:
                await episode.step(env, await episode.act(observation))


@pytest.mark.parametrize(
    ("flow", "stop"),
    [(Breaks, StopReason.ERROR), (Waits, StopReason.TIMEOUT), (Endless, StopReason.MAX_STEPS)],
)
def test_the_env_is_closed_however_the_flow_ends(flow: type[AgentFlowBase], stop: StopReason) -> None:
    env = World()
    assert played(flow, env, episode_seconds=0.1 if flow is Waits else 20).stop is stop
    assert env.closed == 1


def odd(**methods: Callable[..., Any]) -> World:
    """A world with some methods of its own."""

    def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
        async def method(self: World, *args: Any) -> Any:
            return function(*args)

        return method

    made: World = type("Odd", (World,), {name: as_method(function) for name, function in methods.items()})()
    return made


@pytest.mark.parametrize(
    ("env", "error"),
    [
        (odd(reset=lambda row: 1 / 0), "ZeroDivisionError: division by zero"),
        (odd(reset=lambda row: row.prompt), "Odd.reset returned list"),
        (odd(step=lambda action: {"reward": 1}), "Odd.step returned dict"),
        (odd(step=lambda action: Transition(observation="on")), "Transition.observation"),  # type: ignore[arg-type]
    ],
)
def test_an_env_that_fails_or_answers_oddly_is_named_and_closed(env: World, error: str) -> None:
    trajectory = played(Once, env)
    assert trajectory.stop is StopReason.ERROR
    assert error in (trajectory.error or "")
    assert env.closed == 1


def test_an_env_that_cannot_be_closed_does_not_change_how_the_flow_ended() -> None:
    assert played(Once, odd(close=lambda: 1 / 0)).stop is StopReason.ANSWERED


def test_what_is_observed_twice_of_one_step_adds_up() -> None:
    call = ToolCallRecord(name="look", arguments={}, result="", text_span=(0, 1))

    class Twice(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await episode.act(Observation(messages=row.prompt))
            first = Transition(terminated=True, reward=0.5, feedback="one", calls=(call,), info={"a": 1, "b": 1})
            episode.observe(first, seconds=1.5)
            episode.observe(Transition(terminated=True, reward=0.25), seconds=0.5)  # says nothing: no empty line
            episode.observe(Transition(terminated=True, feedback="two", calls=(call,), info={"b": 2}), seconds=1.0)
            return StopReason.ANSWERED

    [step] = played(Twice, World()).steps
    assert (step.reward, step.env_seconds, step.feedback) == (0.75, 3.0, "one\ntwo")
    assert (len(step.calls), step.info) == (2, {"a": 1, "b": 2})


def test_a_flow_that_gives_up_is_named() -> None:
    class GivesUp(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            return StopReason.ERROR

    assert played(GivesUp, World()).error == "GivesUp.run returned StopReason.ERROR"


@pytest.mark.parametrize(("room", "steps"), [(10, 0), (2048, 1)])
def test_an_episode_knows_the_budget_that_ended_it_even_before_anything_was_sampled(room: int, steps: int) -> None:
    engine = ScriptedEngine(lambda call: "on", tokenizer=tokenizer())
    collect = collector(engine, make_flow=lambda _: Endless(lambda _: World()), max_context_tokens=room, max_steps=1)
    episode = collect.episode(Episode, "e", 0)
    trajectory = asyncio.run(collect.play(ROW, episode))
    assert len(trajectory.steps) == steps
    assert episode.limit is not None
    assert episode.limit.stop is (StopReason.MAX_STEPS if steps else StopReason.MAX_TOKENS)
    assert trajectory.stop is (episode.limit.stop if steps else StopReason.ERROR)
    assert engine.released == ["e"]


def run_page(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": f"page_{page.removesuffix('.md').replace('-', '_')}"}
    text = (DOCS / page).read_text(encoding="utf-8")
    for body in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(body, page, "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "flow"),
    [("context.md", "two_moves"), ("write-a-flow.md", "second_try"), ("write-a-flow.md", "planner_and_worker")],
)
def test_the_flows_that_the_pages_show_keep_the_ground_truth_and_close_what_they_open(page: str, flow: str) -> None:
    run_page(page)
    env = World()
    assert played(flow_class(flow), env).stop is StopReason.ANSWERED
    assert env.closed == len(env.shown) > 0
    assert set(env.shown) == {None}


@pytest.mark.parametrize(("said", "rewards"), [("ok", [0.1, 0.0]), ("x" * 40, [0.0, 0.0, 0.0, 0.0, 0.0])])
def test_the_page_about_flows_shows_how_to_stay_within_the_limits(said: str, rewards: list[float]) -> None:
    run_page("write-a-flow.md")
    trajectory = played(flow_class("short_drafts"), World(), said=said)
    assert trajectory.stop is StopReason.ANSWERED
    assert [step.reward for step in trajectory.steps] == rewards


def play_with(engine: ScriptedEngine, flow: type[AgentFlowBase], **limits: Any) -> Trajectory:
    played = collector(engine, make_flow=lambda _: flow(lambda _: World()), **limits)
    [group] = asyncio.run(played([ROW], seed=0))
    return group.trajectories[0]


def test_the_page_about_flows_shows_two_drafts_at_once() -> None:
    engine = ScriptedEngine(["a long draft", "short", "last"], tokenizer=tokenizer(), delay=0.01)
    run_page("write-a-flow.md")
    trajectory = play_with(engine, flow_class("two_drafts"))
    first, second, last = trajectory.steps
    assert [step.action_text for step in trajectory.steps] == ["a long draft", "short", "last"]
    assert first.prompt_ids == second.prompt_ids
    assert last.prompt_ids[: len(second.prompt_ids + second.response_ids)] == second.prompt_ids + second.response_ids
    assert len({call.sampling.seed for call in engine.calls}) == 3  # equal prompts draw different noise


def test_calls_that_run_count_against_the_budget() -> None:
    class Greedy(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            asked = Observation(messages=row.prompt)
            await asyncio.gather(*(episode.respond(asked) for _ in range(3)), return_exceptions=True)
            return StopReason.ANSWERED

    engine = ScriptedEngine(["a", "b", "c"], tokenizer=tokenizer(), delay=0.05)
    trajectory = play_with(engine, Greedy, max_steps=2)
    assert len(trajectory.steps) == 2
    assert trajectory.stop is StopReason.MAX_STEPS


class Careful(AgentFlowBase):
    """Acts until something goes wrong, and calls that an answer."""

    catches: type[BaseException] = Exception

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        try:
            while True:
                await episode.act(Observation(messages=row.prompt))
        except self.catches:
            return StopReason.ANSWERED


class Determined(Careful):
    """Catches everything."""

    catches = BaseException


class Grouped(AgentFlowBase):
    """Acts in a task of a TaskGroup, which wraps whatever its tasks raise."""

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async def role() -> None:
            while True:
                await episode.act(Observation(messages=row.prompt))

        async with asyncio.TaskGroup() as roles:
            roles.create_task(role())
        return StopReason.ANSWERED


@pytest.mark.parametrize("flow", [Careful, Determined, Grouped])
@pytest.mark.parametrize(
    ("limits", "stop"),
    [({"max_steps": 2}, StopReason.MAX_STEPS), ({"max_response_tokens": 1}, StopReason.MAX_TOKENS)],
    ids=["steps", "tokens"],
)
def test_a_flow_cannot_turn_a_limit_into_an_answer(
    flow: type[AgentFlowBase], limits: dict[str, Any], stop: StopReason
) -> None:
    assert played(flow, World(), **limits).stop is stop


def test_a_flow_that_catches_a_limit_before_anything_was_sampled_has_failed_with_that_limit() -> None:
    trajectory = played(Determined, World(), max_context_tokens=10)
    assert trajectory.stop is StopReason.ERROR
    assert re.fullmatch(
        r"nothing was sampled: the prompt has \d+ tokens, max_context_tokens is 10", trajectory.error or ""
    )


def test_a_flow_may_catch_a_limit_and_go_on_with_a_shorter_conversation() -> None:
    class Branches(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            try:
                await episode.act(Observation(text="long " * 100))
            except EpisodeLimit:
                await episode.act(Observation(text="short"))
            return StopReason.ANSWERED

    trajectory = played(Branches, World(), max_context_tokens=100)
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.ANSWERED, 1)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_steps": 2}, "max_steps is 2"),
        ({"max_response_tokens": 3}, "a response was cut at 3 tokens, max_response_tokens is 3"),
        (
            {"max_context_tokens": 24},
            r"a response was cut at \d tokens after a prompt of \d+, max_context_tokens is 24",
        ),
        ({"max_context_tokens": 9}, r"the prompt has \d+ tokens, max_context_tokens is 9"),
    ],
)
def test_the_limit_that_ended_an_episode_is_named_with_its_value(limits: dict[str, Any], reason: str) -> None:
    engine = ScriptedEngine(lambda call: "on and on", tokenizer=tokenizer())
    collect = collector(engine, make_flow=lambda _: Endless(lambda _: World()), **limits)
    episode = collect.episode(Episode, "e", 0)
    asyncio.run(collect.play(ROW, episode))
    assert re.fullmatch(reason, str(episode.limit))
