"""The APIs that agents speak. Each reads a body into a `ChatRequest` and writes the answer, whole or as events.

Answers are complete before the first event is sent: the tool-call format of the model needs the whole text, and a
client that stops reading must not hold up sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agent_r1.serve.gateway.scribe import Said
from agent_r1.wire.api_error import ApiError
from agent_r1.wire.chat_answer import DONE, answer_chunks, sse, write_answer
from agent_r1.wire.chat_request import ChatRequest, parse_chat


class Dialect(Protocol):
    """One API."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises ApiError for requests that the API forbids or we do not support."""
        ...

    def write(self, said: Said, request: ChatRequest) -> dict[str, Any]: ...

    def events(self, said: Said, request: ChatRequest) -> Iterator[bytes]: ...

    def error(self, error: ApiError) -> dict[str, Any]: ...


class ChatCompletions:
    """OpenAI's chat completions."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        return parse_chat(body)

    def write(self, said: Said, request: ChatRequest) -> dict[str, Any]:
        return write_answer(said.answer)

    def events(self, said: Said, request: ChatRequest) -> Iterator[bytes]:
        yield from map(sse, answer_chunks(said.answer, include_usage=request.include_usage))
        yield DONE

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.as_json()
