"""Client of a search server: one request per batch, retried while the server is busy or restarting.

    async with SearchClient("http://localhost:8100") as client:
        results = await client.search(["Who founded the band?"], top_k=5)

Temporary failures (no connection, no answer in time, the codes in `BUSY`) are retried with growing pauses, at least as
long as the server asks for, until `retry_seconds` have passed. Any other refusal is raised at once. `check_server`
sends one short query before anything depends on the server.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any

import httpx

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.tools.search.index import Hit
from agent_r1.tools.search.wire import Health, read_results

BUSY = (408, 429, 502, 503, 504)  # all other codes are final
SECONDS_PER_ATTEMPT = 25.0  # more than a server takes to say that it is too busy
RETRY_SECONDS = 120.0  # enough for a server to be restarted and to load its index
HEALTH_SECONDS = 5.0  # a server says how it is at once, whatever it is searching
MAX_SHOWN_CHARS = 300  # of a server's text in an error

_JITTER = random.Random()  # its own stream: waiting must not change what a seeded run samples


class SearchError(AgentR1Error, RuntimeError):
    """A search server did not give the answer it was asked for."""


class SearchRefused(SearchError):
    """The server says no, and would say so again."""


class SearchUnavailable(SearchError):
    """Every attempt failed in a way that may pass."""


class _Failed(Exception):
    """One attempt failed; the next may not."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait  # seconds the server asks for


class SearchClient:
    """A connection pool to one server; used inside `async with`, in one event loop."""

    def __init__(
        self,
        url: str,
        *,
        seconds_per_attempt: float = SECONDS_PER_ATTEMPT,
        retry_seconds: float = RETRY_SECONDS,  # no attempt starts later than this after the first; 0: one attempt
        backoff_seconds: float = 0.2,
        max_wait: float = 10.0,  # longest pause between attempts; if the server asks for more, give up
        max_connections: int = 100,
    ) -> None:
        self.url = check_url(url)
        for name, value, least in (
            ("seconds_per_attempt", seconds_per_attempt, 0.001),
            ("retry_seconds", retry_seconds, 0),
            ("backoff_seconds", backoff_seconds, 0.001),
            ("max_wait", max_wait, 0),
        ):
            if not least <= value < math.inf:
                raise ConfigError(f"SearchClient needs {name} of at least {least}, and finite: got {value}")
        self._seconds, self._retry_seconds = seconds_per_attempt, retry_seconds
        self._backoff, self._max_wait = backoff_seconds, max_wait
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=seconds_per_attempt,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            verify=_certificates(),
            trust_env=False,  # search servers stand in one's own network, proxies at its edge
        )

    async def __aenter__(self) -> SearchClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def search(self, queries: Sequence[str], top_k: int, kind: str | None = None) -> list[list[Hit]]:
        if not queries:
            return []
        body = {"queries": list(queries), "top_k": top_k} | ({} if kind is None else {"kind": kind})
        answer = await self._asked(body)
        try:
            return read_results(answer.json(), len(queries))
        except (ValueError, RecursionError) as error:
            raise SearchRefused(f"{self.url}/search: {error}: {_shown(answer)}") from error

    async def _asked(self, body: dict[str, Any]) -> httpx.Response:
        began, attempts = time.monotonic(), 0
        while True:
            try:
                return await self._attempt(body)
            except _Failed as failure:
                attempts += 1
                # Jitter, so that clients that failed together do not retry together.
                backoff = min(self._backoff * 2 ** min(attempts - 1, 60), self._max_wait)
                pause = max(failure.wait, backoff) * _JITTER.uniform(1.0, 1.5)
                took = time.monotonic() - began
                if took + pause > self._retry_seconds:
                    raise SearchUnavailable(
                        f"{self.url}/search: no answer in {took:.1f} s ({attempts} attempt{'s' * (attempts > 1)}, "
                        f"retry_seconds={self._retry_seconds:g}); the last: {failure}"
                    ) from None
                await asyncio.sleep(pause)

    async def _attempt(self, body: dict[str, Any]) -> httpx.Response:
        try:
            # httpx limits each read on its own: a server that drips bytes would hold on for ever.
            async with asyncio.timeout(self._seconds):
                answer = await self._http.post("/search", json=body)
        except TimeoutError:
            raise _Failed(f"nothing within {self._seconds:g} s") from None
        except httpx.RequestError as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return answer
        said = f"{self.url}/search answered {answer.status_code}: {_shown(answer)}"
        wait = _retry_after(answer)
        if answer.status_code in BUSY and wait <= self._max_wait:
            raise _Failed(said, wait)
        raise SearchRefused(said)


def check_server(url: str, *, top_k: int, kind: str | None) -> Health:
    """Ask a server once whether it is there and can be searched so: what it says, or a SearchError or ConfigError."""
    url = check_url(url)
    try:
        answer = httpx.get(f"{url}/health", timeout=HEALTH_SECONDS, verify=_certificates(), trust_env=False)
        if answer.status_code != 200:
            raise ValueError(f"it answered {answer.status_code}: {_shown(answer)}")
        health = Health.read(answer.json())
    except (httpx.RequestError, ValueError, RecursionError) as error:
        raise SearchUnavailable(
            f"no search server of ours answers at {url}: {error}. Start one there: agent-r1 search serve INDEX"
        ) from error
    if kind is not None and kind not in health.kinds:
        raise ConfigError(f"the server {url} can be searched by {', '.join(health.kinds)}, not by {kind!r}")
    if health.max_top_k is not None and not 1 <= top_k <= health.max_top_k:
        raise ConfigError(f"the server {url} finds 1 to {health.max_top_k} passages per query, got top_k={top_k}")
    return health


def check_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"a search server is named like http://localhost:8100: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.path.rstrip("/").endswith("/search"):
        raise ConfigError(f"a search server is named like http://localhost:8100, without /search: got {url!r}")
    return url.rstrip("/")


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    except ValueError:  # a date: rare, and clocks differ; the backoff has to do
        return 0.0


def _shown(answer: httpx.Response) -> str:
    return repr(answer.text[:MAX_SHOWN_CHARS])


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes longer than a search; all clients of the process share it
