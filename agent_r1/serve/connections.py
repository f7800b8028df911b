"""HTTP connections with deadlines and a limit on their number, so that clients cannot hold them open.

uvicorn limits neither the time to send a request's headers nor the time to read an answer, and its `limit_concurrency`
refuses new clients even if the open connections are idle. Here, a connection that waits for its client is closed after
`seconds`, or earlier if a new client needs its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

BUSY_PERIODS = 3  # `seconds` to send the body, `seconds` to find the answer, and one spare


def bounded_protocol(*, seconds: float, max_connections: int) -> Callable[..., asyncio.Protocol]:
    """Return a factory for `uvicorn.Config(http=...)` whose connections share one limit."""
    idle: dict[_Connection, None] = {}  # connections that wait for their client, oldest first

    def make(*args: Any, **kwargs: Any) -> asyncio.Protocol:
        return _Connection(*args, seconds=seconds, max_connections=max_connections, idle=idle, **kwargs)

    return make


class _Connection(H11Protocol):  # type: ignore[misc]  # mypy does not read uvicorn
    def __init__(
        self, *args: Any, seconds: float, max_connections: int, idle: dict[_Connection, None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._seconds, self._max_connections, self._idle = seconds, max_connections, idle
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > self._max_connections:
            oldest = next(iter(self._idle))  # this connection, if all others are being answered
            del self._idle[oldest]
            oldest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self in self._idle and self.cycle is not None and not self.cycle.response_complete:
            del self._idle[self]
            self._close_in(BUSY_PERIODS * self._seconds)

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._idle[self] = None
        self._close_in(self._seconds)

    def _close_in(self, seconds: float) -> None:
        """Replace the deadline. Called only when the state changes, not for single bytes that trickle in."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)
