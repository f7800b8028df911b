"""Wire formats of GLM, Llama (pythonic), Mistral, DeepSeek and Kimi, as their models and templates write them."""

from __future__ import annotations

import pytest

from agent_r1.tokens.formats import FORMATS, ParsedCall, ParseFailure
from tests.tokens.test_tool_calls import call, failure

# glm45


def test_glm_reads_a_name_and_pairs_of_key_and_value() -> None:
    one = "<tool_call>plot\n<arg_key>xs</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
    two = "<tool_call>stop</tool_call>"  # GLM 4.7 writes no newlines
    content, events = FORMATS["glm45"].parse(f"<think>{two}</think>I plot.\n{one}\n{two}")
    assert content == "I plot."
    assert [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)] == [
        ("plot", {"xs": "[1, 2]"}),
        ("stop", {}),
    ]
    assert FORMATS["glm45"].convert_arguments({"xs": "[1, 2]"}, {"properties": {"xs": {"type": "array"}}}) == {
        "xs": [1, 2]
    }
    assert call("glm45", FORMATS["glm45"].write_call("say", {"text": " two\nlines "}))[1] == {"text": " two\nlines "}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
            "the value of 'a' is not closed with </arg_value>",
        ),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "unexpected '<arg_key>a</arg_key>' after it"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "not closed with </tool_call>"),
        ("<tool_call>f", "not closed with </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "no tool name"),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "not inside <tool_call>"),
    ],
)
def test_a_malformed_glm_call_is_an_event(text: str, message: str) -> None:
    assert message in failure("glm45", text).message
    with pytest.raises(ValueError, match="cannot write this call"):
        FORMATS["glm45"].write_call("f", {"a": "</arg_value>"})


# pythonic


def test_pythonic_reads_literals_and_several_calls() -> None:
    text = """[get_weather(city="Rome, [x]", days=3, tags=['a', "b"], on=True), stop(), f.g(x={"k": null}, y=-1.5)]"""
    content, events = FORMATS["pythonic"].parse(f"<think>[no()]</think>\n{text}")
    assert content == ""
    assert [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)] == [
        ("get_weather", {"city": "Rome, [x]", "days": 3, "tags": ["a", "b"], "on": True}),
        ("stop", {}),
        ("f.g", {"x": {"k": None}, "y": -1.5}),
    ]
    tagged = "<|python_start|>[stop()]<|python_end|>"  # Llama 4
    assert call("pythonic", tagged) == ("stop", {}, tagged)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[f(1)]", "arguments must be given by name"),
        ("[f(**{'a': 1})]", "arguments must be given by name"),
        ("[f(a=open('/etc/passwd'))]", "malformed node"),
        ("[f(a=b)]", "malformed node"),
        ("[f(a=1, a=2)]", "an argument is given twice"),
        ("[f(a=(1, 2))]", "values must be text, numbers"),
        ("[f(a={1: 2})]", "values must be text, numbers"),
        ("[f(a=b'x')]", "not JSON serializable"),
        ("[f(a=1e999)]", "not JSON compliant"),
        ("[f(a=1)(b=2)]", "is not a call"),
        ("[f(a=1", "is not closed with ]"),
        ("[f(a=" + "[" * 10_000, "is not closed with ]"),
        ("[f(a=" + "[" * 10_000 + "]" * 10_000 + ")]", "too many nested"),
        ("<|python_tag|>print(1)", "the list of calls is missing"),
    ],
)
def test_a_malformed_pythonic_call_is_an_event_and_nothing_is_evaluated(text: str, message: str) -> None:
    assert message in failure("pythonic", text).message


def test_one_bad_pythonic_call_does_not_spoil_the_others() -> None:
    good, bad = FORMATS["pythonic"].parse("[f(a=1), g(2)]")[1]
    assert isinstance(good, ParsedCall)
    assert isinstance(bad, ParseFailure)
    assert bad.name == "g"


