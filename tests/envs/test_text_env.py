"""TextEnv: two methods, sync or async; it keeps the whole conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_r1 import Reply, TextEnv, check_env
from agent_r1.types import Action, TaskRow

ROW = TaskRow(prompt=[], row_id="r")


class Counter(TextEnv):
    system = "Count."

    def begin(self, row: TaskRow) -> str:
        self.count = 0
        return f"{row.row_id}: go"

    def reply(self, said: str) -> Reply:
        self.count += 1
        return Reply(text=f"{said}, that is {self.count}", reward=0.5, done=said == "stop", info={"count": self.count})


class Slow(TextEnv):
    async def begin(self, row: TaskRow) -> str:
        return "begin"

    async def reply(self, said: str) -> Reply:
        await asyncio.sleep(0)
        return Reply(text=said.upper())


def act(text: str) -> Action:
    return Action(text=text, token_ids=[])


def test_the_next_observation_holds_the_whole_conversation() -> None:
    async def play() -> None:
        env = Counter()
        first = await env.reset(ROW)
        assert first.messages == [{"role": "system", "content": "Count."}, {"role": "user", "content": "r: go"}]
        second = await env.step(act("one"))
        assert second.observation is not None
        assert second.observation.messages == [
            *first.messages,
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "one, that is 1"},
        ]
        assert (second.feedback, second.reward, second.info) == ("one, that is 1", 0.5, {"count": 1})
        last = await env.step(act("stop"))
        assert last.terminated
        assert last.observation is None
        assert last.feedback == "stop, that is 2"
        again = await env.reset(ROW)
        assert again.messages == first.messages  # nothing is left of the episode before

    asyncio.run(play())


def test_both_methods_may_be_async_and_the_system_message_may_be_missing() -> None:
    async def play() -> None:
        env = Slow()
        assert (await env.reset(ROW)).messages == [{"role": "user", "content": "begin"}]
        assert (await env.step(act("loud"))).feedback == "LOUD"

    asyncio.run(play())


def test_a_text_env_passes_check_env() -> None:
    asyncio.run(check_env(Counter, ROW, ["a", "b", "stop"]))


def test_a_reply_of_the_wrong_type_is_refused() -> None:
    class Wrong(Counter):
        def reply(self, said: str) -> Reply:
            return "just text"  # type: ignore[return-value]

    async def play() -> None:
        env = Wrong()
        await env.reset(ROW)
        with pytest.raises(TypeError, match=r"Wrong\.reply returns must be a Reply, got str"):
            await env.step(act("x"))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", None),
        ("text", 5),
        ("info", None),
        ("reward", "1"),
        ("reward", float("nan")),
        ("done", "false"),
        ("done", None),
    ],
)
def test_a_field_of_a_reply_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^Reply\.{field} must be .*, got {type(value).__name__} "):
        Reply(**{field: value})


def test_done_may_be_a_numpy_bool() -> None:
    class Measured(Counter):
        def reply(self, said: str) -> Reply:
            return Reply(done=np.bool_(said == "stop"))  # type: ignore[arg-type]

    async def play() -> list[bool]:
        env = Measured()
        await env.reset(ROW)
        return [(await env.step(act(said))).terminated for said in ("go", "stop")]

    assert asyncio.run(play()) == [False, True]
