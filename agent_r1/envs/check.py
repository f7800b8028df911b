"""The contracts of envs and tools as functions: call one in the test of every env and tool you write.

Each raises AssertionError that names the broken rule. They see behaviour only, so they cannot prove an env right. They
find mistakes that would silently spoil a run: randomness, leaks of the answer, history that changes afterwards.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from agent_r1.envs.base import AgentEnv, make_env, merge_env_kwargs, reset_env, step_env
from agent_r1.envs.check_parallel import State, copy_state, find_difference, find_overlapping, interleave_threads
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.guard import explain
from agent_r1.resources import opened
from agent_r1.tools.base import BaseTool, get_tool
from agent_r1.tools.runner import run_tool
from agent_r1.types import Action, Observation, TaskRow, ToolCallRecord

CANARY = "CANARY-7f3a"
CANARY_NUMBER = 70_310_529_641  # the canary for answers that an env may read as a number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Play:
    observations: list[Observation] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ends: list[tuple[bool, str]] = field(default_factory=list)
    calls: list[tuple[ToolCallRecord, ...]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # tool states, before the first step and after the last


async def check_env(env: type[AgentEnv] | Callable[[], AgentEnv], row: TaskRow, actions: Sequence[str]) -> None:
    """Play the same actions in fresh envs, until the actions run out or the env terminates, and check these rules:

    - Observations and transitions are well formed, and an observation does not change after it was returned.
    - `close` may be called at any time, and twice.
    - The row is not changed.
    - The same actions give the same observations, rewards and end.
    - The ground truth (here replaced by a canary) is never shown.
    - Calls of `parallel` tools give the same results when they overlap as when they run in order.

    A class is created with the row's `env_kwargs`; pass a function if it needs more than that. Warns if the class does
    not set `deterministic`.
    """

    def make() -> AgentEnv:
        if not isinstance(env, type):
            return env()
        kwargs = merge_env_kwargs({}, row)  # a copy for each env, as in a run
        kwargs.pop("env_type", None)
        return make_env(env, env.__name__, kwargs)

    unplayed = make()
    await _close_twice(unplayed)  # an episode may fail before its reset

    before = deepcopy(row)
    first, second = [await _play(make, row, actions) for _ in range(2)]
    changed = [name for name in TaskRow.__dataclass_fields__ if getattr(row, name) != getattr(before, name)]
    assert not changed, f"the env changed the {changed[0]} of row {row.row_id!r}; a flow may play it again, so copy it"

    what = f"env is not deterministic for row {row.row_id!r}: same actions, different"
    for index, (one, other) in enumerate(zip(first.observations, second.observations, strict=False)):
        assert one == other, f"{what} observation {index}: {_describe_difference(repr(one), repr(other))}"
    assert first.rewards == second.rewards, f"{what} rewards {first.rewards} and {second.rewards}"
    assert first.ends == second.ends, f"{what} ends {first.ends} and {second.ends}"

    # The canary is put within reach even of an env that must not read it: if it looks, it is caught.
    for index, observation in enumerate((await _play(make, _with_canary(row), actions, hide=False)).observations):
        text = repr(observation.messages or observation.text)
        assert find_canary(text) is None, f"observation {index} shows the answer to the policy: {text[:200]}"

    if isinstance(unplayed, ToolEnv) and (tools := find_overlapping(first.calls, unplayed.parallel_tools)):
        problem = await _find_lost_update(make, row, actions, first)
        assert problem is None, (
            f"overlapping calls of {', '.join(map(repr, tools))} behave differently: {problem}. Remove parallel=True, "
            "or protect what the calls change with a lock"
        )
    _advise(type(unplayed))


async def _find_lost_update(
    make: Callable[[], AgentEnv], row: TaskRow, actions: Sequence[str], in_order: _Play
) -> str | None:
    try:
        with interleave_threads():
            overlapping = await _play(make, row, actions, parallel=True)
    except Exception as error:  # noqa: BLE001 (user code; it did not raise when the calls ran in order)
        return f"{explain(error)} in parallel and nothing in order"
    return find_difference(in_order.calls, overlapping.calls, in_order.states, overlapping.states)


def _advise(cls: type[AgentEnv]) -> None:
    """Ask the author: two equal plays here do not prove that the env plays the same in another process."""
    is_set = any("deterministic" in vars(base) for base in cls.__mro__ if base is not AgentEnv)
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]  # ToolEnv cannot answer for its tools
    if not is_set and not is_ours:
        warnings.warn(
            f"{cls.__name__} gave the same episode twice for the same actions. If it does so in any process, set "
            "`deterministic = True` in the class: its episodes can then be replayed if another episode crashes or "
            "fills their worker process (task.workers). If not, set it to False",
            stacklevel=3,
        )


async def _play(
    make: Callable[[], AgentEnv],
    row: TaskRow,
    actions: Sequence[str],
    *,
    hide: bool = True,
    parallel: bool = False,  # True: let the calls of parallel tools overlap
) -> _Play:
    play, shown = _Play(), list[Observation]()
    env = make()
    if isinstance(env, ToolEnv):
        env.parallel = env.parallel and parallel

    def show(observation: Observation) -> None:
        has_prompt = observation.messages or observation.text or observation.token_ids
        assert has_prompt, f"observation {len(shown)} is empty; the policy needs a prompt"
        shown.append(observation)
        play.observations.append(deepcopy(observation))

    try:
        show(await reset_env(env, row.without_ground_truth() if hide and not env.sees_ground_truth else row))
        json.dumps(env.tool_schemas)
        play.states.append(copy_state(env))
        for index, text in enumerate(actions):
            transition = await step_env(env, Action(text=text, token_ids=[]))
            _check_spans(transition.calls, text, index)
            play.rewards.append(transition.reward)
            play.calls.append(transition.calls)
            play.ends.append((transition.terminated, transition.stop if transition.terminated else ""))
            if transition.observation is None or transition.terminated:
                break
            show(transition.observation)
        play.states.append(copy_state(env))
    finally:
        await _close_twice(env)
    for index, (before, now) in enumerate(zip(play.observations, shown, strict=True)):
        assert before == now, f"observation {index} changed after it was given; hand out a copy of the messages"
    return play


def _check_spans(calls: Sequence[ToolCallRecord], text: str, index: int) -> None:
    for call in calls:
        start, end = call.text_span
        inside = 0 <= start <= end <= len(text)
        assert inside, f"step {index} returned a call at {call.text_span} of a text of {len(text)} characters"


async def _close_twice(env: AgentEnv) -> None:
    for time in ("first", "second"):
        try:
            await env.close()
        except Exception as error:
            raise AssertionError(f"{type(env).__name__}.close failed the {time} time: {error!r}") from error


def _with_canary(row: TaskRow) -> TaskRow:
    """Replace the answer by a canary, also where `extra_info` repeats it as text or a list."""
    canary = canary_like(row.ground_truth)

    def mark(value: Any) -> Any:
        if isinstance(value, str | list) and value == row.ground_truth:
            return canary
        return {key: mark(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value

    return replace(row, reward_model={**row.reward_model, "ground_truth": canary}, extra_info=mark(row.extra_info))


def find_canary(text: str) -> str | None:
    return next((canary for canary in (CANARY, str(CANARY_NUMBER), f"{CANARY_NUMBER:,}") if canary in text), None)


def canary_like(answer: Any) -> Any:
    """Return a canary of the answer's type, so that an env which reads answers can read it."""
    if isinstance(answer, Mapping):
        return {key: canary_like(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return type(answer)(canary_like(value) for value in answer)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return type(answer)(CANARY_NUMBER)
    is_number = isinstance(answer, str) and re.fullmatch(r"\s*-?[\d.,]+\s*", answer)
    return str(CANARY_NUMBER) if is_number else CANARY


def _describe_difference(one: str, other: str) -> str:
    same = (a == b for a, b in zip(one, other, strict=False))
    place = next((index for index, equal in enumerate(same) if not equal), min(len(one), len(other)))
    begin = max(0, place - 60)
    first, second = (f"{'...' if begin else ''}{text[begin : place + 140]}" for text in (one, other))
    return f"from character {place} on: {first} and {second}"


async def check_tool(
    tool: BaseTool,
    arguments: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """Check a tool's schema, and run it on arguments that it should accept; `context` has the values that a row would
    fill in."""
    get_tool(tool)
    name, parameters = tool.name, tool.parameters
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name), f"tool name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -"
    try:
        written = json.dumps(tool.schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the schema of tool {name!r} is not JSON: {error}") from error
    assert '"$ref"' not in written, f"the schema of tool {name!r} uses $ref, which chat templates cannot follow"
    assert isinstance(parameters.get("properties"), Mapping), f"the schema of tool {name!r} has no 'properties'"
    settable = sorted((tool.row_keys.required | tool.row_keys.optional) & set(parameters["properties"]))
    assert not settable, f"the model could set {settable[0]!r} of tool {name!r}, which comes from the row"

    async with opened([tool]):
        outcome = await run_tool(tool, arguments, context or {})
        assert not outcome.refused, f"tool {name!r} refuses the example arguments {dict(arguments)}: {outcome.error}"
        assert outcome.error is None, f"tool {name!r} fails on the example arguments {dict(arguments)}: {outcome.error}"
        unknown = await run_tool(tool, {**arguments, "no_such_argument": 1}, context or {})
        assert unknown.refused, f"tool {name!r} accepts an argument that its schema does not have"
        if deterministic:
            again = await run_tool(tool, arguments, context or {})
            same = (outcome.text, outcome.reward) == (again.text, again.reward)
            assert same, f"tool {name!r} is not deterministic: first {outcome.text[:200]!r}, then {again.text[:200]!r}"
