"""Ask a service that may be slow, busy or briefly gone: repeated attempts, and objects shared by concurrent calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent_r1.errors import AgentR1Error, ConfigError, at_least
from agent_r1.guard import TimedOut, describe

T = TypeVar("T")

_JITTER = random.Random()  # separate from the global stream: waiting must not change what a seeded run samples


class ScoringError(AgentR1Error, RuntimeError):
    """A model could not score an episode. The episode fails; the run continues."""


class OutOfAttempts(ScoringError):
    """All attempts failed; the service is at fault, not the request."""


class TransientError(ScoringError):
    """This attempt failed, but the next may succeed. Scorers raise it to be asked again."""

    def __init__(self, message: str, *, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds  # minimum wait before the next attempt


# Not every OSError: a missing model file will be missing again.
TRANSIENT: tuple[type[Exception], ...] = (TransientError, TimedOut, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often and how long to try. Waits are about 1, 2, 4, ... times `backoff_seconds`."""

    attempts: int
    seconds: float  # time limit of an attempt
    backoff_seconds: float

    def __post_init__(self) -> None:
        at_least(1, "a scorer", attempts=self.attempts)
        if not self.seconds > 0:  # refuses NaN too
            raise ConfigError(f"seconds_per_attempt={self.seconds} must be positive")
        at_least(0, "a scorer", backoff_seconds=self.backoff_seconds)

    async def run(self, attempt: Callable[[], Awaitable[T]], *, name: str) -> T:
        """Return the result of the first attempt that succeeds. Only `TRANSIENT` errors are retried."""
        for number in range(self.attempts):
            try:
                return await attempt()
            except TRANSIENT as error:
                if number + 1 == self.attempts:
                    message = f"{name} failed after {self.attempts} attempts; the last: {describe(error)}"
                    raise OutOfAttempts(message) from error
                # Jitter, so that requests that failed together do not return together.
                pause = self.backoff_seconds * 2**number * _JITTER.uniform(0.5, 1.5)
                await asyncio.sleep(pause + (error.wait_seconds if isinstance(error, TransientError) else 0.0))
        raise AssertionError("unreachable: the last attempt returns or raises")


class PerLoop(Generic[T]):
    """One object shared by all overlapping calls in an event loop: made for the first, closed after the last."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._shared: dict[asyncio.AbstractEventLoop, T] = {}
        self._users: dict[asyncio.AbstractEventLoop, int] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator[T]:
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop], self._users[loop] = self._make(), 0
        shared = self._shared[loop]
        self._users[loop] += 1
        try:
            yield shared
        finally:
            self._users[loop] -= 1
            if self._users[loop] == 0:
                del self._shared[loop], self._users[loop]
                if self._close is not None:
                    await self._close(shared)
