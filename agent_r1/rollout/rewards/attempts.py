"""Asking a service that may be slow, busy or gone for a moment: repeated attempts, and what they share.

Used by the rewards that ask a model, `reward_model.py` and `judge.py`. Not known here: what is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.guard import TimedOut, describe

T = TypeVar("T")

_JITTER = random.Random()  # its own stream: waiting must not change what a seeded run samples


class ScoringError(AgentR1Error, RuntimeError):
    """A model could not score an episode; the episode fails with it, the run goes on."""


class OutOfAttempts(ScoringError):
    """Every attempt failed in a way that may pass: the fault lies with who was asked, not with what was asked."""


class TransientError(ScoringError):
    """This attempt failed, the next may not. A scorer raises it to be asked again."""

    def __init__(self, message: str, *, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds  # at least, before the next attempt


# Of OSError only these: a missing model file will be missing again.
TRANSIENT: tuple[type[Exception], ...] = (TransientError, TimedOut, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often and how long to try. Waits grow as 1, 2, 4, ... times `backoff_seconds`, by chance up to half off."""

    attempts: int
    seconds: float  # per attempt
    backoff_seconds: float

    def __post_init__(self) -> None:
        if not (self.attempts >= 1 and self.seconds > 0 and self.backoff_seconds >= 0):  # nor NaN
            raise ConfigError(
                "attempts must be at least 1, seconds_per_attempt positive and backoff_seconds not negative: "
                f"got {self.attempts}, {self.seconds} and {self.backoff_seconds}"
            )

    async def run(self, attempt: Callable[[], Awaitable[T]], *, who: str) -> T:
        """The result of the first attempt that succeeds, or OutOfAttempts. Other errors are not repeated."""
        for number in range(self.attempts):
            try:
                return await attempt()
            except TRANSIENT as error:
                if number + 1 == self.attempts:
                    tried = f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"
                    raise OutOfAttempts(f"{who} failed after {tried}; the last: {describe(error)}") from error
                # Never all at once again: those that failed together would only fail together once more.
                pause = self.backoff_seconds * 2**number * _JITTER.uniform(0.5, 1.5)
                await asyncio.sleep(pause + (error.wait_seconds if isinstance(error, TransientError) else 0.0))
        raise AssertionError("unreachable: the last attempt returns or raises")


class PerLoop(Generic[T]):
    """One T for all overlapping calls of an event loop: made for the first of them, closed after the last."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._shared: dict[asyncio.AbstractEventLoop, tuple[T, set[object]]] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator[T]:
        loop, user = asyncio.get_running_loop(), object()
        if loop not in self._shared:
            self._shared[loop] = (self._make(), set())
        shared, users = self._shared[loop]
        users.add(user)
        try:
            yield shared
        finally:
            users.remove(user)
            if not users:
                del self._shared[loop]
                if self._close is not None:
                    await self._close(shared)