@pytest.mark.parametrize("arguments", [{"class": 1}, {"a b": 1}, {"a-b": 1}])
def test_pythonic_refuses_to_write_names_that_python_does_not_take(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot write this call"):
        FORMATS["pythonic"].write_call("f", arguments)


# mistral, deepseek, kimi


def test_mistral_reads_a_list_of_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]'
    content, events = FORMATS["mistral"].parse(f"I look.{text}")
    assert content == "I look."
    assert [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)] == [("f", {"a": 1}), ("g", {})]
    assert "".join(text[slice(*e.span)] for e in FORMATS["mistral"].parse(text)[1]) == text


def test_mistral_v11_reads_a_mark_per_call() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{}'
    events = FORMATS["mistral_v11"].parse(text)[1]
    assert [(e.name, e.arguments, e.call_id) for e in events if isinstance(e, ParsedCall)] == [
        ("f", {"a": 1}, ""),
        ("g", {}, "abcdefghi"),
        ("h", {}, ""),
    ]


A1 = '{"a": 1}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("name", "opens", "each", "closes"),
    [
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", V3, "<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>", V31, "<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>", KIMI, "<|tool_calls_section_end|>"),
    ],
)
def test_a_section_of_calls_is_read_whole(name: str, opens: str, each: str, closes: str) -> None:
    text = f"{opens}{each.format('f', A1)}\n{each.format('g', '{}')}{closes}"
    content, events = FORMATS[name].parse(f"so</think>I look.{text}")
    assert content == "I look."
    assert [(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)] == [("f", {"a": 1}), ("g", {})]
    written = FORMATS[name].write_call("f", {"a": 1})
    assert written == f"{opens}{each.format('f', A1)}{closes}"
    # A call that was cut, or lost its arguments, leaves the next one alone.
    for cut in (each.format("f", '{"a": 1'), each.format("f", "[1]"), each[:12]):
        bad, good = FORMATS[name].parse(f"{opens}{cut}{each.format('g', '{}')}{closes}")[1]
        assert isinstance(bad, ParseFailure)
        assert isinstance(good, ParsedCall)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mistral", "[TOOL_CALLS]", "expected a JSON list of calls"),
        ("mistral", "[TOOL_CALLS] []", "Expecting value at ']'"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', "expected , or ]"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]', '"arguments" of the call is missing'),
        ("mistral", "f[ARGS]{}", "[ARGS] is outside a call"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", "expected a JSON list of calls"),
        ("mistral_v11", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "no tool name"),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]", "Expecting value at the end"),
        ("mistral_v11", "f[ARGS]{}", "[ARGS] is outside a call"),
        ("deepseek_v3", V31.format("f", "{}"), "no tool name"),
        ("deepseek_v3", V3.format("f", "{}").removesuffix("<｜tool▁call▁end｜>"), "unexpected '\\n```'"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "is outside a call"),
        ("deepseek_v31", V3.format("f", "{}"), "Expecting value at 'f"),
        ("deepseek_v31", V31.format("f", "{}").removesuffix("<｜tool▁call▁end｜>"), "the call is not closed"),
        ("kimi_k2", KIMI.format("f", "{oops"), "Expecting property name"),
        ("kimi_k2", "<|tool_call_begin|>", "no tool name at ''"),
    ],
)
def test_a_malformed_call_of_these_is_an_event(name: str, text: str, message: str) -> None:
    event = failure(name, text)
    assert message in event.message
    assert FORMATS[name].form in event.message
    assert event.span[1] == len(text)


def test_special_tokens_reach_the_template_as_tool_calls_with_ids() -> None:
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
    # DeepSeek's templates glue the arguments to other text.
    message = FORMATS["deepseek_v3"].assistant_message(V3.format("f", '{"a": 1}'))
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == (None, '{"a": 1}')
    assert kimi.assistant_message("It is 4.") == {"role": "assistant", "content": "It is 4."}
