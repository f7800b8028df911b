"""Answers: a neutral record, written as one JSON object or as a stream of chunks.

A stream that is written while the model samples uses `ChunkWriter` directly; `answer_chunks` makes the same chunks
from an answer that is complete. Everything is ASCII JSON: text of models may hold halves of surrogate pairs.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]

DONE = b"data: [DONE]\n\n"
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOut:
    """A tool call for the client."""

    call_id: str
    name: str
    arguments: str  # JSON, or what the model wrote if it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, and its log-prob under the distribution that it was drawn from."""

    token: str
    logprob: float
    text_bytes: tuple[int, ...] | None = None  # None: the token is part of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One response."""

    text: str  # without calls and thinking
    calls: tuple[CallOut, ...] = ()
    finish_reason: FinishReason = "stop"
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None  # None: not requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to a `ChatRequest`."""

    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    answer_id: str
    created: int  # seconds since 1970
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of the answer


def new_id(prefix: str) -> str:
    """A new id such as `chatcmpl-...` or `call_...`."""
    joiner = "_" if prefix == "call" else "-"
    return f"{prefix}{joiner}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def write_answer(answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [
        {
            "index": index,
            "message": _message(choice),
            "logprobs": write_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answer.choices)
    ]
    return {
        "id": answer.answer_id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": answer.usage.as_json(),
        **answer.extra,
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: CallOut) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def write_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    tokens = [
        {
            "token": each.token,
            "logprob": each.logprob,
            "bytes": None if each.text_bytes is None else list(each.text_bytes),
            "top_logprobs": [],
        }
        for each in logprobs
    ]
    return {"content": tokens, "refusal": None}


class ChunkWriter:
    """The chunks of one streamed answer."""

    def __init__(self, *, model: str, answer_id: str, created: int, include_usage: bool) -> None:
        self._head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        # As the API does: with include_usage, every chunk has the key, and only the last one a value.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def start(self, index: int = 0) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def text(self, text: str, index: int = 0, logprobs: Sequence[TokenLogprob] | None = None) -> dict[str, Any]:
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def reasoning(self, text: str, index: int = 0) -> dict[str, Any]:
        return self._chunk(index, {"reasoning_content": text})

    def call(self, position: int, call: CallOut, index: int = 0) -> dict[str, Any]:
        """A whole call; `position` counts the calls of one choice."""
        return self._chunk(index, {"tool_calls": [{"index": position, **_call(call)}]})

    def finish(self, reason: FinishReason, index: int = 0, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {**self._chunk(index, {}, finish_reason=reason), **(extra or {})}

    def event(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk without text that carries further fields. Clients that do not know them see an empty delta."""
        return {**self._chunk(0, {}), **extra}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage.as_json()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": write_logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        return {**self._head, "choices": [choice], **self._tail}


def answer_chunks(answer: ChatAnswer, *, include_usage: bool = False) -> Iterator[dict[str, Any]]:
    """A complete answer as the chunks of a stream; end it with `DONE`."""
    writer = ChunkWriter(
        model=answer.model, answer_id=answer.answer_id, created=answer.created, include_usage=include_usage
    )
    for index, choice in enumerate(answer.choices):
        yield writer.start(index)
        if choice.reasoning:
            yield writer.reasoning(choice.reasoning, index)
        if choice.text or choice.logprobs:
            yield writer.text(choice.text, index, choice.logprobs)
        for position, call in enumerate(choice.calls):
            yield writer.call(position, call, index)
        yield writer.finish(choice.finish_reason, index, answer.extra)
    if include_usage:
        yield writer.usage(answer.usage)


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def sse(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"
