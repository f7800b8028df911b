"""Text while it is sampled: what is shown early is what the whole response says, and nothing is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.serve.api.text_stream import TextStream
from agent_r1.tokens.formats.table import get_format
from agent_r1.wire.reply import read_reply
from tests.chatml import renderer
from tests.serve.api_server import CALL, ECHO

PIECES = ["a", " ", "\n", "é", "漢", "<", "<think>", "</think>", "[", "`", CALL % "x", "<tool_call>", "word ", "STOP"]


def streamed(text: str, *, tools: bool = False, stop: tuple[str, ...] = (), by: int = 1) -> tuple[str, str]:
    """Stream the bytes of a text; returns what was shown, and the thinking."""
    tool_format = get_format("hermes")
    stream = TextStream(renderer().decode, stop=stop, tool_format=tool_format if tools else None, opened=False)
    ids = renderer().encode_response(text)[:-1]
    shown = thought = ""
    for start in range(0, len(ids), by):
        new, more = stream.push(ids[start : start + by])
        shown, thought = shown + new, thought + more
    reply = read_reply(stream.text, tool_format, [ECHO] if tools else [])
    new, more = stream.end(reply.text, reply.reasoning)
    return shown + new, thought + more


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(1, 5))
def test_without_tools_and_thinking_marks_the_stream_is_the_text(text: str, by: int) -> None:
    plain = text.replace("think", "thank")
    assert streamed(plain, by=by) == (plain, "")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(1, 5))
def test_what_is_shown_early_begins_the_whole(text: str, by: int) -> None:
    for tools in (False, True):
        reply = read_reply(text, get_format("hermes"), [ECHO] if tools else [])
        shown, thought = streamed(text, tools=tools, by=by)
        # Text before a stray </think> may turn out to be thinking after it was shown; then the stream ends there.
        if "</think>" not in text.split("<think>")[0]:
            assert (shown, thought) == (reply.text, reply.reasoning)


@pytest.mark.parametrize("by", [1, 3, 50])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STOP two", ("two", "STOP"), "one "),
        ("one STO two", ("STOP",), "one STO two"),
        ("aaab", ("aab",), "a"),
        ("STOP", ("STOP",), ""),
        ("ab", ("b", "ab"), ""),
        ("é漢!", ("漢",), "é"),
    ],
)
def test_a_stop_text_is_never_shown_not_even_its_beginning(
    text: str, stop: tuple[str, ...], shown: str, by: int
) -> None:
    assert streamed(text, stop=stop, by=by)[0] == shown


def test_a_call_is_never_shown_and_the_text_before_it_always() -> None:
    assert streamed(f"I ask.\n{CALL % 'x'}", tools=True)[0] == "I ask."
    assert streamed(f"x < y, so {CALL % 'x'}", tools=True)[0] == "x < y, so"


def test_text_does_not_wait_for_the_end_because_of_a_bracket() -> None:
    stream = TextStream(renderer().decode, tool_format=get_format("hermes"), opened=False)
    shown = "".join(stream.push(renderer().encode_response("x < y " + "word " * 40)[:-1]))
    assert shown.startswith("x < y word")


def test_a_response_that_begins_inside_thinking_shows_only_its_answer() -> None:
    stream = TextStream(renderer().decode, tool_format=None, opened=True)
    pieces = [stream.push([token]) for token in renderer().encode_response("hm</think>\n\n4")[:-1]]
    end = stream.end("4", "hm")
    assert "".join(text for text, _ in [*pieces, end]) == "4"
    assert "".join(thought for _, thought in [*pieces, end]) == "hm"
