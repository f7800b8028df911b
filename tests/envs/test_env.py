"""The env registry, settings of recipe and row, and the values that envs may return."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.envs.base import AgentEnv, env_class, make_env, merge_env_kwargs
from agent_r1.errors import ConfigError
from agent_r1.types import Action, Observation, StopReason, TaskRow, ToolCallRecord, Transition
from tests.chatml import collector, renderer, row, tokenizer

if TYPE_CHECKING:
    from decimal import Decimal


@AgentEnv.register("count_for_tests")
class CountEnv(AgentEnv):
    def __init__(self, *, limit: int = 2) -> None:
        self.limit = limit

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(text="0")

    async def step(self, action: Action) -> Transition:
        return Transition(terminated=True)


def test_a_registered_env_is_created_by_name_with_its_settings() -> None:
    env = make_env(env_class("count_for_tests"), "count_for_tests", {"limit": 5})
    assert isinstance(env, CountEnv)
    assert env.limit == 5
    assert env.tool_schemas == []
    assert not env.sees_ground_truth


def test_unknown_names_and_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"unknown env 'count_for_test'. Did you mean 'count_for_tests'?"):
        env_class("count_for_test")
    with pytest.raises(ConfigError, match=r"env 'count_for_tests' does not accept these env_kwargs: .*'limt'.*'limit'"):
        make_env(CountEnv, "count_for_tests", {"limt": 5})


class Set(CountEnv):
    def __init__(
        self,
        *,
        hints: bool = False,
        turns: int = 1,
        share: float = 0.5,
        name: str | None = None,
        seed: int = None,  # type: ignore[assignment]  # noqa: RUF013 (as people write it)
        either: int | list[int] = 1,
        any_kind: Any = None,
        **more: int,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hints", "maybe", "true or false, not str 'maybe'"),
        ("hints", 1, "true or false, not int 1"),
        ("turns", "abc", "an integer, not str 'abc'"),
        ("turns", True, "an integer, not bool True"),
        ("turns", 2.0, "an integer, not float 2.0"),
        ("turns", None, "an integer, not NoneType None"),
        ("share", "half", "a number, not str 'half'"),
        ("share", False, "a number, not bool False"),
        ("name", 7, "a string or null, not int 7"),
        ("name", ["a"], r"a string or null, not list \['a'\]"),
        ("seed", "x", "an integer or null, not str 'x'"),
    ],
)
def test_a_setting_that_does_not_match_its_annotation_is_a_config_error(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env 'task\.Set': env_kwargs\.{key} of Set must be {expected}$"):
        make_env(Set, "task.Set", {key: value})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"hints": True, "turns": 2, "share": 1, "name": None, "seed": None},
        {"either": "x", "any_kind": "x", "other": "x"},  # these annotations promise nothing simple
        {"turns": np.int64(3), "share": np.float32(0.5), "hints": np.bool_(True)},  # rows are made by programs
    ],
)
def test_settings_that_match_or_have_no_simple_annotation_are_accepted(kwargs: dict[str, Any]) -> None:
    assert isinstance(make_env(Set, "task.Set", kwargs), Set)


def test_annotations_that_cannot_be_evaluated_are_ignored() -> None:
    class ForCheckers(CountEnv):
        def __init__(self, price: Decimal, hints: bool = False) -> None:
            pass

    assert isinstance(make_env(ForCheckers, "task.ForCheckers", {"price": 1, "hints": "x"}), ForCheckers)


class Odd(AgentEnv):
    """Returns the answer it is created with."""

    def __init__(self, answer: Transition) -> None:
        self.answer = answer

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[{"role": "user", "content": "?"}])

    async def step(self, action: Action) -> Transition:
        return self.answer


def outcome(env: AgentEnv) -> tuple[StopReason, str]:
    [group] = asyncio.run(collector(["a", "b"], make_env=lambda _: env, max_steps=2)([row()], seed=0))
    [trajectory] = group.trajectories
    return trajectory.stop, trajectory.error or ""


def ended(**fields: Any) -> Transition:
    return Transition(terminated=True, **fields)


def shown(**fields: Any) -> Transition:
    return Transition(observation=Observation(**fields))


CALL = ToolCallRecord(name="look", arguments={}, result="", text_span=(0, 1))


@pytest.mark.parametrize(
    ("make", "fields", "named"),
    [
        (ended, {"feedback": None}, "Transition.feedback"),
        (ended, {"info": [1]}, "Transition.info"),
        (ended, {"reward": "1"}, "Transition.reward"),
        (ended, {"reward": float("nan")}, "Transition.reward"),
        (ended, {"calls": None}, "Transition.calls"),
        (ended, {"calls": (CALL, None)}, "Transition.calls[1]"),
        (ended, {"calls": [replace(CALL, reward=float("inf"))]}, "Transition.calls[0].reward"),
        (ended, {"stop": "done"}, "Transition.stop"),
        (Transition, {"terminated": "no"}, "Transition.terminated"),
        (ended, {"observation": "x"}, "Transition.observation"),
        (shown, {"messages": []}, "Observation.messages"),
        (shown, {"messages": "hi"}, "Observation.messages"),
        (shown, {"messages": ["hi"]}, "Observation.messages[0]"),
        (shown, {"messages": [{"content": "x"}]}, "Observation.messages[0]['role']"),
        (shown, {"messages": [{"role": "user", "content": 5}]}, "Observation.messages[0]['content']"),
        (shown, {"text": 5}, "Observation.text"),
        (shown, {"token_ids": "x"}, "Observation.token_ids"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    make: Callable[..., Transition], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{re.escape(named)} must be .*, got "):
        make(**fields)


def test_fields_that_are_not_read_may_be_anything_and_numpy_values_are_accepted() -> None:
    going_on = Transition(observation=Observation(messages=[{"role": "user", "content": "?"}]), stop=None)  # type: ignore[arg-type]
    assert outcome(Odd(going_on)) == (StopReason.MAX_STEPS, "")
    assert outcome(Odd(ended(calls=[CALL], reward=np.float32(1)))) == (StopReason.ANSWERED, "")


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("nonsense", "Odd.step returned str 'nonsense' instead of Transition"),
        (shown(messages=[{"role": "assistant", "content": "x"}]), "Odd returned an Observation that ends with"),
        (ended(calls=(replace(CALL, info={"a": {1}}),)), "tool 'look'"),
        (ended(info={"a": {1}}), "Odd.step"),
    ],
)
def test_an_answer_that_cannot_be_used_fails_its_episode(answer: Any, named: str) -> None:
    stop, error = outcome(Odd(answer))
    assert stop is StopReason.ERROR
    assert named in error


def test_a_malformed_observation_fails_its_episode_with_the_line_that_made_it() -> None:
    class Begins(Odd):
        async def reset(self, row: TaskRow) -> Observation:
            return Observation(messages=["hi"])  # type: ignore[list-item]

    stop, error = outcome(Begins(ended()))
    assert stop is StopReason.ERROR
    assert "Observation.messages[0]" in error
    assert f"(test_env.py:{Begins.reset.__code__.co_firstlineno + 1})" in error


def test_an_env_that_reports_a_failure_is_named() -> None:
    message = "Odd.step ended the episode itself, with StopReason."
    assert outcome(Odd(ended(stop=StopReason.ERROR))) == (StopReason.ERROR, f"{message}ERROR")
    assert outcome(Odd(ended(stop=StopReason.TIMEOUT))) == (StopReason.TIMEOUT, f"{message}TIMEOUT")


def test_lone_surrogates_are_replaced_in_prompts_and_records() -> None:
    first = {"role": "user", "content": "a\ud800b"}
    said, more = {"role": "assistant", "content": "x"}, {"role": "user", "content": "\udfff"}

    class Begins(Odd):
        async def reset(self, row: TaskRow) -> Observation:
            return Observation(messages=[first])

    env = Begins(shown(messages=[first, said, more]))
    [group] = asyncio.run(collector(["x", "y"], make_env=lambda _: env, max_steps=2)([row()], seed=0))
    [trajectory] = group.trajectories
    assert (trajectory.stop, trajectory.error) == (StopReason.MAX_STEPS, None)
    begun, went_on = [tokenizer().decode(step.prompt_ids) for step in trajectory.steps]
    assert "a?b" in begun
    assert went_on.startswith(begun)  # appended to, id by id
    assert "?" in went_on[len(begun) :]
    assert trajectory.opening == [{"role": "user", "content": "a?b"}]
    assert renderer().render(Observation(text="a\ud800b")) == tokenizer().encode("a?b")


def test_a_reset_or_step_that_cannot_be_awaited_is_named() -> None:
    class HastyReset(CountEnv):
        def reset(self, row: TaskRow) -> Observation:  # type: ignore[override]
            return Observation(text="0")

    class HastyStep(CountEnv):
        def step(self, action: Action) -> Transition:  # type: ignore[override]
            return Transition(terminated=True)

    for env, method in ((HastyReset(), "reset"), (HastyStep(), "step")):
        stop, error = outcome(env)
        assert stop is StopReason.ERROR
        assert f"{type(env).__name__}.{method} returned" in error
        assert f"write `async def {method}`" in error


def test_reset_and_step_may_be_decorated() -> None:
    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def inner(*args: Any) -> Any:
            return method(*args)

        return inner

    class Timed(CountEnv):
        step = timed(CountEnv.step)

    assert outcome(make_env(Timed, "task.Timed", {})) == (StopReason.ANSWERED, "")


def test_a_row_overrides_key_by_key() -> None:
    recipe: dict[str, Any] = {"tools": ["a"], "tools_kwargs": {"a": {"x": 1, "y": 2}}, "max_bad_calls": 3}
    row = TaskRow(prompt=[], env_kwargs={"tools_kwargs": {"a": {"y": 5}, "b": {}}, "tools": ["b"]})
    assert merge_env_kwargs(recipe, row) == {
        "tools": ["b"],  # lists are replaced, not joined
        "tools_kwargs": {"a": {"x": 1, "y": 5}, "b": {}},
        "max_bad_calls": 3,
    }


settings = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.sampled_from("abc"), settings), st.dictionaries(st.sampled_from("abc"), settings))
def test_merging_keeps_its_inputs_and_the_row_wins(recipe: dict[str, Any], top: dict[str, Any]) -> None:
    before = repr((recipe, top))
    merged = merge_env_kwargs(recipe, TaskRow(prompt=[], env_kwargs=top))
    assert repr((recipe, top)) == before
    assert merged.keys() == recipe.keys() | top.keys()
    assert merge_env_kwargs(merged, TaskRow(prompt=[], env_kwargs=top)) == merged
    for key, value in top.items():
        if not isinstance(value, dict):
            assert merged[key] == value


def test_an_observation_that_has_grown_equals_a_new_one_and_checks_its_new_messages() -> None:
    first, reply, more = ({"role": role, "content": "?"} for role in ("user", "assistant", "user"))
    messages = [first, reply, more]
    assert Observation.grown(messages, by=2) == Observation(messages=messages)
    for bad in ({"content": "?"}, {"role": "user", "content": 1}, "?"):
        with pytest.raises(TypeError, match=r"Observation.messages\[3\]"):
            Observation.grown([*messages, bad], by=1)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="at least one message"):
        Observation.grown([], by=0)
