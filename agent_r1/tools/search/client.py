"""Client of a search server: one request per batch, retried while the server is busy or restarting.

    async with SearchClient("http://localhost:8100") as client:
        results = await client.search(["Who founded the band?"], top_k=5)

Temporary failures (no connection, no answer in time, a status in `BUSY`) are retried with growing pauses, at least as
long as the server asks for, until `retry_seconds` have passed. Any other refusal is raised at once.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.tools.search.index import Hit
from agent_r1.tools.search.wire import Health, read_results

BUSY = (408, 429, 502, 503, 504)  # all other statuses are final
SECONDS_PER_ATTEMPT = 25.0  # a busy server refuses earlier than this
RETRY_SECONDS = 120.0  # enough for a server to restart and load its index
HEALTH_SECONDS = 5.0  # a server answers at once, even while it is searching
MAX_REPLY_CHARS = 300  # how much of a server's reply an error quotes

_JITTER = random.Random()  # separate from the global stream: waiting must not change what a seeded run samples


class SearchError(AgentR1Error, RuntimeError):
    """A search server did not answer a search."""


class SearchRefused(SearchError):
    """The server refused the request for good."""


class SearchUnavailable(SearchError):
    """Every attempt failed temporarily."""


class SearchClient:
    """A connection pool to one server, for use in `async with` and in one event loop."""

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
        self._seconds, self._retry_seconds = seconds_per_attempt, retry_seconds
        self._backoff, self._max_wait = backoff_seconds, max_wait
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=seconds_per_attempt,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            verify=certificates(),
            trust_env=False,  # search servers run in the local network, behind no proxy
        )

    async def __aenter__(self) -> SearchClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def search(self, queries: Sequence[str], top_k: int, kind: str | None = None) -> list[list[Hit]]:
        if not queries:
            return []
        answer = await self._ask({"queries": list(queries), "top_k": top_k, "kind": kind})
        try:
            return read_results(answer.content, len(queries))
        except ValueError as error:
            raise SearchRefused(f"{self.url}/search sent no search results: {error}") from error

    async def _ask(self, body: dict[str, Any]) -> httpx.Response:
        began = time.monotonic()
        attempts = 0
        while True:
            attempts += 1
            wait = 0.0  # seconds the server asks for
            try:
                # httpx limits each read, so a server that sends single bytes could take for ever.
                async with asyncio.timeout(self._seconds):
                    answer = await self._http.post("/search", json=body)
            except TimeoutError:
                problem = f"nothing within {self._seconds:g} s"
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    return answer
                problem = f"{self.url}/search answered {answer.status_code}: {answer.text[:MAX_REPLY_CHARS]!r}"
                wait = retry_after(answer)
                if answer.status_code not in BUSY or wait > self._max_wait:
                    raise SearchRefused(problem)
            # Jitter, so that clients that failed together do not retry together.
            backoff = min(self._backoff * 2 ** min(attempts - 1, 60), self._max_wait)
            pause = max(wait, backoff) * _JITTER.uniform(1.0, 1.5)
            took = time.monotonic() - began
            if took + pause > self._retry_seconds:
                raise SearchUnavailable(
                    f"{self.url}/search: no answer in {took:.1f} s ({attempts} attempt{'s' * (attempts > 1)}, "
                    f"retry_seconds={self._retry_seconds:g}); the last: {problem}"
                )
            await asyncio.sleep(pause)


def check_server(url: str, *, top_k: int, kind: str | None) -> Health:
    """Check that a server runs at `url` and supports these settings. Raises SearchError or ConfigError."""
    url = check_url(url)
    try:
        answer = httpx.get(f"{url}/health", timeout=HEALTH_SECONDS, verify=certificates(), trust_env=False)
        health = Health.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPError, ValueError) as error:
        raise SearchUnavailable(
            f"no search server answers at {url}: {error}. Start one there: agent-r1 search serve INDEX"
        ) from error
    if kind is not None and kind not in health.kinds:
        raise ConfigError(f"the server {url} supports {', '.join(health.kinds)}, not {kind!r}")
    if not 1 <= top_k <= health.max_top_k:
        raise ConfigError(f"the server {url} finds 1 to {health.max_top_k} passages per query, got top_k={top_k}")
    return health


def check_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        valid = parsed.scheme in ("http", "https") and parsed.host and not parsed.path.rstrip("/").endswith("/search")
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise ConfigError(f"{url!r} is not the address of a search server; expected one like http://localhost:8100")
    return url.rstrip("/")


def retry_after(answer: httpx.Response) -> float:
    """Return the seconds that the server asks to wait, or 0."""
    try:
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    except ValueError:  # a date, which is rare: use the backoff
        return 0.0


@cache
def certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes longer than a search, so all clients share it
