"""One request over HTTP: read it, have it answered, write the answer whole or as a stream.

The client's connection is watched all the time: when it closes, the work for it is cancelled. An answer begins with its
first event, so everything that goes wrong before is answered with the right HTTP status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request

from agent_r1.errors import AgentR1Error
from agent_r1.serve.api.counters import Counters
from agent_r1.serve.api.events import Delta, Ended, Event, Events, Finished, Happened
from agent_r1.serve.api.limits import Admission, ServeLimits
from agent_r1.wire.api_error import SERVER, ApiError
from agent_r1.wire.chat_answer import DONE, SSE_HEADERS, ChatAnswer, Choice, ChunkWriter, sse, to_json, write_answer
from agent_r1.wire.request_body import parse_object, read_body
from agent_r1.wire.text_completions import TextWriter

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class AnswerWriter(Protocol):
    """Writes the events of one answer."""

    def first(self, event: Event) -> Iterable[dict[str, Any]]:
        """The chunks before the first event."""
        ...

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        """The chunks of an event."""
        ...

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that was read: how to answer it, and how to write that."""

    start: Callable[[], Awaitable[Events]]
    writer: AnswerWriter
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An ASGI application for one path."""

    route: str
    read: Callable[[dict[str, Any]], Asked]  # raises ApiError
    limits: ServeLimits
    admission: Admission
    counters: Counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        outcome, started = "ok", time.perf_counter()
        try:
            limits, length = self.limits, request.headers.get("content-length")
            with self.admission.entered():  # this also limits how many bodies are held
                body = await read_body(
                    request.stream(), max_bytes=limits.max_body_bytes, seconds=limits.read_seconds, length=length
                )
                asked = self.read(parse_object(body))
                started = time.perf_counter()
                outcome = await self._while_connected(receive, self._answer(asked, send, started))
        except ApiError as error:
            outcome = "failed" if error.status >= 500 else "refused"
            await send_json(send, error.as_json(), error.status, error.headers)
        except ClientDisconnect:
            outcome = "left"
        finally:
            self.counters.add("requests_total", route=self.route, outcome=outcome)
            self.counters.observe("request_seconds", time.perf_counter() - started)

    async def _while_connected(self, receive: Receive, work: Any) -> str:
        """Await the work, or cancel it when the client closes the connection."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return "left"
            outcome: str = working.result()
            return outcome
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _answer(self, asked: Asked, send: Send, started: float) -> str:
        """Write the answer; returns the outcome. Raises ApiError as long as nothing was sent."""
        out = _Output(send)
        try:
            async with asyncio.timeout(self.limits.request_seconds), aclosing(await asked.start()) as events:
                await (self._stream if asked.stream else self._collect)(asked.writer, events, out, started)
        except ApiError as error:
            return await out.fail(error)
        except TimeoutError:
            message = f"no complete answer within {self.limits.request_seconds:g} s"
            return await out.fail(ApiError(504, message, kind=SERVER, code="timeout"))
        except AgentR1Error as error:
            logger.exception("a request failed")
            return await out.fail(ApiError(500, str(error)[:1000], kind=SERVER, code="engine_error"))
        except Exception:
            logger.exception("a request failed unexpectedly")
            return await out.fail(ApiError(500, "internal error; see the log of the server", kind=SERVER))
        return "ok"

    async def _collect(self, writer: AnswerWriter, events: Events, out: _Output, started: float) -> None:
        seen: list[Event] = []
        async for event in events:
            self._count(event, first=not seen, started=started)
            seen.append(event)
        await send_json(out.send, writer.whole(seen))

    async def _stream(self, writer: AnswerWriter, events: Events, out: _Output, started: float) -> None:
        async for event in events:
            first = not out.begun
            self._count(event, first=first, started=started)
            if first:
                await out.begin()
            chunks = [*(writer.first(event) if first else ()), *writer.chunks(event)]
            if chunks:
                await out.write(b"".join(map(sse, chunks)))
        await out.write(DONE, more=False)

    def _count(self, event: Event, *, first: bool, started: float) -> None:
        if first:
            self.counters.observe("first_token_seconds", time.perf_counter() - started)
        if isinstance(event, Ended):
            self.counters.add("prompt_tokens_total", event.usage.prompt_tokens)
            self.counters.add("completion_tokens_total", event.usage.completion_tokens)
        if isinstance(event, Happened) and event.event.get("type") == "tool_result":
            self.counters.add("tool_calls_total")


class _Output:
    """The state of the answer to the client so far."""

    def __init__(self, send: Send) -> None:
        self.send, self.begun = send, False

    async def begin(self) -> None:
        self.begun = True
        headers = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ApiError) -> str:
        """In a stream, the error is the last event, which clients raise. Otherwise it is the answer."""
        if not self.begun:
            raise error
        await self.write(sse(error.as_json()), more=False)
        return "failed"


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(
    send: Send, content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    body = to_json(content)
    given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    pairs = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class ChatWriter:
    """Writes the answer to a chat request."""

    def __init__(self, *, model: str, answer_id: str, created: int, n: int, include_usage: bool) -> None:
        self._chunks = ChunkWriter(model=model, answer_id=answer_id, created=created, include_usage=include_usage)
        self._head = {"model": model, "answer_id": answer_id, "created": created}
        self._n, self._include_usage = n, include_usage

    def first(self, event: Event) -> Iterable[dict[str, Any]]:
        return [self._chunks.start(index) for index in range(self._n)]

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        chunks = self._chunks
        if isinstance(event, Happened):
            yield chunks.event({"agent_r1": dict(event.event)})
        elif isinstance(event, Delta):
            if event.reasoning:
                yield chunks.reasoning(event.reasoning, event.index)
            if event.text or event.logprobs:
                yield chunks.text(event.text, event.index, event.logprobs)
        elif isinstance(event, Finished):
            for position, call in enumerate(event.choice.calls):
                yield chunks.call(position, call, event.index)
            yield chunks.finish(event.choice.finish_reason, event.index)
        elif isinstance(event, Ended):
            if event.extra:
                yield chunks.event({"agent_r1": dict(event.extra)})
            if self._include_usage:
                yield chunks.usage(event.usage)

    def whole(self, events: list[Event]) -> dict[str, Any]:
        ended, choices = _sort_out(events)
        happened = [dict(event.event) for event in events if isinstance(event, Happened)]
        extra = {"agent_r1": {**ended.extra, "events": happened}} if ended.extra else {}
        return write_answer(ChatAnswer(choices=tuple(choices), usage=ended.usage, extra=extra, **self._head))  # type: ignore[arg-type]


class CompletionWriter:
    """Writes the answer to a text completion."""

    def __init__(self, writer: TextWriter, *, include_usage: bool) -> None:
        self._writer, self._include_usage = writer, include_usage

    def first(self, event: Event) -> Iterable[dict[str, Any]]:
        return ()

    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, Delta):
            yield self._writer.text(event.text, event.index, event.logprobs)
        elif isinstance(event, Finished):
            yield self._writer.finish(event.choice.finish_reason, event.index)
        elif isinstance(event, Ended) and self._include_usage:
            yield self._writer.usage(event.usage)

    def whole(self, events: list[Event]) -> dict[str, Any]:
        ended, choices = _sort_out(events)
        return self._writer.answer(choices, ended.usage)


def _sort_out(events: list[Event]) -> tuple[Ended, list[Choice]]:
    finished = sorted((event for event in events if isinstance(event, Finished)), key=lambda event: event.index)
    (ended,) = (event for event in events if isinstance(event, Ended))
    return ended, [event.choice for event in finished]
