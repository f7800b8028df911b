"""HTTP connections with deadlines and a limit on their number, so that clients cannot hold them open.

uvicorn limits neither the time to send a request's headers nor the time to read an answer, and its `limit_concurrency`
refuses new clients even if the open connections are idle. Here, a connection that waits for its client is closed after
`seconds`, or earlier if a new client needs its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from uvicorn.protocols.http.h11_impl import H11Protocol

BUSY_PERIODS = 3  # `seconds` to send the body, `seconds` to find the answer, and one spare


def bounded_protocol(
    *, seconds: float, max_connections: int, busy_seconds: float | None = None, stall_seconds: float | None = None
) -> Callable[..., asyncio.Protocol]:
    """Return a factory for `uvicorn.Config(http=...)` whose connections share one limit.

    busy_seconds: time limit of one request, from its headers to the end of its answer; None: three times `seconds`.
    stall_seconds: a client that reads nothing for this long is disconnected; None: no such limit.
    """
    busy = BUSY_PERIODS * seconds if busy_seconds is None else busy_seconds
    idle: dict[_Connection, None] = {}  # connections that wait for their client, oldest first

    def make(*args: Any, **kwargs: Any) -> asyncio.Protocol:
        limits = _Limits(seconds, busy, stall_seconds, max_connections)
        return _Connection(*args, limits=limits, idle=idle, **kwargs)

    return make


class _Limits(NamedTuple):
    idle_seconds: float
    busy_seconds: float
    stall_seconds: float | None
    max_connections: int


class _Connection(H11Protocol):  # type: ignore[misc]  # mypy does not read uvicorn
    def __init__(self, *args: Any, limits: _Limits, idle: dict[_Connection, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._idle = limits, idle
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > self._limits.max_connections:
            oldest = next(iter(self._idle))  # may be this connection, if all others are being answered
            del self._idle[oldest]
            oldest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self in self._idle and self.cycle is not None and not self.cycle.response_complete:
            del self._idle[self]
            self._close_in(self._limits.busy_seconds)

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._limits.stall_seconds is not None:
            self._stall = self.loop.call_later(self._limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def _wait_for_request(self) -> None:
        self._idle[self] = None
        self._close_in(self._limits.idle_seconds)

    def _close_in(self, seconds: float) -> None:
        """Replace the deadline. Called only when the state changes, not for single bytes that trickle in."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)
