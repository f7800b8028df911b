"""An episode has a row of its own: what is done to it stays in the episode."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv, copy_row
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.types import Action, Observation, StopReason, TaskRow, Transition
from tests.chatml import collector, row, tokenizer


def table_row() -> TaskRow:
    return row(env_kwargs={"bag": [1]}, extra_info={"seen": [{"a": 1}]}, reward_model={"ground_truth": ["x"]})


def spoil(row: TaskRow) -> None:
    row.prompt[0]["content"] += "!"
    row.env_kwargs["bag"].append(2)
    row.extra_info["seen"][0]["a"] = 2
    row.ground_truth.clear()


class Careless(AgentEnv):
    """Keeps the row's own list as its conversation."""

    sees_ground_truth = True

    async def reset(self, row: TaskRow) -> Observation:
        spoil(row)
        self.messages = row.prompt
        return Observation(messages=self.messages)

    async def step(self, action: Action) -> Transition:
        self.messages += [{"role": "assistant", "content": action.text}, {"role": "user", "content": "on"}]
        return Transition(observation=Observation(messages=self.messages))


class CarelessFlow(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        spoil(row)
        await episode.act(Observation(messages=row.prompt))
        return StopReason.ANSWERED


@pytest.mark.parametrize(
    "players", [{"make_env": lambda _: Careless()}, {"make_flow": lambda _: CarelessFlow(lambda _: Careless())}]
)
def test_what_an_env_or_a_flow_does_to_its_row_other_attempts_and_the_reward_do_not_see(
    players: dict[str, Any],
) -> None:
    given_row, before = table_row(), deepcopy(table_row())
    engine = ScriptedEngine(lambda call: "a", tokenizer=tokenizer())
    collect = collector(engine, group_size=3, max_steps=2, **players)
    [group] = asyncio.run(collect([given_row], seed=0))
    assert group.row is given_row
    assert given_row == before
    first = [trajectory.steps[0].prompt_ids for trajectory in group.trajectories]
    assert first[0] == first[1] == first[2]
    assert [trajectory.error for trajectory in group.trajectories] == [None] * 3


def containers(value: Any) -> Iterator[int]:
    """The ids of all that could be changed in it."""
    if isinstance(value, dict | list | set):
        yield id(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ():
        yield from containers(inner)


leaves = st.none() | st.integers() | st.text(max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.sets(leaves, max_size=1)  # the order of more may change in a copy
    ),
    max_leaves=10,
)


@given(values)
def test_a_row_of_ones_own_is_equal_and_shares_nothing_that_can_be_changed(value: Any) -> None:
    common = row(extra_info={"value": value}, env_kwargs={"value": [value]})
    own = copy_row(common)
    assert own == common
    assert repr(own) == repr(common)
    for each in fields(TaskRow):
        shared = set(containers(getattr(own, each.name))) & set(containers(getattr(common, each.name)))
        assert not shared, each.name


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.zeros(2), lambda value: value.fill(1)),
        (np.array([{"a": 1}], dtype=object), lambda value: value[0].update(a=2)),  # as pandas gives nested columns
        (torch.zeros(2), lambda value: value.fill_(1)),
        (array("d", [0.0]), lambda value: value.append(1)),
        (bytearray(b"a"), lambda value: value.extend(b"b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_written_in_is_copied_and_remains_of_its_kind(value: Any, change: Callable[[Any], object]) -> None:
    common = row(extra_info={"value": value}, env_kwargs={"values": [value]})
    before, own = repr(value), copy_row(common)
    for copied in (own.extra_info["value"], own.env_kwargs["values"][0]):
        assert (type(copied), repr(copied)) == (type(value), before)
        change(copied)
        assert repr(copied) != before
        assert repr(value) == before


class Stored:
    """An array in a file, such as h5py's: it can be read as an array, and not be copied."""

    def __array__(self) -> Any:
        raise AssertionError("too large to read")

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def test_what_cannot_be_written_in_or_has_no_copy_is_shared() -> None:
    corpus = np.zeros(2)
    corpus.flags.writeable = False
    shared = {
        "corpus": corpus,
        "number": np.float32(1.5),
        "file": Stored(),
        "locks": np.array([threading.Lock()], dtype=object),
        "weight": torch.ones(1, requires_grad=True) * 2,
        "other": object(),
    }
    own = copy_row(row(extra_info=shared)).extra_info
    assert [name for name, value in shared.items() if own[name] is not value] == []


def test_a_row_that_cannot_be_copied_fails_its_episodes_only() -> None:
    endless: list[Any] = []
    endless.append(endless)
    collect = collector(["a"], make_env=lambda _: Careless(), max_steps=1)
    bad, good = asyncio.run(collect([row("bad", extra_info={"x": endless}), table_row()], seed=0))
    assert "RecursionError" in (bad.trajectories[0].error or "")
    assert good.trajectories[0].error is None
