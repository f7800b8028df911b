"""What holds for every tool-call format: it never raises, keeps limits, and reads what it writes."""

from __future__ import annotations

import json
import re
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agent_r1.tokens.formats.base import MAX_CALLS, Event, ParsedCall, ParseFailure
from agent_r1.tokens.formats.table import FORMATS
from tests.tokens.test_formats import call

HERMES, RETOOL = FORMATS["hermes"], FORMATS["retool"]


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
        ("glm45", "<tool_call>f</tool_call>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]{}"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{}"),
        ("retool", "<code>1</code>"),
    ],
)
def test_at_most_32_calls_of_a_response_are_read(name: str, piece: str) -> None:
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
    *("</code>", "```python\n", "```", "[[", "1e999", "[", "]", "f", "(a=1)", "f(", ")", ",", "<|python_start|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "{}"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function",
        "<｜tool▁sep｜>",
        "```json\n",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join))


@pytest.mark.parametrize("name", FORMATS)
@given(text=texts)
@example(text="")
@settings(max_examples=200, deadline=None)
def test_parsing_never_raises_and_spans_are_ordered(name: str, text: str) -> None:
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


OPENINGS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function="),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_tag|>"),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_v11": ("[TOOL_CALLS]", "[ARGS]{"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "retool": ("<code>",),
}


@pytest.mark.parametrize(("name", "mark"), [(name, mark) for name, marks in OPENINGS.items() for mark in marks])
@given(before=texts, after=texts)
@settings(max_examples=60, deadline=None)
def test_text_with_the_mark_of_a_call_is_never_an_answer(name: str, mark: str, before: str, after: str) -> None:
    text = f"{before}{mark}{after}".replace("<think>", "").replace("</think>", "")
    assert FORMATS[name].parse(text)[1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", ["</think>", "<think>", "<think></think>", "{", "[f(", "\n[f(a=1", '{"name": "f", '])
def test_parsing_long_texts_takes_linear_time(name: str, piece: str) -> None:
    # Quadratic time would be an hour here. Each piece comes alone, and with what opens a call of the format.
    for mark in ("", *OPENINGS.get(name, ("<|channel|>", "to=functions.f"))[:1]):
        FORMATS[name].parse((mark + piece) * (2**19 // len(mark + piece)))


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
identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(lambda name: not iskeyword(name))


JSON_FORMATS = ["hermes", "llama3_json", "harmony", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "kimi_k2"]


@pytest.mark.parametrize("name", JSON_FORMATS)
@given(tool=names, arguments=st.dictionaries(st.text(), values, max_size=4))
@settings(deadline=None)
def test_json_formats_read_back_what_they_write(name: str, tool: str, arguments: dict[str, Any]) -> None:
    text = FORMATS[name].write_call(tool, arguments)
    assert call(name, text) == (tool, arguments, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>'),
        ("pythonic", "[f(a={value})]"),
    ],
)
def test_arguments_nested_too_deeply_are_a_malformed_call(name: str, text: str) -> None:
    called, arguments, _ = call(name, text.format(value="[" * 50 + "]" * 50))
    assert (called, len(json.dumps(arguments["a"]))) == ("f", 100)
    for levels in (70, 600):
        (event,) = FORMATS[name].parse(text.format(value="[" * levels + "]" * levels))[1]
        assert isinstance(event, ParseFailure)
        assert levels == 600 or "nested more than 60 levels deep" in event.message


def _schema_of(value: Any) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@given(tool=names, arguments=st.dictionaries(names, values, max_size=4))
@settings(deadline=None)
def test_text_formats_read_back_what_they_write_given_the_schema(
    name: str, tool: str, arguments: dict[str, Any]
) -> None:
    # They cannot quote their own tags, and refuse to write such calls; nothing else may be refused.
    assume(not re.search(r"</?(tool_call|function|parameter|think|arg_)", json.dumps(arguments)))
    text = FORMATS[name].write_call(tool, arguments)
    found, as_text, _ = call(name, text)
    schema = {"properties": {key: _schema_of(value) for key, value in arguments.items()}}
    assert (found, FORMATS[name].convert_arguments(as_text, schema)) == (tool, arguments)


@given(tool=identifiers, arguments=st.dictionaries(identifiers, values, max_size=4))
@settings(deadline=None)
def test_pythonic_reads_back_what_it_writes(tool: str, arguments: dict[str, Any]) -> None:
    text = FORMATS["pythonic"].write_call(tool, arguments)
    assert call("pythonic", text) == (tool, arguments, text)


@given(st.text().filter(str.strip))
def test_retool_reads_back_what_it_writes(code: str) -> None:
    assume(not re.search(r"</?code>|```", code))  # these it cannot quote, and refuses
    text = RETOOL.write_call("python", {"code": code})
    assert call("retool", text) == ("python", {"code": code}, text)
