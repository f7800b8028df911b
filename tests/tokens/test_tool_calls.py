"""Wire formats of tool calls: what is a call, what is a failed one, and where it stands in the text."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.tokens.formats import FORMATS, Event, ParsedCall, ParseFailure, RetoolFormat

HERMES, CODER, LLAMA = FORMATS["hermes"], FORMATS["qwen3_coder"], FORMATS["llama3_json"]
HARMONY, RETOOL = FORMATS["harmony"], FORMATS["retool"]


def only(events: list[Event]) -> Event:
    assert len(events) == 1, events
    return events[0]


def failure(name: str, text: str) -> ParseFailure:
    event = only(FORMATS[name].parse(text)[1])
    assert isinstance(event, ParseFailure), event
    return event


def call(name: str, text: str) -> tuple[str, dict[str, Any], str]:
    """The only call in the text: its name, its arguments, and the characters of its span."""
    event = only(FORMATS[name].parse(text)[1])
    assert isinstance(event, ParsedCall), event
    return event.name, event.arguments, text[slice(*event.span)]


# hermes


def test_hermes_reads_calls_in_order_and_leaves_the_words_between_them() -> None:
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    two = '<tool_call>{"name": "neg", "arguments": "{\\"x\\": 2}"}</tool_call>'  # some models quote the object
    text = f"First {one} then {two}."
    content, events = HERMES.parse(text)
    assert content == "First  then ."
    assert [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)] == [
        ("add", {"a": 1}),
        ("neg", {"x": 2}),
    ]
    assert [text[slice(*e.span)] for e in events] == [one, two]


def test_hermes_is_not_misled_by_tags_inside_strings() -> None:
    arguments = {"code": "</tool_call> <tool_call> </think> <think>"}
    text = HERMES.write_call("python", arguments)
    assert call("hermes", text) == ("python", arguments, text)


def test_a_call_while_thinking_is_no_call() -> None:
    inner = HERMES.write_call("add", {"a": 1})
    outer = HERMES.write_call("add", {"a": 2})
    for text in (
        f"<think>maybe {inner}</think>done {outer}",
        f"maybe {inner}</think>done {outer}",  # the prompt ends with <think>
        f"or an unclosed <tool_call> even</think>done {outer}",
    ):
        assert call("hermes", text)[1:] == ({"a": 2}, outer)
        assert HERMES.parse(text)[0] == "done"
    assert HERMES.parse(f"<think>{inner}</think>42") == ("42", [])
    assert "close it with </think>" in failure("hermes", f"<think>so: {inner}").message


@pytest.mark.parametrize(
    ("text", "message", "bad"),
    [
        ('a <tool_call>{"name": "f"', "not closed with </tool_call>", '<tool_call>{"name": "f"'),
        ('<tool_call>{"name": "f", "arguments": {}}', "not closed with </tool_call>", None),
        ("<tool_call>{'name'}</tool_call> b", "cannot be read: Expecting property", "<tool_call>{'name'}</tool_call>"),
        ("<tool_call></tool_call>", "cannot be read: Expecting value", None),
        ('<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "unexpected 'x' after it", None),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" of the call must be', None),
        ('<tool_call>{"name": "f"}</tool_call>', '"arguments" of the call is missing', None),
        ('<tool_call>{"arguments": {}}</tool_call>', 'the call has no "name"', None),
        ("<tool_call>[]</tool_call>", 'the call has no "name"', None),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not JSON compliant", None),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed", None),
        ('<tool_call>{"name": "f", "arguments": {"x": "</think>" oops}}</tool_call>', "cannot be read", None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion", None),
    ],
)  # fmt: skip
def test_a_malformed_hermes_call_is_an_event_that_says_what_is_wrong(text: str, message: str, bad: str | None) -> None:
    event = failure("hermes", text)
    assert message in event.message
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in event.message
    assert text[slice(*event.span)] == (bad or text)


def test_only_a_first_end_of_thinking_turns_what_came_before_into_thoughts() -> None:
    one, two = HERMES.write_call("add", {"a": 1}), HERMES.write_call("add", {"a": 2})
    answer = f"<think>so</think>{one}</think>done"  # the thinking was closed, so the second tag is a slip
    assert call("hermes", answer)[1:] == ({"a": 1}, one)
    assert [e.span for e in HERMES.parse(f"x</think>{one}</think>{two}")[1]] == [
        (9, 9 + len(one)),
        (17 + len(one), 17 + len(one) + len(two)),
    ]
    # Nobody knows whether the prompt opened the thinking: with no call after the tag, the one before it counts.
    assert call("hermes", f"{one}</think>")[2] == one
    assert HERMES.parse(f"{one}</think>done")[0] == "done"
    # Known from the chat template, it is decided.
    assert HERMES.for_prompt(thinks=True).parse(f"{one}</think>done") == ("done", [])
    assert len(HERMES.for_prompt(thinks=False).parse(f"{one}</think>{two}")[1]) == 2
    assert HERMES.prompt_thinks is None  # the registered one is as it was


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_a_closing_tag_without_its_opening_is_a_malformed_call(name: str) -> None:
    event = failure(name, '{"name": "add", "arguments": {}}\n</tool_call>')
    assert event.message == f"</tool_call> closes no call. Write {FORMATS[name].form}"


def test_an_unclosed_call_does_not_swallow_the_next_one() -> None:
    good = HERMES.write_call("add", {"a": 1})
    first, second = HERMES.parse(f'<tool_call>{{"name": "add" {good}')[1]
    assert isinstance(first, ParseFailure)
    assert isinstance(second, ParsedCall)
    assert second.arguments == {"a": 1}


# qwen3_coder


def test_qwen3_coder_reads_values_as_text_and_types_them_by_the_schema() -> None:
    text = (
        "<tool_call>\n<function=plot>\n<parameter=xs>\n[1, 2]\n</parameter>\n<parameter=label>\n42\n</parameter>\n"
        "<parameter=grid>True</parameter>\n<parameter=n>\nmany\n</parameter>\n</function>\n</tool_call>"
    )
    name, arguments, _ = call("qwen3_coder", text)
    assert (name, arguments) == ("plot", {"xs": "[1, 2]", "label": "42", "grid": "True", "n": "many"})
    properties = {
        "xs": {"type": "array"},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "grid": {"type": "boolean"},
        "n": {"type": "integer"},
    }
    # "many" is no integer: left for the tool's own check, which tells the model
    assert CODER.convert_arguments(arguments, {"properties": properties}) == {
        "xs": [1, 2],
        "label": "42",
        "grid": True,
        "n": "many",
    }


def test_qwen3_coder_keeps_the_lines_of_a_value() -> None:
    code = "\n  if x:\n    y()\n\n"
    assert call("qwen3_coder", CODER.write_call("run", {"code": code}))[1] == {"code": code}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call><function=f><parameter=a>1</parameter></function>", "not closed with </tool_call>"),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", "'a' is not closed with </parameter>"),
        ("<tool_call><function=f>1</function></tool_call>", "found '1</function>"),
        ("<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>", "'a' is not closed"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "no tool name"),
        ("<function=f><parameter=a>1</parameter></function>", "not inside <tool_call>"),
    ],
)
def test_a_malformed_qwen3_coder_call_is_an_event(text: str, message: str) -> None:
    event = failure("qwen3_coder", text)
    assert message in event.message
    assert event.span == (0, len(text))


def test_qwen3_coder_ignores_calls_while_thinking_and_refuses_to_write_its_own_tags() -> None:
    assert CODER.parse(f"<think>{CODER.write_call('f', {'a': 1})}</think>yes") == ("yes", [])
    for arguments in ({"a": "</parameter>"}, {"a": "</tool_call>"}, {"a b": "x"}, {"": "x"}):
        with pytest.raises(ValueError, match="cannot write this call"):
            CODER.write_call("f", arguments)


# llama3_json


def test_llama_reads_bare_json_tagged_json_and_several_at_once() -> None:
    one, two = LLAMA.write_call("f", {"a": "x; {y}"}), LLAMA.write_call("g", {})
    assert call("llama3_json", one) == ("f", {"a": "x; {y}"}, one)
    assert call("llama3_json", f"<|python_tag|>{one}") == ("f", {"a": "x; {y}"}, f"<|python_tag|>{one}")
    assert call("llama3_json", f"Let me see: {one}")[2] == one
    assert call("llama3_json", '{"type": "function", "name": "f", "parameters": {}}')[0] == "f"
    content, events = LLAMA.parse(f"<|python_tag|>{one}; {two};\n{one}")
    assert content == ""
    assert [event.name for event in events] == ["f", "g", "f"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|python_tag|>print(1)", "cannot be read: Expecting value"),
        ('{"name": "f", "parameters": {"a": 1}', "cannot be read"),
        ("{'name': 'f', 'parameters': {}}", "cannot be read"),
        ('{"name": "f"}', '"parameters" of the call is missing'),
        ('{"name": "f", "arguments": {}}', '"parameters" of the call is missing'),
        ("<|python_tag|>", "at the end"),
    ],
)
def test_a_malformed_llama_call_is_an_event(text: str, message: str) -> None:
    event = failure("llama3_json", text)
    assert message in event.message
    assert event.span == (0, len(text))


@pytest.mark.parametrize("text", ["The answer is 4.", '{"answer": 4}', "Use {x} and {name}.", 'a {"name": "Rome"}'])
def test_an_answer_that_only_contains_braces_is_an_answer_to_llama(text: str) -> None:
    assert LLAMA.parse(text) == (text, [])


# harmony

THINK = "<|channel|>analysis<|message|>to=functions.no {}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "written",
    [
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"k": "<|end|>"}<|call|>',
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"k": "<|end|>"}',  # stop token taken off
        ' to=functions.get<|channel|>commentary json<|message|>{"k": "<|end|>"}<|call|>',  # as templates do
        '<|channel|>analysis to=functions.get code<|message|>{"k": "<|end|>"}<|call|>',
    ],
)
def test_a_harmony_message_to_a_function_is_a_call(written: str) -> None:
    text = THINK + written
    assert call("harmony", text) == ("get", {"k": "<|end|>"}, "<|start|>assistant" + written)
    assert HARMONY.assistant_message(text) == {
        "role": "assistant",
        "content": "",
        "thinking": "to=functions.no {}",
        "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"k": "<|end|>"}}}],
    }


def test_the_final_channel_is_the_answer_and_analysis_is_not() -> None:
    text = f"{THINK}<|channel|>final<|message|>It is 4.<|return|>"
    assert HARMONY.parse(text) == ("It is 4.", [])
    message = {"role": "assistant", "content": "It is 4.", "thinking": "to=functions.no {}"}
    assert HARMONY.assistant_message(text) == message
    assert HARMONY.parse("plain") == ("plain", [])
    assert HARMONY.assistant_message("plain") == {"role": "assistant", "content": "plain"}


def test_words_before_a_harmony_call_are_kept_with_the_thinking() -> None:
    # the chat template refuses a call with both content and thinking
    text = f"{THINK}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY.write_call('get', {})}"
    message = HARMONY.assistant_message(text)
    assert HARMONY.parse(text)[0] == "I look."
    assert (message["content"], message["thinking"]) == ("", "to=functions.no {}\nI look.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{oops<|call|>",
            "cannot be read: Expecting",
        ),
        ("<|channel|>commentary to=functions.get <|constrain|>json<|message|>{} and<|call|>", "unexpected ' and"),
        ("<|channel|>commentary to=functions.get json<|message|>[1]<|call|>", "must be a JSON object, got list"),
        ("<|channel|>commentary to=functions.get", "stops before its <|message|>"),
        ("to=functions.get json{}", "stops before its <|message|>"),  # decoded without special tokens
    ],
)
def test_a_malformed_harmony_call_is_an_event_and_still_a_call_to_the_template(text: str, message: str) -> None:
    event = failure("harmony", text)
    assert message in event.message
    assert (event.name, event.span) == ("get", (0, len(text)))
    assert HARMONY.assistant_message(text)["tool_calls"][0]["function"]["name"] == "get"


@pytest.mark.parametrize(
    "written",
    [
        "<|channel|>commentary to=functions.get <|constrain|>json{}<|call|>",
        "<|start|>assistant to=functions.get<|channel|>commentary json{}",
        " to=functions.get{}",
    ],
)
def test_a_harmony_call_without_a_message_is_malformed_also_before_a_later_message(written: str) -> None:
    content, events = HARMONY.parse(f"{written}<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>")
    event = only(events)
    assert isinstance(event, ParseFailure)
    assert "stops before its <|message|>" in event.message
    assert event.name.startswith("get")
    assert content == "It is 4."


def test_a_second_harmony_call_of_one_message_is_refused() -> None:
    one = HARMONY.write_call("get", {"a": 1})
    first, second = HARMONY.parse(f"{one}<|start|>assistant{one}")[1]
    assert isinstance(first, ParsedCall)
    assert isinstance(second, ParseFailure)
    assert "only the first call" in second.message


# retool


@pytest.mark.parametrize(
    "text",
    [
        "<code>print(1)</code>",
        "<code>\nprint(1)\n</code>",
        "<code>\n```python\nprint(1)\n```\n</code>",
        "<code>```py\nprint(1)```</code>",
    ],
)
def test_retool_reads_code_with_or_without_a_fence(text: str) -> None:
    assert call("retool", f"I compute {text}") == ("python", {"code": "print(1)"}, text)


def test_retool_blocks_are_calls_of_the_tool_the_format_names() -> None:
    text = "<code>a = 1</code> and <code>\n```python\ns = '</code>'\n```\n</code>"
    content, events = RetoolFormat(fixed_tool="shell", argument="command").parse(text)
    assert content == "and"
    found = [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)]
    assert found == [("shell", {"command": "a = 1"}), ("shell", {"command": "s = '</code>'"})]
    assert "not closed with </code>" in failure("retool", "<code>print(1)").message
    assert "is empty" in failure("retool", "<code> </code>").message
    # an open fence does not reach into the next block
    assert len(RETOOL.parse("<code>```python\na</code> <code>```python\nb\n```</code>")[1]) == 2


def test_retool_refuses_to_write_what_it_cannot_say() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("bash", {"code": "x"}),
        ("python", {"code": "x", "seed": 1}),
        ("python", {"code": 1}),
        ("python", {"code": " "}),
        ("python", {"code": "a\n```\n</code>"}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match="cannot write this call"):
            RETOOL.write_call(name, arguments)
