"""`check_env` and `check_tool` pass what keeps the contract and name the rule that is broken."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.agent.check import CANARY, check_env, check_tool
from agent_r1.agent.env import AgentEnv
from agent_r1.agent.tool import BaseTool, FromRow, ToolError, tool
from agent_r1.agent.tool_calls import FORMATS
from agent_r1.agent.tool_env import ToolEnv
from agent_r1.types import Action, Message, Observation, TaskRow, ToolCallRecord, Transition

ROW = TaskRow(
    prompt=[{"role": "user", "content": "Say a number."}],
    row_id="r1",
    reward_model={"style": "rule", "ground_truth": "fifty"},
    extra_info={"answers": {"gold": "fifty"}, "index": 3},
)


class Growing(AgentEnv):
    """Repeats what it is told, three times; the base of envs with one fault each."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def reset(self, row: TaskRow) -> Observation:
        self.messages = [dict(message) for message in row.prompt]
        return Observation(messages=list(self.messages))

    async def step(self, action: Action) -> Transition:
        self.messages.append({"role": "user", "content": self.reply(action.text)})
        return Transition(observation=Observation(messages=list(self.messages)), reward=1.0)

    def reply(self, text: str) -> str:
        return f"You said {text}."


class Random(Growing):
    made = 0

    def reply(self, text: str) -> str:
        Random.made += 1
        return f"{Random.made}"


class RandomReward(Growing):
    made = 0

    async def step(self, action: Action) -> Transition:
        RandomReward.made += 1
        transition = await super().step(action)
        return Transition(observation=transition.observation, reward=float(RandomReward.made))


