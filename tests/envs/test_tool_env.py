"""Episodes with tools: observations, rewards, records and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from agent_r1 import Reply
from agent_r1.envs.base import env_class, make_env
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.guard import explain
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import BaseTool, FromRow, ToolError, ToolResult, tool
from agent_r1.types import Action, Observation, StopReason, TaskRow, Transition

ROW = TaskRow(prompt=[{"role": "user", "content": "How much is 1 + 2?"}], row_id="sum")


@tool
def add(a: int, b: int) -> ToolResult:
    """Add two integers."""
    return ToolResult(str(a + b), reward=0.25, info={"terms": 2})


@tool
async def refuse(reason: str) -> str:
    """Refuse."""
    raise ToolError(f"refused: {reason}")


@tool
def look_up(key: str, table: FromRow[dict[str, str]], language: FromRow[str] = "en") -> str:
    """Look up a key."""
    return f"{table[key]} {language}"


@tool
def python(code: str) -> str:
    """Run code."""
    return f"ran {code}"


def say(name: str, /, **arguments: Any) -> str:
    return FORMATS["hermes"].write_call(name, arguments)


def play(env: ToolEnv, *texts: str, row: TaskRow = ROW) -> list[Transition]:
    async def main() -> list[Transition]:
        await env.reset(row)
        return [await env.step(Action(text=text, token_ids=[])) for text in texts]

    return asyncio.run(main())


def messages(transition: Transition) -> list[dict[str, Any]]:
    assert transition.observation is not None
    assert transition.observation.messages is not None
    return transition.observation.messages


def test_an_episode_appends_responses_and_results_until_there_is_no_call() -> None:
    call = say("add", a=1, b=2)
    first, last = play(ToolEnv(tools=[add]), f"I add. {call}", "It is 3.")
    assert messages(first) == [
        *ROW.prompt,
        {"role": "assistant", "content": f"I add. {call}"},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    (record,) = first.calls
    assert (record.name, record.arguments, record.result) == ("add", {"a": 1, "b": 2}, "3")
    assert (record.reward, record.error, record.info) == (0.25, None, {"terms": 2})
    assert record.text_span == (7, 7 + len(call))
    assert (first.reward, first.terminated, first.feedback) == (0.25, False, "add: 3")
    assert (last.terminated, last.stop, last.reward, last.info) == (
        True,
        StopReason.ANSWERED,
        0,
        {"answer": "It is 3."},
    )


def test_the_row_is_copied_and_earlier_observations_do_not_grow() -> None:
    env = ToolEnv(tools=[add])

    async def main() -> tuple[Observation, Transition]:
        first = await env.reset(ROW)
        return first, await env.step(Action(text=say("add", a=1, b=2), token_ids=[]))

    first, after = asyncio.run(main())
    assert first.messages == ROW.prompt
    assert len(messages(after)) == 3
    messages(after)[0]["content"] = "changed"
    assert ROW.prompt[0]["content"] == "How much is 1 + 2?"


def test_good_and_bad_calls_of_one_step_are_answered_in_order() -> None:
    text = "".join(
        [
            say("add", a=1, b=2),
            say("ad", a=1),
            "<tool_call>{oops}</tool_call>",
            say("add", a=1, c=2),
            say("refuse", reason="late"),
            say("add", a=3, b=4),
        ]
    )
    (step,) = play(ToolEnv(tools=[add, refuse]), text)
    one, unknown, malformed, wrong, refused, two = step.calls
    faults = [None, "unknown_tool", "malformed", "bad_arguments", "failed", None]
    assert [call.fault for call in step.calls] == faults
    assert (one.result, two.result, step.reward) == ("3", "7", 0.5)
    assert unknown.error == "there is no tool 'ad'. Did you mean 'add'? Choose one of: add, refuse"
    assert malformed.name == ""
    assert malformed.result.startswith("the call cannot be read: Expecting property name")
    assert malformed.result.endswith("\nTools: add, refuse")
    assert wrong.result == (
        "bad arguments for add(a: integer, b: integer): unknown argument 'c'; 'b' is missing\nTools: add, refuse"
    )
    assert refused.error == refused.result == "refused: late"
    assert [m["content"] for m in messages(step)[2:]] == [call.result for call in step.calls]
    assert [text[slice(*call.text_span)] for call in step.calls][2] == "<tool_call>{oops}</tool_call>"


def test_too_many_bad_calls_in_a_row_end_the_episode() -> None:
    bad, good = say("nope"), say("add", a=1, b=2)
    steps = play(ToolEnv(tools=[add], max_bad_calls=3), bad, bad, good, bad, bad, "<tool_call>")
    assert [step.terminated for step in steps] == [False] * 5 + [True]  # the good one started the count anew
    assert steps[-1].stop is StopReason.PARSE_LIMIT
    assert "not closed" in steps[-1].feedback
    assert steps[-1].calls[0].error is not None
    # counted in call order, looked at when the step is over: 2 + 1 bad in a row over two steps
    assert play(ToolEnv(tools=[add], max_bad_calls=3), bad + bad, bad)[-1].stop is StopReason.PARSE_LIMIT
    assert not play(ToolEnv(tools=[add], max_bad_calls=2), bad + bad + good)[-1].terminated
    # a tool that says no has run, so its call was not a bad one
    no = say("refuse", reason="x")
    assert not any(step.terminated for step in play(ToolEnv(tools=[refuse], max_bad_calls=1), no, no, no))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony", "retool"}))  # one call a response; another tool
@pytest.mark.parametrize(("limit", "answered"), [(2, 2), (40, 40), (None, 32)])
def test_the_calls_of_a_response_beyond_max_calls_are_refused(name: str, limit: int | None, answered: int) -> None:
    call = FORMATS[name].write_call("add", {"a": 1, "b": 2})
    settings: dict[str, Any] = {} if limit is None else {"max_calls": limit}
    text = f"[{', '.join([call[1:-1]] * 41)}]" if name == "pythonic" else call * 41
    (step,) = play(ToolEnv(tools=[add], tool_format=name, **settings), text)
    assert [record.result for record in step.calls[:-1]] == ["3"] * answered
    assert step.calls[-1].result.startswith(f"there are more than {answered} calls; the rest was not read")


class Log(BaseTool):
    """Logs when its calls begin and end."""

    description = "Log."
    parameters: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}  # noqa: RUF012

    def __init__(self, name: str, log: list[str], *, parallel: bool | None) -> None:
        self.name, self.log = name, log
        if parallel is not None:
            self.parallel = parallel

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        self.log.append(f"{args['x']} begins")
        await asyncio.sleep(0)
        self.log.append(f"{args['x']} ends")
        return str(args["x"])


def logged(first: bool | None, second: bool | None = None, **settings: Any) -> str:
    """Return when the calls a, b of the first tool and c, d of the second began and ended."""
    log: list[str] = []
    env = ToolEnv(tools=[Log("one", log, parallel=first), Log("two", log, parallel=second)], **settings)
    text = "".join(say(name, x=x) for name, x in (("one", "a"), ("one", "b"), ("two", "c"), ("two", "d")))
    (step,) = play(env, text)
    assert [call.result for call in step.calls] == ["a", "b", "c", "d"]
    return ", ".join(entry.replace(" begins", "+").replace(" ends", "-") for entry in log)


def test_calls_of_a_response_run_in_order_unless_their_tools_are_parallel() -> None:
    assert logged(None) == logged(False, False) == "a+, a-, b+, b-, c+, c-, d+, d-"
    assert logged(True, False) == "a+, b+, a-, b-, c+, c-, d+, d-"
    assert logged(True, True) == "a+, b+, c+, d+, a-, b-, c-, d-"
    assert logged(True, True, parallel=False) == "a+, a-, b+, b-, c+, c-, d+, d-"


def test_a_batch_tool_gets_the_calls_of_one_response_together() -> None:
    sizes: list[int] = []

    class Item(BaseModel):
        x: int

    def double(calls: list[Item]) -> list[int]:
        """Double."""
        sizes.append(len(calls))
        return [2 * call.x for call in calls]

    double.__annotations__["calls"] = list[Item]
    text = say("double", x=1) + say("double", x=2)
    for made, expected in ((tool(batch=True), [2]), (tool(batch=True, parallel=False), [1, 1])):
        sizes.clear()
        (step,) = play(ToolEnv(tools=[made(double)]), text)
        assert ([call.result for call in step.calls], sizes) == (["2", "4"], expected)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_bug_of_a_tool_is_raised_for_the_flow_to_handle(parallel: bool) -> None:
    @tool(parallel=parallel)
    def broken(x: int) -> str:
        """Break."""
        raise ZeroDivisionError(f"bug {x}")

    with pytest.raises(ZeroDivisionError, match="bug 1") as raised:  # the first in call order
        play(ToolEnv(tools=[broken, add]), say("broken", x=1) + say("broken", x=2))
    assert explain(raised.value).source == "tool 'broken'"


def test_a_long_result_is_cut_with_a_note() -> None:
    @tool
    def dump(size: int) -> str:
        """Dump."""
        return "x\ud800" * (size // 2)

    size = 2**20
    (step,) = play(ToolEnv(tools=[dump], max_result_chars=10), say("dump", size=size))
    assert step.calls[0].result == f"x?x?x?x?x?\n[{size - 10} of {size} characters cut]"
    assert messages(step)[-1]["content"] == step.calls[0].result
    (step,) = play(ToolEnv(tools=[dump], max_result_chars=10), say("dump", size=10))
    assert step.calls[0].result == "x?" * 5  # lone surrogates are replaced


def test_values_of_the_row_reach_the_tools_that_take_them() -> None:
    ask = say("look_up", key="k")
    for given_values in (
        {"look_up": {"table": {"k": "v"}, "language": "de"}},  # by tool
        {"table": {"k": "v"}, "language": "de"},  # flat, as the published rows have it
        {"look_up": {"table": {"k": "v"}}, "language": "de"},  # both
        {"look_up": {"table": {"k": "v"}, "language": "de"}, "language": "fr"},  # the tool's own value wins
    ):
        (step,) = play(ToolEnv(tools=[add, look_up], tools_kwargs=given_values), ask)
        assert step.calls[0].result == "v de"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tools": [look_up]}, "tool 'look_up' needs 'table' from the row, which has nothing"),
        ({"tools": [add], "tools_kwargs": {"table": 1}}, "tools_kwargs has 'table'"),
        ({"tools": [look_up], "tools_kwargs": {"look_up": {"tabel": 1}}}, r"takes no 'tabel' .* Did you mean 'table'"),
        ({"tools": [look_up], "tools_kwargs": {"look_up": 5}}, r"tools_kwargs\['look_up'\] must be a dict"),
        ({"tools": []}, "at least one tool"),
        ({"tools": "add"}, "list of at least one tool"),
        ({"tools": [add, add]}, "two tools are named 'add'"),
        ({"tools": ["no_such_tool"]}, "unknown tool 'no_such_tool'"),
        ({"tools": [add], "tool_format": "herms"}, r"unknown tool_format 'herms'\. Did you mean 'hermes'"),
        ({"tools": [add], "tool_format": "retool"}, "can only call the tool 'python', got tools"),
        ({"tools": [python], "tool_format": "retool", "tool_role": "tool"}, "no tool_role 'tool'"),
        ({"tools": [add], "max_bad_calls": 0}, "max_bad_calls=0 must be at least 1"),
        ({"tools": [add], "max_calls": 0}, "max_calls=0 must be at least 1"),
        ({"tools": [add], "max_tool_calls": 1}, "env 'tool' does not accept these env_kwargs"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_a_config_error(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env(env_class("tool"), "tool", kwargs)


def test_a_step_outside_an_episode_is_refused() -> None:
    env = ToolEnv(tools=[add])
    with pytest.raises(RuntimeError, match="call reset first"):
        asyncio.run(env.step(Action(text="x", token_ids=[])))
    with pytest.raises(RuntimeError, match="outside an episode"):
        play(env, "answer", "more")


def test_tools_may_be_given_by_name_and_have_openai_schemas() -> None:
    BaseTool.register(add)
    env = ToolEnv(tools=["add", python])
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["add", "python"]


def test_retool_runs_code_in_its_tool_and_answers_as_user() -> None:
    (step,) = play(ToolEnv(tools=[python], tool_format="retool"), "<code>1</code>")
    assert messages(step)[-1] == {
        "role": "user",
        "from_tool": True,
        "content": "<interpreter>\nran 1\n</interpreter>",
    }

    @tool
    def shell(command: str) -> str:
        """Run a command."""
        return f"$ {command}"

    shell_format = RetoolFormat(fixed_tool="shell", argument="command")
    (step,) = play(ToolEnv(tools=[shell], tool_format=shell_format), "<code>ls</code>")
    assert step.calls[0].result == "$ ls"


def test_results_can_be_given_by_the_user_role() -> None:
    (step,) = play(ToolEnv(tools=[add], tool_role="user"), say("add", a=1, b=2))
    assert messages(step)[-1] == {
        "role": "user",
        "from_tool": True,
        "content": "<tool_response>\n3\n</tool_response>",
    }


@pytest.mark.parametrize("name", FORMATS)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<|message|>", " to=functions.add", "<code>", "{", "x"]))
)
@settings(max_examples=50, deadline=None)
def test_any_text_gets_an_answer(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    (step,) = play(ToolEnv(tools=[python], tool_format=name, max_bad_calls=99), text)
    assert step.terminated == (not step.calls)
    assert all(call.result and 0 <= call.text_span[0] < call.text_span[1] <= len(text) for call in step.calls)


@pytest.mark.parametrize(
    ("name", "template"),
    [("harmony", "harmony"), ("hermes", "qwen3"), ("hermes", "qwen2_5"), ("llama3_json", "llama3")],
)
def test_good_and_bad_steps_render_in_the_chat_template_of_the_format(name: str, template: str) -> None:
    def refuse_messages(reason: str) -> None:
        raise AssertionError(reason)

    written = FORMATS[name].write_call("add", {"a": 1, "b": 2})
    bad = {"harmony": "<|channel|>commentary to=functions.add json<|message|>{oops", "hermes": "<tool_call>{oops"}
    *_, last = play(ToolEnv(tools=[add], tool_format=name), written, bad.get(name, "<|python_tag|>oops"), written)
    source = (Path(__file__).parents[1] / "tokens" / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse_messages
    environment.globals["strftime_now"] = lambda form: "today"
    text = environment.from_string(source).render(
        messages=messages(last), tools=[add.schema], add_generation_prompt=True, bos_token=""
    )
    assert "oops" in text
    assert "Tools: add" in text


class Talk(ToolEnv):
    """A user who follows a script, then hangs up."""

    async def reset(self, row: TaskRow) -> Observation:
        self.script, self.heard = ["Both.", "Thanks."], list[str]()
        return await super().reset(row)

    async def reply(self, said: str) -> Reply:
        self.heard.append(said)
        text = self.script.pop(0)
        return Reply(text=text, done=not self.script, reward=0.5, info={"heard": len(self.heard)})


def test_text_without_a_call_goes_to_reply() -> None:
    env = Talk(tools=[add])
    call = say("add", a=1, b=2)
    asked, added, ended = play(env, "<think>which?</think>Which one?", f"Wait. {call}", "It is 3.")
    said = {"role": "assistant", "content": "<think>which?</think>Which one?"}
    assert messages(asked) == [*ROW.prompt, said, {"role": "user", "content": "Both."}]
    assert (asked.terminated, asked.reward, asked.feedback, asked.info) == (False, 0.5, "Both.", {"heard": 1})
    assert len(messages(added)) == 5
    assert messages(asked) == messages(added)[:3]
    assert env.heard == ["Which one?", "It is 3."]  # neither thinking nor what accompanies a call
    assert (ended.terminated, ended.stop, ended.reward, ended.feedback) == (True, StopReason.ANSWERED, 0.5, "Thanks.")
    assert ended.info == {"answer": "It is 3.", "heard": 2}


def test_reply_may_be_sync_and_none_ends_the_episode() -> None:
    class Once(ToolEnv):
        def reply(self, said: str) -> Reply | None:
            return None if said == "bye" else Reply(text=said.upper())

    first, last = play(Once(tools=[add]), "hello", "bye")
    assert (first.feedback, last.terminated, last.info) == ("HELLO", True, {"answer": "bye"})


def test_unreadable_calls_never_reach_reply_and_text_does_not_count_as_one() -> None:
    env = Talk(tools=[add], max_bad_calls=2)
    bad, text, worse = play(env, "<tool_call>{oops}</tool_call>", "Which one?", '{"name": "add", "parameters": {}}')
    assert env.heard == ["Which one?"]
    assert bad.calls[0].error is not None
    assert not text.calls
    assert (worse.terminated, worse.stop) == (True, StopReason.PARSE_LIMIT)


def test_a_reply_of_the_wrong_type_is_named() -> None:
    class Wrong(ToolEnv):
        def reply(self, said: str) -> Any:
            return "hello"

    with pytest.raises(TypeError, match=r"Wrong\.reply returns must be a Reply, got str 'hello'"):
        play(Wrong(tools=[add]), "hello")
