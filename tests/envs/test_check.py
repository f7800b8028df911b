"""`check_env` and `check_tool` pass what keeps the contract and name the rule that is broken."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.check import CANARY, check_env, check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import BaseTool, FromRow, ToolError, tool
from agent_r1.types import Action, Message, Observation, TaskRow, ToolCallRecord, Transition

ROW = TaskRow(
    prompt=[{"role": "user", "content": "Say a number."}],
    row_id="r1",
    reward_model={"style": "rule", "ground_truth": "fifty"},
    extra_info={"answers": {"gold": "fifty"}, "index": 3},
)


class Growing(AgentEnv):
    """Repeats the actions; the base of envs with one fault each."""

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
        return "the same " * 100 + f"number {Random.made}" + " and more" * 100


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
    """May see the answer and does not show it; reads it as a number."""

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


class Silent(Growing):
    async def reset(self, row: TaskRow) -> Observation:
        return Observation(text="")


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


def test_a_class_that_does_not_set_deterministic_gets_a_warning() -> None:
    class Says(Growing):
        deterministic = True

    class Denies(Growing):
        deterministic = False

    with pytest.warns(UserWarning, match=r"Growing gave the same episode twice.*`deterministic = True`"):
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
        env_check(lambda: ToolEnv(tools=[pick]))  # the user cannot change its class


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Random, "not deterministic for row 'r1': .* observation 1: .* number \\d and .* number \\d"),
        (RandomReward, r"not deterministic for row 'r1': .* rewards \[1.0, 2.0\] and \[3.0, 4.0\]"),
        (Leaking, f"observation 1 shows the answer to the policy: .*{CANARY}"),
        (LeakingExtra, f"observation 1 shows the answer to the policy: .*{CANARY}"),
        (Aliasing, "observation 0 changed"),
        (ClosesOnce, "ClosesOnce.close failed the second time: AttributeError"),
        (Silent, "observation 0 is empty"),
        (WrongSpan, r"step 0 returned a call at \(0, 99\)"),
        (ChangesRow, "the env changed the prompt of row 'r1'"),
    ],
)
def test_the_rule_that_an_env_breaks_is_named(env: type[AgentEnv], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as raised:
        env_check(env, replace(ROW, prompt=list(ROW.prompt)))
    assert len(str(raised.value)) < 700


def test_an_env_may_change_its_settings_because_each_episode_has_its_own() -> None:
    class Bag(Growing):
        deterministic = True

        def __init__(self, items: list[str]) -> None:
            super().__init__()
            self.items = items

        def reply(self, text: str) -> str:
            return self.items.pop()

    env_check(Bag, TaskRow(prompt=ROW.prompt, env_kwargs={"items": ["a", "b", "c"]}))


def test_a_tool_that_shows_the_answer_is_caught() -> None:
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


def test_the_rule_that_a_tool_breaks_is_named() -> None:
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
        (Settable(), {"x": 1}, "the model could set 'x' of tool 'plain'"),
        (Careless(), {"x": 1}, "accepts an argument that its schema does not have"),
        (Plain(), {"y": 1}, "refuses the example arguments"),
        (Plain(), {"x": -1}, "fails on the example arguments .* negative"),
    ]
    for one, arguments, message in broken:
        with pytest.raises(AssertionError, match=message):
            tool_check(one, arguments)
    with pytest.raises(AssertionError, match="tool 'plain' is not deterministic: first '1', then '2'"):
        tool_check(Plain(), {"x": 1}, deterministic=True)


def deposits(function: Callable[..., Any], *, parallel: bool) -> ToolEnv:
    """Return an env with a fresh account of 0, for a tool that puts money on it."""
    return ToolEnv(tools=[tool(name="deposit", parallel=parallel)(function)], tools_kwargs={"account": {"balance": 0}})


def deposit_in_lines(amount: int, account: FromRow[dict[str, int]]) -> str:
    """Put money on the account."""
    before = account["balance"]
    account["balance"] = before + amount
    return "done"


def deposit_in_place(amount: int, account: FromRow[dict[str, int]]) -> str:
    """Put money on the account."""
    account["balance"] += amount
    return "done"


def deposit_and_tell(amount: int, account: FromRow[dict[str, int]]) -> int:
    """Put money on the account and say how much there is."""
    account["balance"] += amount
    return account["balance"]


async def deposit_async(amount: int, account: FromRow[dict[str, int]]) -> str:
    """Put money on the account of a bank that answers later."""
    before = account["balance"]
    await asyncio.sleep(0)
    account["balance"] = before + amount
    return "done"


LOCK = threading.Lock()


def deposit_with_lock(amount: int, account: FromRow[dict[str, int]]) -> str:
    """Put money on the account, one call at a time."""
    with LOCK:
        account["balance"] += amount
    return "done"


THREE = "".join(FORMATS["hermes"].write_call("deposit", {"amount": amount}) for amount in (1, 2, 4))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (deposit_in_lines, r"'account' .* {'balance': \d} in parallel and as {'balance': 7} in order"),
        (deposit_in_place, r"'account' .* {'balance': \d} in parallel and as {'balance': 7} in order"),
        (deposit_async, "'account' .* {'balance': 4} in parallel and as {'balance': 7} in order"),
        (deposit_and_tell, r"call \d of step 0 \(deposit\) returns '\d' in parallel and '\d' in order"),
    ],
)
def test_an_update_that_parallel_calls_lose_is_found(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(AssertionError, match=f"calls of 'deposit' behave differently: {problem}"):
        asyncio.run(check_env(lambda: deposits(function, parallel=True), ROW, [THREE]))
    asyncio.run(check_env(lambda: deposits(function, parallel=False), ROW, [THREE]))


def test_a_parallel_tool_that_locks_what_it_changes_passes() -> None:
    before = threading.gettrace()
    asyncio.run(check_env(lambda: deposits(deposit_with_lock, parallel=True), ROW, [THREE]))
    assert threading.gettrace() is before


def test_a_parallel_tool_that_breaks_when_calls_overlap_is_named() -> None:
    @tool(parallel=True)
    async def take(amount: int, purse: FromRow[list[int]]) -> str:
        """Take a coin."""
        if purse:
            await asyncio.sleep(0)
            purse.pop()
        return "done"

    calls = "".join(FORMATS["hermes"].write_call("take", {"amount": 1}) for _ in range(2))
    with pytest.raises(AssertionError, match=r"calls of 'take' .* IndexError: pop from empty list"):
        asyncio.run(check_env(lambda: ToolEnv(tools=[take], tools_kwargs={"purse": [1]}), ROW, [calls]))


def test_a_state_that_envs_share_is_distinguished_from_a_lost_update() -> None:
    account = {"balance": 0}
    deposit = tool(name="deposit", parallel=True)(deposit_with_lock)
    with pytest.raises(AssertionError, match="'account' of tool 'deposit' is shared by episodes"):
        asyncio.run(check_env(lambda: ToolEnv(tools=[deposit], tools_kwargs={"account": account}), ROW, [THREE]))
