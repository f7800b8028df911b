"""The contracts of envs and tools as functions: run one in the test of every env and tool you write.

Each raises AssertionError naming the broken rule. They see behaviour only, so they cannot prove an env right; they find
the mistakes that would poison a run without a word: chance, leaks of the answer, history that changes afterwards.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from agent_r1.envs.base import AgentEnv, make_env, merge_env_kwargs, reset_env, step_env
from agent_r1.envs.check_parallel import State, different_results, different_states, overlapping, plain, taking_turns
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.guard import explain
from agent_r1.resources import opened
from agent_r1.tools.base import BaseTool, get_tool
from agent_r1.tools.runner import run_tool
from agent_r1.types import Action, Observation, TaskRow, ToolCallRecord, Transition

CANARY = "CANARY-7f3a"
SHOWN_BEFORE, SHOWN_AFTER = 60, 140  # characters around the first difference
CANARY_NUMBER = 70_310_529_641  # for answers that an env may want to read as a number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Play:
    observations: list[Observation]
    rewards: list[float]
    ends: list[tuple[bool, str]]
    # Not compared between sequential plays: seconds differ, and equal objects of the row may not compare equal.
    calls: list[tuple[ToolCallRecord, ...]] = field(compare=False)
    states: list[State] = field(compare=False)  # of tools: before the first step and after the last


async def check_env(env: type[AgentEnv] | Callable[[], AgentEnv], row: TaskRow, actions: Sequence[str]) -> None:
    """Play the same actions in fresh envs, until the actions run out or the env terminates, and check the rules below.

    A class is created with the row's `env_kwargs`; pass a function if it needs more than that.

    - Observations and transitions are well formed, and an observation does not change after it was returned.
    - The row is not changed, and the ground truth (here replaced by a canary) is never shown.
    - The same actions give the same observations, rewards and end.
    - Calls of `parallel` tools give the same results when they overlap as when they run in order.
    - `close` may be called at any time, and twice.

    Warns if the class does not set `deterministic`.
    """
    make = _maker(env, row) if isinstance(env, type) else env
    before = deepcopy(row)
    first, second = [await _play(make, row, actions) for _ in range(2)]
    changed = [name for name in TaskRow.__dataclass_fields__ if getattr(row, name) != getattr(before, name)]
    assert not changed, f"the env changed the {changed[0]} of row {row.row_id!r}; a flow may play it again, so copy it"
    for index, (one, other) in enumerate(zip(first.observations, second.observations, strict=False)):
        assert one == other, (
            f"env is not deterministic for row {row.row_id!r}: same actions, different observation {index}: "
            f"{_difference(one, other)}"
        )
    assert first == second, (
        f"env is not deterministic for row {row.row_id!r}: same actions, "
        f"but rewards {first.rewards} and {second.rewards}, ends {first.ends} and {second.ends}"
    )
    # The canary is put within reach even of an env that has no business reading it: if it looks, it is caught.
    for index, observation in enumerate((await _play(make, _marked(row), actions, hide=False)).observations):
        text = _shown(observation)
        seen = CANARY in text or str(CANARY_NUMBER) in text
        assert not seen, f"observation {index} shows the answer to the policy: {text[:200]}"
    unplayed = make()
    await _close_twice(unplayed)  # an episode may fail before its reset
    if isinstance(unplayed, ToolEnv) and (named := overlapping(first.calls, unplayed.parallel_tools)):
        await _check_parallel(make, row, actions, first, named)
    _advise(type(unplayed))


async def _check_parallel(
    make: Callable[[], AgentEnv], row: TaskRow, actions: Sequence[str], in_order: _Play, tools: list[str]
) -> None:
    try:
        with taking_turns():
            at_once = await _play(make, row, actions, parallel=True)
    except Exception as error:
        problem: str | None = f"{explain(error)} in parallel and nothing in order"
        raise AssertionError(_lost(tools, problem)) from error
    problem = different_results(in_order.calls, at_once.calls)
    if problem is None:
        before, after = zip(in_order.states, at_once.states, strict=True)
        problem = different_states(before, after)
    assert problem is None, _lost(tools, problem)


def _lost(tools: list[str], problem: str | None) -> str:
    which = f"tool {tools[0]!r} is" if len(tools) == 1 else f"tools {', '.join(map(repr, tools))} are"
    return (
        f"{which} declared parallel, but overlapping calls behave differently: {problem}. Remove parallel=True, or "
        "protect what the calls change with a lock"
    )


def _advise(cls: type[AgentEnv]) -> None:
    """Ask the author: two equal plays here do not prove that the env plays the same in another process."""
    is_said = any("deterministic" in vars(base) for base in cls.__mro__ if base is not AgentEnv)
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]  # ToolEnv cannot answer for its tools
    if not is_said and not is_ours:
        warnings.warn(
            f"{cls.__name__} gave the same episode twice for the same actions. If it does so in any process, set "
            "`deterministic = True` in the class: its episodes can then be replayed if another episode crashes or "
            "fills their worker process (task.workers). If not, set it to False",
            stacklevel=3,
        )


def _maker(env: type[AgentEnv], row: TaskRow) -> Callable[[], AgentEnv]:
    def make() -> AgentEnv:
        kwargs = merge_env_kwargs({}, row)  # for each env its own, as in a run
        kwargs.pop("env_type", None)
        return make_env(env, env.__name__, kwargs)

    return make


async def check_tool(
    tool: BaseTool,
    arguments: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """Check a tool's schema, and run it on arguments that it should take; `context` is what a row would fill in."""
    get_tool(tool)
    name, parameters = tool.name, tool.parameters
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name), f"tool name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -"
    try:
        written = json.dumps(tool.schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the schema of tool {name!r} is not JSON: {error}") from error
    assert '"$ref"' not in written, f"the schema of tool {name!r} uses $ref, which chat templates cannot follow"
    assert isinstance(parameters.get("properties"), Mapping), f"the schema of tool {name!r} has no 'properties'"
    hidden = sorted((tool.row_keys.required | tool.row_keys.optional) & set(parameters["properties"]))
    assert not hidden, f"the model of tool {name!r} could set {hidden[0]!r}, which is the row's to fill in"

    async with opened([tool]):
        await _check_calls(tool, arguments, context or {}, deterministic=deterministic)


async def _check_calls(
    tool: BaseTool, arguments: Mapping[str, Any], context: Mapping[str, Any], *, deterministic: bool
) -> None:
    name = tool.name
    outcome = await run_tool(tool, arguments, context)
    assert not outcome.refused, f"tool {name!r} refuses the example arguments {dict(arguments)}: {outcome.error}"
    assert outcome.error is None, f"tool {name!r} fails on the example arguments {dict(arguments)}: {outcome.error}"
    unknown = await run_tool(tool, {**arguments, "no_such_argument": 1}, context)
    assert unknown.refused, f"tool {name!r} accepts an argument that its schema does not have"
    if deterministic:
        again = await run_tool(tool, arguments, context)
        same = (outcome.text, outcome.reward) == (again.text, again.reward)
        assert same, f"tool {name!r} is not deterministic: first {outcome.text[:200]!r}, then {again.text[:200]!r}"


async def _play(
    make_env: Callable[[], AgentEnv],
    row: TaskRow,
    actions: Sequence[str],
    *,
    hide: bool = True,
    parallel: bool = False,  # True: let the calls of parallel tools overlap
) -> _Play:
    play = _Play(observations=[], rewards=[], ends=[], calls=[], states=[])
    given: list[Observation] = []
    env = make_env()
    if isinstance(env, ToolEnv):
        env.parallel = env.parallel and parallel
    try:
        given.append(await reset_env(env, row.without_ground_truth() if hide and not env.sees_ground_truth else row))
        play.observations.append(deepcopy(given[-1]))
        json.dumps(env.tool_schemas)
        play.states.append(_state(env))
        for index, text in enumerate(actions):
            transition = await step_env(env, Action(text=text, token_ids=[]))
            _check_spans(transition, text, index)
            play.rewards.append(transition.reward)
            play.calls.append(transition.calls)
            play.ends.append((transition.terminated, transition.stop if transition.terminated else ""))
            if transition.observation is None or transition.terminated:
                break
            given.append(transition.observation)
            play.observations.append(deepcopy(transition.observation))
        play.states.append(_state(env))
    finally:
        await _close_twice(env)
    for index, (before, now) in enumerate(zip(play.observations, given, strict=True)):
        assert before == now, f"observation {index} changed after it was given; hand out a copy of the messages"
    return play


def _state(env: AgentEnv) -> State:
    state: State = plain(env.state) if isinstance(env, ToolEnv) else {}
    return state


def _marked(row: TaskRow) -> TaskRow:
    """The row with a canary for its answer, also where `extra_info` repeats it as text or a list."""
    canary = _canary_like(row.ground_truth)

    def mark(value: Any) -> Any:
        if isinstance(value, str | list) and value == row.ground_truth:
            return canary
        return {key: mark(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value

    return replace(row, reward_model={**row.reward_model, "ground_truth": canary}, extra_info=mark(row.extra_info))


def _canary_like(answer: Any) -> Any:
    """A canary of the answer's own kind, so that an env which reads answers can read it."""
    if isinstance(answer, Mapping):
        return {key: _canary_like(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return type(answer)(_canary_like(value) for value in answer)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return type(answer)(CANARY_NUMBER)
    is_number = isinstance(answer, str) and re.fullmatch(r"\s*-?[\d.,]+\s*", answer)
    return str(CANARY_NUMBER) if is_number else CANARY


def _check_spans(transition: Transition, text: str, index: int) -> None:
    for call in transition.calls:
        start, end = call.text_span
        inside = 0 <= start <= end <= len(text)
        assert inside, f"step {index} returned a call at {call.text_span} of a text of {len(text)} characters"


async def _close_twice(env: AgentEnv) -> None:
    for time in ("first", "second"):
        try:
            await env.close()
        except Exception as error:
            raise AssertionError(f"{type(env).__name__}.close failed the {time} time: {error!r}") from error


def _difference(one: Observation, other: Observation) -> str:
    """Describe where two observations first differ, with the text of both."""
    pairs = enumerate(zip_longest(_parts(one), _parts(other), fillvalue="(nothing)"))
    index, (first, second) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    same = (a == b for a, b in zip(first, second, strict=False))
    place = next((place for place, equal in enumerate(same) if not equal), min(len(first), len(second)))
    begin = max(0, place - SHOWN_BEFORE)
    texts = [f"{'...' if begin else ''}{text[begin : place + SHOWN_AFTER]}" for text in (first, second)]
    what = f"message {index}, " if one.messages is not None else ""
    return f"{what}from character {place} on: {texts[0]} and {texts[1]}"


def _parts(observation: Observation) -> list[str]:
    if observation.messages is not None:
        return list(map(repr, observation.messages))
    return [observation.text if observation.text is not None else repr(observation.token_ids)]


def _shown(observation: Observation) -> str:
    """What the policy gets to read; token ids cannot be read here."""
    return repr(observation.messages) if observation.messages is not None else observation.text or ""
