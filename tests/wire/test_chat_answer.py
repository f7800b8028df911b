"""Answers on the wire: whole, streamed, and made from what a model wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_r1.tokens.formats.table import get_format
from agent_r1.wire.chat_answer import (
    CallOut,
    ChatAnswer,
    Choice,
    TokenLogprob,
    Usage,
    answer_chunks,
    sse,
    write_answer,
)
from agent_r1.wire.reply import read_reply, split_thinking

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def answer(*choices: Choice) -> ChatAnswer:
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    return ChatAnswer(model="m", choices=choices, usage=usage, answer_id="chatcmpl-1", created=7)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Put a choice together as a client does."""
    text, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content") or ""
                calls += choice["delta"].get("tool_calls", [])
                reason = choice["finish_reason"] or reason
    return {"text": text, "calls": calls, "reason": reason}


def test_a_stream_holds_what_the_whole_answer_holds() -> None:
    call = CallOut(call_id="call_1", name="add", arguments='{"a": 1}')
    made = answer(Choice(text="hm", calls=(call,), finish_reason="tool_calls"), Choice(text="4"))
    whole, chunks = write_answer(made), list(answer_chunks(made, include_usage=True))
    for index, choice in enumerate(whole["choices"]):
        found = joined(chunks, index)
        assert (found["text"], found["reason"]) == (choice["message"]["content"], choice["finish_reason"])
        assert [one["function"] for one in found["calls"]] == [
            one["function"] for one in choice["message"].get("tool_calls", [])
        ]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_include_usage_no_chunk_has_a_usage() -> None:
    assert all("usage" not in chunk for chunk in answer_chunks(answer(Choice(text="4"))))


def test_content_is_null_beside_calls_and_empty_without() -> None:
    call = CallOut(call_id="call_1", name="add", arguments="{}")
    calling, silent = write_answer(answer(Choice(text="", calls=(call,)), Choice(text="")))["choices"]
    assert calling["message"]["content"] is None
    assert silent["message"]["content"] == ""


def test_logprobs_are_written_token_by_token() -> None:
    tokens = (TokenLogprob(token="4", logprob=-0.5, text_bytes=(52,)), TokenLogprob(token="\ufffd", logprob=-1.0))
    (choice,) = write_answer(answer(Choice(text="4", logprobs=tokens)))["choices"]
    assert choice["logprobs"]["content"][0] == {"token": "4", "logprob": -0.5, "bytes": [52], "top_logprobs": []}
    assert choice["logprobs"]["content"][1]["bytes"] is None


def test_an_event_is_one_line_of_ascii_even_with_halves_of_surrogate_pairs() -> None:
    event = sse({"text": "a\n\ud800é"})
    assert event.isascii()
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["text"] == "a\n\ud800é"


def test_calls_in_a_response_become_calls_for_the_client() -> None:
    text = 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = read_reply(text, get_format("hermes"), TOOLS)
    assert reply.text == "Sure."
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("add", {"a": 1})]
    assert reply.calls[0].call_id.startswith("call_")


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read_reply(text, get_format("hermes"), ()).text == text


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2
    assert len(read_reply(text, get_format("hermes"), TOOLS).calls) == 2
    assert len(read_reply(text, get_format("hermes"), TOOLS, parallel=False).calls) == 1


def test_a_call_that_cannot_be_read_stays_in_the_text() -> None:
    text = '<tool_call>{"name": "add", "arguments": </tool_call>'
    reply = read_reply(text, get_format("hermes"), TOOLS)
    assert (reply.text, reply.calls, reply.num_unreadable) == (text, (), 1)


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "rest"),
    [
        ("4", False, "", "4"),
        ("<think>hm</think>\n4", False, "hm", "4"),
        ("hm</think>\n4", True, "hm", "4"),
        ("<think>hm", False, "hm", ""),
        ("hm", True, "hm", ""),
        (" a <think> b", False, "b", " a "),
        (" <think>b</think> c ", False, "b", "c "),
    ],
)
def test_thinking_is_kept_apart(text: str, opened: bool, thoughts: str, rest: str) -> None:
    assert split_thinking(text, opened=opened) == (thoughts, rest)
