"""A Semantic-Scholar-like service over HTTP: `agent-r1 search papers`, or the real one.

    GET URL/paper/search?query=&limit=&fields=         {"data": [{"paperId", "title", "abstract", ...}]}
    GET URL/paper/ID/references, URL/paper/ID/citations  {"data": [{"citedPaper" or "citingPaper": {...}}]}
    GET ROOT/recommendations/v1/papers/forpaper/ID     {"recommendedPapers": [...]}

ROOT is URL without `/graph/v1`. Temporary failures (no connection, no answer in time, 408, 429, 5xx) are retried with
growing pauses, at least as long as the service asks for. Answers are cached, and equal simultaneous requests are
sent once, because the attempts of a group often ask the same. A request that fails raises `SourceError`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from agent_r1.data.files import read_json
from agent_r1.errors import ConfigError
from agent_r1.recipes.paper_search.papers import Paper, PaperSource, Related, SourceError
from agent_r1.rollout.rewards.attempts import Attempts, OutOfAttempts, TransientError
from agent_r1.serve.listening import is_loopback
from agent_r1.text import sanitize
from agent_r1.tools.search.client import certificates, retry_after

GRAPH = "/graph/v1"
FIELDS = "paperId,title,abstract,year,venue,authors"
BUSY = (408, 429, 500, 502, 503, 504)
MAX_BODY_BYTES = 8_000_000
MAX_REPLY_CHARS = 120  # how much of the service's reply an error quotes
MAX_ID_CHARS, MAX_TITLE_CHARS = 200, 1000  # titles appear in prompts; the longest one of the Anthology has 818
CITED, SIMILAR = "cites or is cited by it", "no citations known: recommended by the service"

Json = Mapping[str, Any]


class ServicePapers(PaperSource):
    """A connection pool to one service, for one event loop at a time; opened and closed by the tool."""

    def __init__(  # noqa: PLR0913 (all settings of a connection)
        self,
        url: str,
        *,
        api_key_variable: str | None = None,  # environment variable with a key, which is sent as x-api-key
        attempts: int = 5,
        seconds_per_attempt: float = 10.0,
        backoff_seconds: float = 0.5,
        max_wait: float = 30.0,  # give up if the service asks for a longer pause
        requests_per_second: float | None = None,  # None: no limit. the real service allows one per second with a key
        max_connections: int = 16,
        max_cached: int = 20_000,  # cached answers
    ) -> None:
        self.url = _check_url(url)
        if not (max_wait >= 0 and max_connections >= 1 and max_cached >= 0) or (
            requests_per_second is not None and not requests_per_second > 0
        ):
            raise ConfigError(
                f"service: max_wait={max_wait}, max_connections={max_connections}, max_cached={max_cached}, "
                f"requests_per_second={requests_per_second}: need no negative numbers and at least one connection"
            )
        self._attempts = Attempts(attempts, seconds_per_attempt, backoff_seconds)
        self._headers = {} if api_key_variable is None else {"x-api-key": _read_key(api_key_variable)}
        self._max_wait, self._max_connections, self._max_cached = max_wait, max_connections, max_cached
        self._gap = 0.0 if requests_per_second is None else 1 / requests_per_second
        self._cache: OrderedDict[str, Json] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Json]] = {}
        self._http: httpx.AsyncClient | None = None
        self._next_request = 0.0  # when the rate limit allows it

    async def open(self) -> None:
        limits = httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections)
        self._http = httpx.AsyncClient(
            timeout=None,
            limits=limits,
            headers=self._headers,
            verify=certificates(),
            trust_env=not is_loopback(httpx.URL(self.url).host),  # no proxy leads to this machine
        )
        try:
            await self.search("language", 1)
        except SourceError as error:
            raise ConfigError(
                f"no paper service answers at {self.url}: {error}. Start one (agent-r1 search papers) or correct url"
            ) from error

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def search(self, query: str, limit: int) -> Sequence[Paper]:
        found = await self._get(f"{self.url}/paper/search", query=query, limit=limit)
        return _papers(_records(found, "data"))[:limit]

    async def expand(self, paper: Paper, limit: int) -> Related:
        place = f"{self.url}/paper/{quote(paper.paper_id, safe='')}"
        cited, citing = await asyncio.gather(
            self._get(f"{place}/references", limit=limit), self._get(f"{place}/citations", limit=limit)
        )
        linked = [each.get("citedPaper") for each in _records(cited, "data")]
        linked += [each.get("citingPaper") for each in _records(citing, "data")]
        papers = _papers(linked)
        if papers:
            return Related(papers=papers[:limit], how=CITED)
        root = self.url.removesuffix(GRAPH)
        place = f"{root}/recommendations/v1/papers/forpaper/{quote(paper.paper_id, safe='')}"
        similar = _papers(_records(await self._get(place, limit=limit), "recommendedPapers"))
        return Related(papers=similar[:limit], how=SIMILAR)

    async def _get(self, place: str, **parameters: str | int) -> Json:
        """Return the answer to one request: from the cache, from an equal request in flight, or from the service."""
        key = str(httpx.URL(place, params={**parameters, "fields": FIELDS}))
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if key not in self._asking:
            task = self._asking[key] = asyncio.create_task(self._ask(key))
            task.add_done_callback(lambda done: self._forget(key, done))
        # Shielded: a call that times out must not fail the others that wait for the same answer.
        answer = await asyncio.shield(self._asking[key])
        self._cache[key] = answer
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return answer

    def _forget(self, key: str, done: asyncio.Task[Json]) -> None:
        self._asking.pop(key, None)
        if not done.cancelled():
            done.exception()  # read it, so that Python does not report it if all callers are gone

    async def _ask(self, key: str) -> Json:
        try:
            return await self._attempts.run(lambda: self._attempt(key), name="the paper service")
        except OutOfAttempts as error:
            raise SourceError("unavailable", str(error)) from error

    async def _attempt(self, key: str) -> Json:
        if self._http is None:
            raise RuntimeError("the service was not opened")
        await self._wait_for_rate()
        try:
            async with asyncio.timeout(self._attempts.seconds):
                answer = await self._read(key)
        except TimeoutError:
            raise TransientError(f"no answer within {self._attempts.seconds:g} s") from None
        except httpx.RequestError as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return _json(answer)
        said = " ".join(answer.text.split())[:MAX_REPLY_CHARS]
        if answer.status_code == 404:
            raise SourceError("unknown_paper", "the service does not know this paper")
        if answer.status_code not in BUSY:
            raise SourceError("refused", f"the service answered {answer.status_code}: {said}")
        wait = retry_after(answer)
        if wait > self._max_wait:
            raise SourceError("unavailable", f"the service answered {answer.status_code} and asks to wait {wait:g} s")
        raise TransientError(f"it answered {answer.status_code}: {said}", wait_seconds=wait)

    async def _read(self, key: str) -> httpx.Response:
        assert self._http is not None
        async with self._http.stream("GET", key) as answer:
            body = bytearray()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise SourceError("unreadable", f"the service sent more than {MAX_BODY_BYTES:,} bytes")
        headers = {name: value for name, value in answer.headers.items() if name.lower() == "retry-after"}
        return httpx.Response(answer.status_code, headers=headers, content=bytes(body))

    async def _wait_for_rate(self) -> None:
        if self._gap:
            now = time.monotonic()
            begin = max(now, self._next_request)
            self._next_request = begin + self._gap
            await asyncio.sleep(begin - now)


def _json(answer: httpx.Response) -> Json:
    try:
        found = read_json(answer.content.decode("utf-8"))
    except ValueError as error:
        raise SourceError("unreadable", f"the service sent no JSON: {str(error)[:MAX_REPLY_CHARS]}") from error
    if not isinstance(found, dict):
        raise SourceError("unreadable", f"the service sent a {type(found).__name__} instead of an object")
    return found


def _records(answer: Json, name: str) -> list[Json]:
    found = answer.get(name)
    if found is None and (name in answer or "total" in answer):  # the real service: nothing found, or withheld
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise SourceError("unreadable", f"the service's answer has no list of papers in {name!r}")
    return found


def _papers(records: Iterable[Any]) -> list[Paper]:
    """Return the records that name a paper; the real service has some without id or title."""
    return [paper for record in records if (paper := _paper(record)) is not None]


def _paper(record: Any) -> Paper | None:
    if not isinstance(record, dict):
        return None
    paper_id, title, year = record.get("paperId"), record.get("title"), record.get("year")
    if not (isinstance(paper_id, str) and 0 < len(paper_id) <= MAX_ID_CHARS and _line(title)):
        return None
    if sanitize(paper_id) != paper_id:  # an address cannot contain half of a surrogate pair
        return None
    authors = record.get("authors")
    names = [each.get("name") for each in authors if isinstance(each, dict)] if isinstance(authors, list) else []
    return Paper(
        paper_id=paper_id,
        title=_line(title)[:MAX_TITLE_CHARS],
        abstract=_line(record.get("abstract")),
        year=year if isinstance(year, int) else None,
        authors=tuple(_line(name) for name in names),
        venue=_line(record.get("venue")),
    )


def _line(value: Any) -> str:
    return " ".join(sanitize(value).split()) if isinstance(value, str) else ""


def _read_key(variable: str) -> str:
    """Read the key from the environment: settings, which are written into the run, must not hold keys."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"service.api_key_variable={variable!r}: set that environment variable to the key")
    return key


def _check_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query
    except httpx.InvalidURL:
        valid = False
    if not valid or parsed.path.rstrip("/").endswith("/paper"):
        raise ConfigError(f"{url!r} is not the address of a paper service; expected one like http://localhost:8210")
    return url.rstrip("/")
