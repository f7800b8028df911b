"""Events that a mode reports while it answers; `endpoints.py` writes them as one answer or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agent_r1.wire.chat_answer import Choice, TokenLogprob, Usage
from agent_r1.wire.chat_request import ChatRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """More of a response. Pieces of one choice add up to its text."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event beside the text: a tool call, a result."""

    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A choice is complete; its text is the sum of its deltas."""

    index: int
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event."""

    usage: Usage
    extra: Mapping[str, Any] = field(default_factory=dict)


Event = Delta | Happened | Finished | Ended
Events = AsyncGenerator[Event, None]


async def follow(work: asyncio.Future[Any], events: asyncio.Queue[Event | None]) -> Events:
    """Yield what `work` puts into the queue until it is done, and raise what it raises. Closing this cancels it."""
    work.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        with suppress(asyncio.CancelledError):
            work.exception()  # looked at, so that asyncio does not report it


async def together(works: Iterable[Awaitable[T]]) -> list[T]:
    """Like `asyncio.gather`, but if one fails, the others are cancelled instead of working in vain."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Mode(Protocol):
    """How requests are answered."""

    extensions: tuple[str, ...]  # further fields of a request that it reads

    async def start(self, request: ChatRequest) -> Events:
        """Check a request, raising ApiError, and return its events. Closing the generator ends all its work."""
        ...
