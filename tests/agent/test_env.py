"""The env registry, and how a row's settings lie on top of the recipe's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.agent.env import AgentEnv, env_class, make_env, merge_env_kwargs
from agent_r1.errors import ConfigError
from agent_r1.types import Action, Observation, TaskRow, Transition


@AgentEnv.register("count_for_tests")
class CountEnv(AgentEnv):
    def __init__(self, *, limit: int = 2) -> None:
        self.limit = limit

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(text="0")

    async def step(self, action: Action) -> Transition:
        return Transition(terminated=True)


def test_a_registered_env_is_made_by_name_with_its_settings() -> None:
    env = AgentEnv.from_config("count_for_tests", limit=5)
    assert isinstance(env, CountEnv)
    assert env.limit == 5
    assert env.tool_schemas == []
    assert not env.sees_ground_truth
    assert env_class("count_for_tests") is CountEnv


def test_unknown_names_and_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"unknown env 'count_for_test'. Did you mean 'count_for_tests'?"):
        AgentEnv.from_config("count_for_test")
    with pytest.raises(ConfigError, match=r"env 'count_for_tests' does not accept these env_kwargs: .*'limt'"):
        make_env(CountEnv, "count_for_tests", {"limt": 5})


def test_a_name_can_be_registered_again_by_the_same_class_only() -> None:
    AgentEnv.register("count_for_tests")(CountEnv)  # a module imported twice

    class Other(CountEnv):
        pass

    with pytest.raises(ConfigError, match=r"env name 'count_for_tests' is taken by .*CountEnv"):
        AgentEnv.register("count_for_tests")(Other)


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
