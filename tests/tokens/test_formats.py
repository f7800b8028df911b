"""Tool-call formats: which text is a call, which is a malformed one, and where it is in the response."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.tokens.formats.base import ParsedCall, ParseFailure
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.table import FORMATS

HERMES, CODER, LLAMA = FORMATS["hermes"], FORMATS["qwen3_coder"], FORMATS["llama3_json"]
HARMONY, RETOOL = FORMATS["harmony"], FORMATS["retool"]

A1 = '{"a": 1}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def call(name: str, text: str) -> tuple[str, dict[str, Any], str]:
    """The only call in the text: its name, its arguments, and the characters of its span."""
    (event,) = FORMATS[name].parse(text)[1]
    assert isinstance(event, ParsedCall), event
    return event.name, event.arguments, text[slice(*event.span)]


def calls(name: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, event.arguments) for event in FORMATS[name].parse(text)[1] if isinstance(event, ParsedCall)]


def failure(name: str, text: str) -> ParseFailure:
    (event,) = FORMATS[name].parse(text)[1]
    assert isinstance(event, ParseFailure), event
    return event


# Thinking


def test_calls_inside_thinking_are_ignored() -> None:
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
    assert CODER.parse(f"<think>{CODER.write_call('f', {'a': 1})}</think>yes") == ("yes", [])
    unclosed = failure("hermes", f"<think>so: {inner}")
    assert "close it with </think>" in unclosed.message
    assert not unclosed.malformed


def test_only_the_first_end_of_thinking_hides_the_calls_before_it() -> None:
    one, two = HERMES.write_call("add", {"a": 1}), HERMES.write_call("add", {"a": 2})
    answer = f"<think>so</think>{one}</think>done"  # the thinking was closed, so the second tag is stray
    assert call("hermes", answer)[1:] == ({"a": 1}, one)
    assert [e.span for e in HERMES.parse(f"x</think>{one}</think>{two}")[1]] == [
        (9, 9 + len(one)),
        (17 + len(one), 17 + len(one) + len(two)),
    ]
    # It is unknown whether the prompt opened the thinking: without a call after the tag, the one before it counts.
    assert call("hermes", f"{one}</think>")[2] == one
    assert HERMES.parse(f"{one}</think>done")[0] == "done"
    # Known from the chat template, it is decided.
    assert HERMES.for_prompt(thinks=True).parse(f"{one}</think>done") == ("done", [])
    assert len(HERMES.for_prompt(thinks=False).parse(f"{one}</think>{two}")[1]) == 2
    assert HERMES.prompt_thinks is None  # the registered format does not change


# hermes


def test_hermes_reads_calls_in_order_and_leaves_the_words_between_them() -> None:
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    two = '<tool_call>{"name": "neg", "arguments": "{\\"x\\": 2}"}</tool_call>'  # some models quote the object
    text = f"First {one} then {two}."
    content, events = HERMES.parse(text)
    assert content == "First  then ."
    assert calls("hermes", text) == [("add", {"a": 1}), ("neg", {"x": 2})]
    assert [text[slice(*e.span)] for e in events] == [one, two]


def test_hermes_ignores_tags_inside_strings() -> None:
    arguments = {"code": "</tool_call> <tool_call> </think> <think>"}
    text = HERMES.write_call("python", arguments)
    assert call("hermes", text) == ("python", arguments, text)


def test_an_unclosed_call_does_not_swallow_the_next_one() -> None:
    first, second = HERMES.parse(f'<tool_call>{{"name": "add" {HERMES.write_call("add", {"a": 1})}')[1]
    assert isinstance(first, ParseFailure)
    assert isinstance(second, ParsedCall)
    assert second.arguments == {"a": 1}


# qwen3_coder and glm45


def test_qwen3_coder_reads_values_as_text_and_converts_them_by_the_schema() -> None:
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
    # "many" is not an integer: left to the tool's own validation, which tells the model
    converted = {"xs": [1, 2], "label": "42", "grid": True, "n": "many"}
    assert CODER.convert_arguments(arguments, {"properties": properties}) == converted


def test_glm_reads_a_name_and_pairs_of_key_and_value() -> None:
    one = "<tool_call>plot\n<arg_key>xs</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
    two = "<tool_call>stop</tool_call>"  # GLM 4.7 writes no newlines
    text = f"<think>{two}</think>I plot.\n{one}\n{two}"
    assert FORMATS["glm45"].parse(text)[0] == "I plot."
    assert calls("glm45", text) == [("plot", {"xs": "[1, 2]"}), ("stop", {})]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_text_values_keep_their_lines(name: str) -> None:
    for code in ("\n  if x:\n    y()\n\n", " two\nlines "):
        assert call(name, FORMATS[name].write_call("run", {"code": code}))[1] == {"code": code}


# llama3_json and pythonic


def test_llama_reads_bare_json_tagged_json_and_several_calls() -> None:
    one, two = LLAMA.write_call("f", {"a": "x; {y}"}), LLAMA.write_call("g", {})
    assert call("llama3_json", one) == ("f", {"a": "x; {y}"}, one)
    assert call("llama3_json", f"<|python_tag|>{one}") == ("f", {"a": "x; {y}"}, f"<|python_tag|>{one}")
    assert call("llama3_json", f"Let me see: {one}")[2] == one
    assert call("llama3_json", '{"type": "function", "name": "f", "parameters": {}}')[0] == "f"
    content, events = LLAMA.parse(f"<|python_tag|>{one}; {two};\n{one}")
    assert content == ""
    assert [event.name for event in events] == ["f", "g", "f"]


@pytest.mark.parametrize("text", ["The answer is 4.", '{"answer": 4}', "Use {x} and {name}.", 'a {"name": "Rome"}'])
def test_an_answer_with_braces_is_not_a_llama_call(text: str) -> None:
    assert LLAMA.parse(text) == (text, [])


def test_pythonic_reads_literals_and_several_calls() -> None:
    text = """[get_weather(city="Rome, [x]", days=3, tags=['a', "b"], on=True), stop(), f.g(x={"k": null}, y=-1.5)]"""
    text = f"<think>[no()]</think>\n{text}"
    assert FORMATS["pythonic"].parse(text)[0] == ""
    assert calls("pythonic", text) == [
        ("get_weather", {"city": "Rome, [x]", "days": 3, "tags": ["a", "b"], "on": True}),
        ("stop", {}),
        ("f.g", {"x": {"k": None}, "y": -1.5}),
    ]
    tagged = "<|python_start|>[stop()]<|python_end|>"  # Llama 4
    assert call("pythonic", tagged) == ("stop", {}, tagged)
    assert call("pythonic", "[f(a=(1, 2), b={1: 2})]")[1] == {"a": [1, 2], "b": {"1": 2}}  # as JSON has them
    good, bad = FORMATS["pythonic"].parse("[f(a=1), g(2)]")[1]
    assert isinstance(good, ParsedCall)
    assert isinstance(bad, ParseFailure)
    assert bad.name == "g"


# mistral, deepseek, kimi


def test_mistral_reads_a_list_of_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]'
    assert FORMATS["mistral"].parse(f"I look.{text}")[0] == "I look."
    assert calls("mistral", text) == [("f", {"a": 1}), ("g", {})]
    assert "".join(text[slice(*e.span)] for e in FORMATS["mistral"].parse(text)[1]) == text


def test_mistral_v11_reads_a_mark_per_call() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{}'
    assert calls("mistral_v11", text) == [("f", {"a": 1}), ("g", {}), ("h", {})]
    ids = [event.call_id for event in FORMATS["mistral_v11"].parse(text)[1] if isinstance(event, ParsedCall)]
    assert ids == ["", "abcdefghi", ""]


@pytest.mark.parametrize(
    ("name", "opens", "each", "closes"),
    [
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", V3, "<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>", V31, "<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>", KIMI, "<|tool_calls_section_end|>"),
    ],
)
def test_a_section_of_calls_is_read_completely(name: str, opens: str, each: str, closes: str) -> None:
    text = f"so</think>I look.{opens}{each.format('f', A1)}\n{each.format('g', '{}')}{closes}"
    assert FORMATS[name].parse(text)[0] == "I look."
    assert calls(name, text) == [("f", {"a": 1}), ("g", {})]
    assert FORMATS[name].write_call("f", {"a": 1}) == f"{opens}{each.format('f', A1)}{closes}"
    # A call that was cut, or lost its arguments, does not affect the next one.
    for cut in (each.format("f", '{"a": 1'), each.format("f", "[1]"), each[:12]):
        bad, good = FORMATS[name].parse(f"{opens}{cut}{each.format('g', '{}')}{closes}")[1]
        assert isinstance(bad, ParseFailure)
        assert isinstance(good, ParsedCall)


def test_calls_with_special_tokens_reach_the_template_as_tool_calls_with_ids() -> None:
    kimi = FORMATS["kimi_k2"]
    text = f"<think>hm</think>I look.\n{KIMI.format('f', A1).replace(':0', ':3')}<|tool_call_begin|>oops"
    assert kimi.assistant_message(text) == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "functions.f:3", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "call00001", "type": "function", "function": {"name": "", "arguments": ""}},
        ],
    }
    assert kimi.result_messages(["one", "two"], kimi.parse(text)[1]) == [
        {"role": "tool", "name": "f", "tool_call_id": "functions.f:3", "content": "one"},
        {"role": "tool", "name": "unknown", "tool_call_id": "call00001", "content": "two"},
    ]
    # DeepSeek's templates concatenate the arguments with other text.
    message = FORMATS["deepseek_v3"].assistant_message(V3.format("f", '{"a": 1}'))
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == (None, '{"a": 1}')
    assert kimi.assistant_message("It is 4.") == {"role": "assistant", "content": "It is 4."}


# harmony

THINK = "<|channel|>analysis<|message|>to=functions.no {}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "written",
    [
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"k": "<|end|>"}<|call|>',
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"k": "<|end|>"}',  # without stop token
        ' to=functions.get<|channel|>commentary json<|message|>{"k": "<|end|>"}<|call|>',  # as templates write it
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


def test_words_before_a_harmony_call_become_thinking() -> None:
    # the chat template refuses a call with both content and thinking
    text = f"{THINK}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY.write_call('get', {})}"
    message = HARMONY.assistant_message(text)
    assert HARMONY.parse(text)[0] == "I look."
    assert (message["content"], message["thinking"]) == ("", "to=functions.no {}\nI look.")


@pytest.mark.parametrize(
    "written",
    [
        "<|channel|>commentary to=functions.get <|constrain|>json{}<|call|>",
        "<|start|>assistant to=functions.get<|channel|>commentary json{}",
        " to=functions.get{}",
    ],
)
def test_a_harmony_call_without_a_message_is_malformed_even_before_another_message(written: str) -> None:
    text = f"{written}<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    event = failure("harmony", text)
    assert "stops before its <|message|>" in event.message
    assert event.name.startswith("get")
    assert HARMONY.parse(text)[0] == "It is 4."


def test_a_second_harmony_call_of_one_message_is_refused() -> None:
    one = HARMONY.write_call("get", {"a": 1})
    first, second = HARMONY.parse(f"{one}<|start|>assistant{one}")[1]
    assert isinstance(first, ParsedCall)
    assert isinstance(second, ParseFailure)
    assert "only the first call" in second.message
    assert not second.malformed


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


def test_retool_blocks_call_the_tool_of_the_format() -> None:
    text = "<code>a = 1</code> and <code>\n```python\ns = '</code>'\n```\n</code>"
    content, events = RetoolFormat(fixed_tool="shell", argument="command").parse(text)
    assert content == "and"
    found = [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)]
    assert found == [("shell", {"command": "a = 1"}), ("shell", {"command": "s = '</code>'"})]
    # an open fence does not reach into the next block
    assert len(RETOOL.parse("<code>```python\na</code> <code>```python\nb\n```</code>")[1]) == 2
