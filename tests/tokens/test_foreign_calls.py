"""Calls in another format than the env reads are malformed calls, and the model learns which format it used."""

from __future__ import annotations

import asyncio
import json

import pytest

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tokens.formats.table import FORMATS, detect_format
from agent_r1.tools.base import tool
from agent_r1.types import Action, StopReason, TaskRow, Transition

TOOLS = ["add", "search", "python"]
CALLS = {name: each.write_call("add", {"a": "1"}) for name, each in FORMATS.items() if name != "retool"} | {
    "retool": FORMATS["retool"].write_call("python", {"code": "print(1)"})
}


@tool
def add(a: int) -> str:
    """Add one."""
    return str(a + 1)


@tool
def python(code: str) -> str:
    """Run code."""
    return code


def step(text: str, tool_format: str = "hermes") -> Transition:
    async def run() -> Transition:
        env = ToolEnv(tools=[python] if tool_format == "retool" else [add, python], tool_format=tool_format)
        await env.reset(TaskRow(prompt=[{"role": "user", "content": "?"}]))
        return await env.step(Action(text=text, token_ids=[]))

    return asyncio.run(run())


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_a_call_is_detected(name: str) -> None:
    assert detect_format(CALLS[name], TOOLS) == name
    assert detect_format(f"I look it up.\n{CALLS[name]}", TOOLS) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', "llama3_json"),
        ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', "llama3_json"),
        ('[{"name": "add", "arguments": {"a": 1}}]', "llama3_json"),
        ("Let me see: [add(a=1)]", "pythonic"),
        ('<tool_call>{"name": "add"', "hermes"),
        ("</tool_call>", "hermes"),
        ("<function=add>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|tool_call_begin|>functions.add", "kimi_k2"),
        (" to=functions.add json{}", "harmony"),
    ],
)
def test_a_broken_call_is_detected_by_its_marks(text: str, name: str) -> None:
    assert detect_format(text, TOOLS) == name


ANSWERS = [
    "It is 4.",
    '{"answer": 4}',
    '{"name": "Rome", "population": 3}',
    '{"name": "Ada", "parameters": {"age": 36}}',  # a person, not a tool
    '{"add": {"a": 1}}',
    "[1, 2, 3]",
    '["add", "search"]',
    "[add]",
    "[add(1, 2)]",  # no call of ours: arguments have names
    "[sorted(key=1)]",
    "[see (a) and (b)]",
    "The calls were [add(a=1)] and so on.",
    "```python\nresult = [add(a=x) for x in range(3)]\nprint(add(a=1))\n```",
    "```python\nimport json\nprint(json.dumps({'name': 'add'}))\n```",
    "Use <code>print(1)</code> in HTML.",
    "<think>I could add</think>4",
    "f(x) = [x(x + 1)] / 2",
    "\\boxed{4}",
    "a < b and c > d | e",
    "Usage: app [OPTIONS] COMMAND [ARGS]...",
    '[{"name": "Ada", "age": 36}]',
]


# What a format itself takes for a call, because nothing but its form tells one from an answer.
OWN = {"llama3_json": ('{"name"',), "pythonic": ("[add(1", "[sorted(", "[add(a=1"), "retool": ("Use <code>",)}
PLAIN = [(name, text) for name in FORMATS for text in ANSWERS if not text.startswith(OWN.get(name, ()))]


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_json_lists_and_code_are_answers(name: str, text: str) -> None:
    assert detect_format(text, TOOLS) is None
    last = step(text, name)
    assert last.terminated
    assert last.stop is StopReason.ANSWERED


OTHERS = [(own, other) for own in FORMATS for other in FORMATS if own != other and other != "retool"]


@pytest.mark.parametrize(("own", "other"), OTHERS)
def test_a_call_in_another_format_does_not_end_the_episode(own: str, other: str) -> None:
    text = CALLS[other].replace("add", "python") if own == "retool" else CALLS[other]
    result = step(text, own)
    assert not result.terminated
    (call,) = result.calls
    assert call.error is not None
    assert FORMATS[own].form in call.error


def test_the_error_names_the_format_that_was_used_and_the_one_to_use() -> None:
    for used in ("llama3_json", "retool"):
        (call,) = step(CALLS[used]).calls
        assert call.error is not None
        assert f"{used!r}" in call.error
        assert FORMATS["hermes"].form in call.error
        assert (call.fault, call.text_span) == ("malformed", (0, len(CALLS[used])))


def test_a_foreign_call_inside_thinking_is_ignored() -> None:
    result = step(f"<think>{CALLS['llama3_json']}</think>{json.dumps({'answer': 2})}")
    assert result.terminated
    assert result.info == {"answer": '{"answer": 2}'}
