"""The server's limits, so that no client can harm the others, and the admission of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent_r1.errors import check_limits
from agent_r1.wire.api_error import overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """The limits of the server."""

    max_requests: int = 512  # answered at once; further ones get 429 with Retry-After
    max_body_bytes: int = 16_000_000
    max_n: int = 16  # answers to one request
    max_connections: int = 2048  # one more closes the connection that has been idle longest
    read_seconds: float = 20.0  # time to send the body
    # For connecting and sending the headers, and between two requests of a connection. Too short a time costs busy
    # clients a request, which they may be sending when the connection closes.
    idle_seconds: float = 90.0
    request_seconds: float = 600.0  # time limit of the whole answer
    stall_seconds: float = 30.0  # a client that reads nothing for so long is disconnected

    def __post_init__(self) -> None:
        check_limits(self)


class Admission:
    """Counts the requests that are being answered."""

    def __init__(self, max_requests: int) -> None:
        self.active = 0
        self._max = max_requests

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold one of the places for a request. Raises ApiError if all are taken."""
        if self.active >= self._max:
            raise overloaded(f"{self.active} requests are being answered, the limit of this server; try again later")
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
