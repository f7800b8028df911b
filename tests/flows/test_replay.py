"""Known texts played without a model: what comes out is what a reward function takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1 import BaseTool, FromRow, ToolEnv, ToolResult, replay, tool
from agent_r1.errors import ConfigError, DataError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import Observation, StopReason, TaskRow, Trajectory, Transition


@tool
def refund(order: str, orders: FromRow[dict[str, str]]) -> ToolResult:
    """Refund an order."""
    orders[order] = "refunded"
    return ToolResult("done", reward=0.5, info={"order": order})


@BaseTool.register
@tool
def replay_only(word: str) -> str:
    """A tool that only some rows have."""
    return word.upper()


ROW = TaskRow(
    prompt=[{"role": "user", "content": "Refund order A."}],
    row_id="r1",
    reward_model={"ground_truth": {"A": "refunded", "B": "sent"}},
    env_kwargs={"tools_kwargs": {"orders": {"A": "sent", "B": "sent"}}},
)


def say(name: str, /, **arguments: Any) -> str:
    return FORMATS["hermes"].write_call(name, arguments)


class Shop(ToolEnv):
    """Shows its orders to the reward function."""

    async def step(self, action: Any) -> Transition:
        transition = await super().step(action)
        return Transition(
            observation=transition.observation,
            reward=transition.reward,
            terminated=transition.terminated,
            stop=transition.stop,
            calls=transition.calls,
            feedback=transition.feedback,
            info={**transition.info, "orders": dict(self.state["refund"]["orders"])},
        )


def play(*texts: str, env: type[ToolEnv] = Shop, row: TaskRow = ROW, **kwargs: Any) -> Trajectory:
    return asyncio.run(replay(env, row, texts, **{"tools": [refund], **kwargs}))


def test_gold_actions_give_a_trajectory_for_a_reward_function() -> None:
    call = say("refund", order="A")
    played = play(f"I refund it. {call}", "Order A is refunded.")
    first, last = played.steps
    assert played.steps[-1].info["orders"] == ROW.ground_truth
    assert (played.row_id, played.stop, played.total_reward) == ("r1", StopReason.ANSWERED, 0.5)
    assert played.final_text == "Order A is refunded."
    assert played.opening == ROW.prompt
    (record,) = first.calls
    assert (record.name, record.arguments, record.result, record.info) == (
        "refund",
        {"order": "A"},
        "done",
        {"order": "A"},
    )
    assert first.feedback == "refund: done"
    assert record.text_span == (13, 13 + len(call))
    assert record.token_span is None  # there are no tokens
    assert last.response_ids == []


def test_replay_does_not_change_the_row() -> None:
    texts = (say("refund", order="B"), "Done.")
    one, other = play(*texts), play(*texts)
    assert ROW.env_kwargs["tools_kwargs"]["orders"] == {"A": "sent", "B": "sent"}
    assert one.steps[-1].info == other.steps[-1].info == {"answer": "Done.", "orders": {"A": "sent", "B": "refunded"}}


def test_an_unfinished_episode_stops_as_max_steps() -> None:
    assert play(say("refund", order="A")).stop is StopReason.MAX_STEPS


def test_texts_after_the_end_are_an_error() -> None:
    with pytest.raises(DataError, match=r"row 'r1': the episode ended \(answered\) after 1 of 2 texts.* 'Done\.'"):
        play("Done.", say("refund", order="A"))


def test_a_single_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"list of texts.*'Done"):
        asyncio.run(replay(Shop, ROW, "Done.", tools=[refund]))


def test_settings_of_the_row_take_precedence() -> None:
    row = TaskRow(prompt=ROW.prompt, row_id="own", env_kwargs={"env_type": "tool", "tools": ["replay_only"]})
    played = play(say("replay_only", word="hi"), env=ToolEnv, row=row)
    assert played.steps[0].calls[0].result == "HI"
    with pytest.raises(ConfigError, match="does not accept these env_kwargs"):
        play("Done.", max_bad_cals=3)


def test_errors_of_the_env_are_raised() -> None:
    class Broken(Shop):
        async def step(self, action: Any) -> Transition:
            return Transition(terminated=True, reward=float("nan"))

    class Endless(Shop):
        async def step(self, action: Any) -> Transition:
            return Transition(observation=Observation(messages=[{"role": "assistant", "content": "me again"}]))

    with pytest.raises(TypeError, match=r"Transition\.reward"):
        play("Done.", env=Broken)
    with pytest.raises(ValueError, match="Endless returned an Observation that ends with"):
        play("Done.", env=Endless)


def test_the_env_gets_no_ground_truth_and_is_closed() -> None:
    seen: list[Any] = []

    class Looks(Shop):
        async def reset(self, row: TaskRow) -> Observation:
            seen.append(row.ground_truth)
            return await super().reset(row)

        async def close(self) -> None:
            seen.append("closed")

    play("Done.", env=Looks)
    assert seen == [None, "closed"]
