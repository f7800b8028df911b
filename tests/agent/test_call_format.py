"""What every tool-call format keeps: never raises, spans in order, limits, and a round trip of its own writing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agent_r1.agent.call_format import MAX_CALLS, Event, ParsedCall, ParseFailure
from agent_r1.agent.tool_calls import FORMATS

HERMES, CODER, RETOOL = FORMATS["hermes"], FORMATS["qwen3_coder"], FORMATS["retool"]


def call(name: str, text: str) -> tuple[str, dict[str, Any], str]:
    """The only call in the text: its name, its arguments, and the characters of its span."""
    (event,) = FORMATS[name].parse(text)[1]
    assert isinstance(event, ParsedCall), event
    return event.name, event.arguments, text[slice(*event.span)]


def test_results_are_tool_messages_or_one_user_message() -> None:
    calls: list[Event] = [
        ParsedCall(name="f", arguments={}, span=(0, 1)),
        ParseFailure(message="?", span=(1, 2)),
    ]
    assert HERMES.result_messages(["one", "two"], calls) == [
        {"role": "tool", "name": "f", "content": "one"},
        {"role": "tool", "name": "unknown", "content": "two"},
    ]
    wrapped = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert HERMES.result_messages(["one", "two"], calls, "user") == [
        {"role": "user", "from_tool": True, "content": wrapped}
    ]
    assert RETOOL.result_messages(["one"], calls[:1]) == [
        {"role": "user", "from_tool": True, "content": "<interpreter>\none\n</interpreter>"}
    ]
    assert HERMES.assistant_message("<think>a</think>b") == {"role": "assistant", "content": "<think>a</think>b"}


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f>"),
        ("llama3_json", '{"name": "f", "parameters": {}};'),
        ("llama3_json", "<|python_tag|>"),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{}"),
        ("retool", "<code>1</code>"),
    ],
)
def test_a_response_that_repeats_itself_is_cut_off_after_32_calls(name: str, piece: str) -> None:
    text = piece * 10_000
    _, events = FORMATS[name].parse(text)
    assert len(events) == MAX_CALLS + 1 == 33
    assert isinstance(events[-1], ParseFailure)
    assert events[-1].message.startswith("there are more than 32 calls")
    assert events[-1].span == (32 * len(piece), len(text))


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>"),
    *("</parameter>", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', '{"name"', "{", "}", '"'),
    *(";", "\n", "'", "\\", "<|python_tag|>", "<|channel|>", "analysis", "commentary", "final", " to=functions.f "),
    *("<|constrain|>json", "<|start|>", "assistant", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<code>"),
    *("</code>", "```python\n", "```", "[[", "1e999"),
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join))


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts)
@example(text="")
@settings(max_examples=400, deadline=None)
def test_parsing_never_raises_and_spans_lie_in_order_inside_the_text(name: str, text: str) -> None:
    content, events = FORMATS[name].parse(text)
    at = 0
    for event in events:
        start, end = event.span
        assert at <= start < end <= len(text)
        at = end
    assert len(content) <= len(text) + 1  # harmony joins its messages with newlines, in place of longer tokens
    message = FORMATS[name].assistant_message(text)
    assert message["role"] == "assistant"
    json.dumps(message)
    if name == "harmony":  # whose template refuses contents that carry channels
        assert "<|channel|>" not in message["content"] + message.get("thinking", "")


@pytest.mark.parametrize(
    ("name", "mark"),
    [("hermes", "<tool_call>"), ("qwen3_coder", "<function="), ("llama3_json", "<|python_tag|>"), ("retool", "<code>")],
)
@given(before=texts, after=texts)
@settings(deadline=None)
def test_the_mark_of_a_call_is_never_part_of_an_answer(name: str, mark: str, before: str, after: str) -> None:
    text = f"{before}{mark}{after}".replace("<think>", "").replace("</think>", "")
    assert FORMATS[name].parse(text)[1]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "harmony"])
@given(tool=names, arguments=st.dictionaries(st.text(), values, max_size=4))
@settings(deadline=None)
def test_json_formats_read_back_what_they_write(name: str, tool: str, arguments: dict[str, Any]) -> None:
    text = FORMATS[name].write_call(tool, arguments)
    assert call(name, text) == (tool, arguments, text)


def _schema_of(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


@given(tool=names, arguments=st.dictionaries(names, values, max_size=4))
@settings(deadline=None)
def test_qwen3_coder_reads_back_what_it_writes_given_the_schema(tool: str, arguments: dict[str, Any]) -> None:
    # It cannot quote its own tags, and refuses to write such calls; nothing else may be refused.
    assume(not re.search(r"</?(tool_call|function|parameter|think)", json.dumps(arguments)))
    text = CODER.write_call(tool, arguments)
    found, as_text, _ = call("qwen3_coder", text)
    schema = {"properties": {key: _schema_of(value) for key, value in arguments.items()}}
    assert (found, CODER.typed(as_text, schema)) == (tool, arguments)


@given(st.text().filter(str.strip))
def test_retool_reads_back_what_it_writes(code: str) -> None:
    assume(not re.search(r"</?code>|```", code))  # these it cannot quote, and refuses
    text = RETOOL.write_call("python", {"code": code})
    assert call("retool", text) == ("python", {"code": code}, text)