class Leaking(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        self.answer = row.ground_truth
        return await super().reset(row)

    def reply(self, text: str) -> str:
        return f"No, it is {self.answer}."


class LeakingExtra(Leaking):
    async def reset(self, row: TaskRow) -> Observation:
        first = await super().reset(row)
        self.answer = row.extra_info["answers"]["gold"]
        return first


class Judging(Leaking):
    """Allowed to see the answer, and keeps it to itself; reads it as a number."""

    sees_ground_truth = True

    def reply(self, text: str) -> str:
        return "Higher." if int(text) < int(self.answer) else "Lower."


class ChangesRow(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        row.prompt.append({"role": "system", "content": "Mind the step."})
        return await super().reset(row)


class Aliasing(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        await super().reset(row)
        return Observation(messages=self.messages)


class ClosesOnce(Growing):
    async def close(self) -> None:
        del self.messages


class NoMessages(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[])


class NoRole(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[{"content": "hello"}])


class Tuple(Growing):
    async def step(self, action: Action) -> Any:
        return await self.reset(ROW), 0.0, True, {}


class NanReward(Growing):
    async def step(self, action: Action) -> Transition:
        return Transition(terminated=True, reward=float("nan"))


class WrongSpan(Growing):
    async def step(self, action: Action) -> Transition:
        call = ToolCallRecord(name="f", arguments={}, result="", text_span=(0, 99))
        return Transition(terminated=True, calls=(call,))


def env_check(make_env: Callable[..., AgentEnv], row: TaskRow = ROW, actions: tuple[str, ...] = ("1", "2")) -> None:
    asyncio.run(check_env(make_env, row, list(actions)))


def test_good_envs_pass() -> None:
    env_check(Growing)
    env_check(Judging, TaskRow(prompt=ROW.prompt, reward_model={"ground_truth": "50"}))

    @tool
    def add(a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    call = FORMATS["hermes"].write_call("add", {"a": 1, "b": 2})
    env_check(lambda: ToolEnv(tools=[add]), actions=(call, "<tool_call>", "3", "never played: the env has answered"))


def test_who_passes_and_does_not_say_whether_it_is_deterministic_is_advised_to() -> None:
    class Says(Growing):
        deterministic = True

    class Denies(Growing):
        deterministic = False

    with pytest.warns(UserWarning, match=r"Growing showed the same twice.*say `deterministic = True` in the class"):
        env_check(Growing)

    @tool
    def pick() -> str:
        """Pick one."""
        return "this one"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env_check(Says)
        env_check(type("Heir", (Says,), {}))
        env_check(Denies)
        env_check(lambda: ToolEnv(tools=[pick]))  # whose class is not theirs to change


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Random, "not deterministic for row 'r1': same actions, different observation 1"),
        (RandomReward, r"not deterministic for row 'r1': same actions, but rewards \[1.0, 2.0\] and \[3.0, 4.0\]"),
        (Leaking, f"observation 1 shows the answer to the policy: .*{CANARY}"),
        (LeakingExtra, f"observation 1 shows the answer to the policy: .*{CANARY}"),
        (Aliasing, "observation 0 changed after it was given"),
        (ClosesOnce, "ClosesOnce.close failed the second time: AttributeError"),
        (NoMessages, "reset returned an observation without messages"),
        (NoRole, "reset returned a message without 'role' and 'content'"),
        (Tuple, "step 0 returned tuple instead of a Transition"),
        (NanReward, "step 0 returned reward nan"),
        (WrongSpan, r"step 0 returned a call at \(0, 99\) of a text of 1 characters"),
    ],
)
def test_a_broken_env_is_told_which_rule_it_breaks(env: type[AgentEnv], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        env_check(env)


def test_an_env_that_changes_its_row_is_caught() -> None:
    row = TaskRow(prompt=[{"role": "user", "content": "x"}], row_id="r2")
    with pytest.raises(AssertionError, match="the env changed the prompt of row 'r2'"):
        env_check(ChangesRow, row)


def test_an_env_may_use_up_its_settings_as_each_episode_has_its_own() -> None:
    class Bag(Growing):
        deterministic = True

        def __init__(self, items: list[str]) -> None:
            super().__init__()
            self.items = items

        def reply(self, text: str) -> str:
            return self.items.pop()

    env_check(Bag, TaskRow(prompt=ROW.prompt, env_kwargs={"items": ["a", "b", "c"]}))


def test_a_tool_that_tells_the_answer_is_caught_through_its_env() -> None:
    class Oracle(ToolEnv):
        async def reset(self, row: TaskRow) -> Observation:
            @tool
            def hint() -> str:
                """Give a hint."""
                return f"try {row.ground_truth}"

            self._tools = {"hint": hint}
            self._context = {"hint": {}}
            return await super().reset(row)

    @tool
    def hint() -> str:
        """Give a hint."""
        return "none"

    with pytest.raises(AssertionError, match="observation 1 shows the answer"):
        env_check(lambda: Oracle(tools=[hint]), actions=(FORMATS["hermes"].write_call("hint", {}),))


def tool_check(one: BaseTool, arguments: dict[str, Any], **kwargs: Any) -> None:
    asyncio.run(check_tool(one, arguments, **kwargs))


def test_a_good_tool_passes() -> None:
    @tool
    def look_up(key: str, table: FromRow[dict[str, str]]) -> str:
        """Look up a key."""
        return table[key]

    tool_check(look_up, {"key": "a"}, context={"table": {"a": "1"}}, deterministic=True)


class Plain(BaseTool):
    name = "plain"
    description = "Plain."
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}  # noqa: RUF012
    calls = 0

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        self.calls += 1
        if args["x"] < 0:
            raise ToolError("negative")
        return str(self.calls)


def test_a_broken_tool_is_told_which_rule_it_breaks() -> None:
    class Spaced(Plain):
        name = "not a name"

    class Unwritten(Plain):
        parameters = {"type": "object", "properties": {"x": {"type": "integer", "default": {1}}}}  # noqa: RUF012

    class Settable(Plain):
        async def execute(self, args: dict[str, Any], *, x: int = 0) -> str:  # type: ignore[override]
            return ""

    class Careless(Plain):
        def validate(self, arguments: Any) -> dict[str, Any]:
            return dict(arguments)

    tool_check(Plain(), {"x": 1})
    broken: list[tuple[BaseTool, dict[str, Any], str]] = [
        (Spaced(), {"x": 1}, "tool name 'not a name' must be"),
        (Unwritten(), {"x": 1}, "the schema of tool 'plain' is not JSON"),
        (Settable(), {"x": 1}, "the model of tool 'plain' could set 'x'"),
        (Careless(), {"x": 1}, "accepts an argument that its schema does not have"),
        (Plain(), {"y": 1}, "refuses the example arguments"),
        (Plain(), {"x": -1}, "fails on the example arguments .* negative"),
    ]
    for one, arguments, message in broken:
        with pytest.raises(AssertionError, match=message):
            tool_check(one, arguments)
    with pytest.raises(AssertionError, match="tool 'plain' is not deterministic: first '1', then '2'"):
        tool_check(Plain(), {"x": 1}, deterministic=True)
