"""Malformed calls: each is an event that tells the model what is wrong and how to write a call."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.tokens.formats.table import FORMATS
from tests.tokens.test_formats import KIMI, V3, V31, failure

MALFORMED = {
    "hermes": [
        ('<tool_call>{"name": "f"', "not closed with </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}', "not closed with </tool_call>"),
        ("<tool_call>{'name'}</tool_call>", "Expecting property"),
        ("<tool_call></tool_call>", "Expecting value"),
        ('<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "unexpected 'x'"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments"'),
        ('<tool_call>{"name": "f"}</tool_call>', '"arguments"'),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("<tool_call>[]</tool_call>", '"name"'),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not JSON compliant"),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "f", "arguments": {"x": "</think>" oops}}</tool_call>', "cannot be read"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion"),
    ],
    "qwen3_coder": [
        ("<tool_call><function=f><parameter=a>1</parameter></function>", "not closed with </tool_call>"),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", "'a' is not closed with </parameter>"),
        ("<tool_call><function=f>1</function></tool_call>", "found '1</function>"),
        ("<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>", "'a' is not closed"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "no tool name"),
        ("<function=f><parameter=a>1</parameter></function>", "not inside <tool_call>"),
    ],
    "glm45": [
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "'a' is not closed with </arg_value>"),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "unexpected '<arg_key>a</arg_key>'"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "not closed with </tool_call>"),
        ("<tool_call>f", "not closed with </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "no tool name"),
    ],
    "llama3_json": [
        ("<|python_tag|>print(1)", "Expecting value"),
        ('{"name": "f", "parameters": {"a": 1}', "cannot be read"),
        ("{'name': 'f', 'parameters': {}}", "cannot be read"),
        ('{"name": "f"}', '"parameters"'),
        ('{"name": "f", "arguments": {}}', '"parameters"'),
        ("<|python_tag|>", "at the end"),
    ],
    "pythonic": [
        ("[f(1)]", "by name"),
        ("[f(**{'a': 1})]", "by name"),
        ("[f(a=open('/etc/passwd'))]", "malformed node"),
        ("[f(a=b)]", "malformed node"),
        ("[f(a=1, a=2)]", "given twice"),
        ("[f(a=b'x')]", "not JSON serializable"),
        ("[f(a=1e999)]", "not JSON compliant"),
        ("[f(a=1)(b=2)]", "is not a call"),
        ("[f(a=1", "not closed with ]"),
        ("[f(a=" + "[" * 10_000, "not closed with ]"),
        ("[f(a=" + "[" * 10_000 + "]" * 10_000 + ")]", "too many nested"),
        ("<|python_tag|>print(1)", "list of calls is missing"),
    ],
    "mistral": [
        ("[TOOL_CALLS]", "expected a JSON list"),
        ("[TOOL_CALLS] []", "Expecting value at ']'"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}', "expected , or ]"),
        ('[TOOL_CALLS] [{"name": "f"}]', '"arguments"'),
        ("[TOOL_CALLS]f[ARGS]{}", "expected a JSON list"),
    ],
    "mistral_v11": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "no tool name"),
        ("[TOOL_CALLS]f[ARGS]", "Expecting value at the end"),
    ],
    "deepseek_v3": [
        (V31.format("f", "{}"), "no tool name"),
        (V3.format("f", "{}").removesuffix("<｜tool▁call▁end｜>"), "unexpected '\\n```'"),
        ("<｜tool▁calls▁begin｜>", "outside a call"),
    ],
    "deepseek_v31": [
        (V3.format("f", "{}"), "Expecting value at 'f"),
        (V31.format("f", "{}").removesuffix("<｜tool▁call▁end｜>"), "not closed"),
    ],
    "kimi_k2": [
        (KIMI.format("f", "{oops"), "Expecting property name"),
        ("<|tool_call_begin|>", "no tool name at ''"),
    ],
    "harmony": [
        ("<|channel|>commentary to=functions.get <|constrain|>json<|message|>{oops<|call|>", "Expecting"),
        ("<|channel|>commentary to=functions.get <|constrain|>json<|message|>{} and<|call|>", "unexpected ' and"),
        ("<|channel|>commentary to=functions.get json<|message|>[1]<|call|>", "must be a JSON object, got list"),
        ("<|channel|>commentary to=functions.get", "stops before its <|message|>"),
        ("to=functions.get json{}", "stops before its <|message|>"),  # decoded without special tokens
    ],
    "retool": [("<code>print(1)", "not closed with </code>"), ("<code> </code>", "is empty")],
}


@pytest.mark.parametrize(
    ("name", "text", "problem"), [(name, *case) for name, cases in MALFORMED.items() for case in cases]
)
def test_a_malformed_call_is_an_event_that_says_what_is_wrong(name: str, text: str, problem: str) -> None:
    event = failure(name, text)
    assert problem in event.message
    assert event.message.endswith(FORMATS[name].form)
    assert (event.span, event.malformed) == ((0, len(text)), True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{"name": "add", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", '{"name": "add", "arguments": {}}\n</tool_call>'),
        ("glm45", "f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("mistral", "f[ARGS]{}"),
        ("mistral_v11", "f[ARGS]{}"),
    ],
)
def test_a_stray_mark_is_a_malformed_call(name: str, text: str) -> None:
    event = failure(name, text)
    assert event.span[0] > 0
    assert event.span[1] == len(text)


@pytest.mark.parametrize(
    ("name", "tool", "arguments"),
    [
        ("qwen3_coder", "f", {"a": "</parameter>"}),
        ("qwen3_coder", "f", {"a": "</tool_call>"}),
        ("qwen3_coder", "f", {"a b": "x"}),
        ("qwen3_coder", "f", {"": "x"}),
        ("glm45", "f", {"a": "</arg_value>"}),
        ("pythonic", "f", {"class": 1}),
        ("pythonic", "f", {"a b": 1}),
        ("pythonic", "f", {"a-b": 1}),
        ("retool", "bash", {"code": "x"}),
        ("retool", "python", {"code": "x", "seed": 1}),
        ("retool", "python", {"code": 1}),
        ("retool", "python", {"code": " "}),
        ("retool", "python", {"code": "a\n```\n</code>"}),
    ],
)
def test_a_format_refuses_to_write_a_call_that_it_cannot_read(name: str, tool: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot write this call"):
        FORMATS[name].write_call(tool, arguments)


@pytest.mark.parametrize("text", [text for text, _ in MALFORMED["harmony"]])
def test_a_malformed_harmony_call_is_still_a_call_to_the_template(text: str) -> None:
    assert failure("harmony", text).name == "get"
    message = FORMATS["harmony"].assistant_message(text)
    assert message["tool_calls"][0]["function"]["name"] == "get"
