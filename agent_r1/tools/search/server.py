"""An HTTP search server for many trainers: POST /search, GET /search?query=, GET /health.

All waiting queries are ranked together in a separate thread, while the event loop goes on reading requests. Everything
is bounded: the size of a body, queries per request, queries that wait (503 with Retry-After above that), the time to
receive a body (408) and to find its answer (504), open connections and how long each may stay idle (`connections.py`).
When stopped, the server accepts no new connections and answers the requests it has. For encryption and access control,
put a proxy in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_r1.batching import Batcher
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.tools.search.index import Hit, Index, Kind, check_kind
from agent_r1.tools.search.wire import BadRequest, Health, SearchRequest, show, write_results

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

RETRY_AFTER = "1"  # seconds a client that was sent away should wait
CLOSE = {"Connection": "close"}  # an unread rest of a body must not be parsed as a request
FILES_RESERVED = 64  # file descriptors kept for the index, the log and the server itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    top_k: int = 5  # where a request does not say
    max_top_k: int = 100
    max_queries: int = 512  # per request
    max_query_chars: int = 2000
    max_body_bytes: int = 2_000_000
    max_waiting: int = 4096  # queries; one more is sent away
    max_batch: int = 128  # queries ranked together: a request that comes now waits for one such batch
    seconds: float = 20.0  # for each of: sending the headers, sending the body, finding the answer
    max_connections: int = 2048  # one more closes the connection that has been idle longest

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {getattr(self, name)}")

    @property
    def queries_taken(self) -> int:
        """In one request. One of more than may wait would be told to come again, for ever."""
        return min(self.max_queries, self.max_waiting)


class Overloaded(Exception):
    """As many queries wait as may."""


class _Query(NamedTuple):
    text: str
    top_k: int
    kind: Kind


class QueryQueue:
    """Ranks waiting queries, batch by batch, in a separate thread."""

    def __init__(self, index: Index, limits: ServerLimits) -> None:
        self._index, self._limits = index, limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._batcher: Batcher[_Query, list[Hit]] = Batcher(
            self._rank_in_thread, max_items=limits.max_batch, max_concurrent=1
        )

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting

    async def search(self, queries: Sequence[str], top_k: int, kind: Kind) -> list[list[Hit]]:
        """Raise TimeoutError if the answer takes too long; the queries are then not ranked."""
        if self.num_waiting + len(queries) > self._limits.max_waiting:
            raise Overloaded
        waiting = asyncio.gather(*(self._batcher.submit(_Query(text, top_k, kind)) for text in queries))
        return await asyncio.wait_for(waiting, self._limits.seconds)

    def close(self) -> None:
        self._batcher.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _rank_in_thread(self, batch: list[_Query]) -> list[list[Hit]]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._rank, batch)
        except Exception:
            logger.exception("a search failed")
            raise

    def _rank(self, batch: list[_Query]) -> list[list[Hit]]:
        found: dict[_Query, list[Hit]] = {}
        for kind in {query.kind for query in batch}:
            queries = [query for query in batch if query.kind == kind]
            top_k = max(query.top_k for query in queries)
            for query, hits in zip(queries, self._index.search([q.text for q in queries], top_k, kind), strict=True):
                found[query] = hits[: query.top_k]
        return [found[query] for query in batch]


class _App:
    """The endpoints."""

    def __init__(self, index: Index, limits: ServerLimits) -> None:
        self._index, self._limits = index, limits
        self._queue: QueryQueue | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._queue = QueryQueue(self._index, self._limits)
        try:
            yield
        finally:
            self._queue.close()

    async def health(self, request: Request) -> Response:
        assert self._queue is not None
        manifest = self._index.manifest
        health = Health(
            num_passages=manifest.num_passages,
            corpus_sha256=manifest.corpus_sha256,
            kinds=[*manifest.kinds],
            max_queries=self._limits.queries_taken,
            max_top_k=self._limits.max_top_k,
            waiting=self._queue.num_waiting,
        )
        return _json(health.write())

    async def search(self, request: Request) -> Response:
        assert self._queue is not None
        try:
            asked = _from_address(request) if request.method == "GET" else await self._from_body(request)
            top_k, kind = self._checked(asked)
            results = await self._queue.search(asked.queries, top_k, kind)
        except _TooLarge as error:
            return _problem(413, str(error), CLOSE)
        except _TooSlow as error:
            return _problem(408, str(error), CLOSE)
        except (BadRequest, ConfigError) as error:
            return _problem(400, str(error))
        except Overloaded:
            return _problem(503, "too many queries wait; come again later", {"Retry-After": RETRY_AFTER})
        except TimeoutError:
            return _problem(504, f"no answer within {self._limits.seconds:g} s; the server is busy")
        except AgentR1Error as error:
            return _problem(500, str(error))
        return _json(write_results(asked.queries, results))

    async def _from_body(self, request: Request) -> SearchRequest:
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await self._body(request)
        except TimeoutError:
            raise _TooSlow(f"the body did not come within {self._limits.seconds:g} s") from None
        try:
            return SearchRequest.read(json.loads(body))
        except BadRequest:
            raise
        except (ValueError, RecursionError) as error:  # json limits neither depth nor digits; Python does
            raise BadRequest(f"the body is not readable JSON: {error}") from None

    async def _body(self, request: Request) -> bytes:
        largest, body = self._limits.max_body_bytes, b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > largest:
                raise _TooLarge(f"the body has more than {largest:,} bytes; send fewer queries at once")
        return body

    def _checked(self, asked: SearchRequest) -> tuple[int, Kind]:
        limits = self._limits
        if len(asked.queries) > limits.queries_taken:
            raise _TooLarge(f"{len(asked.queries)} queries in one request; at most {limits.queries_taken} are taken")
        if max(map(len, asked.queries)) > limits.max_query_chars:
            raise BadRequest(f"a query has more than {limits.max_query_chars} characters")
        top_k = limits.top_k if asked.top_k is None else asked.top_k
        if top_k > limits.max_top_k:
            raise BadRequest(f"top_k={show(top_k)} is more than {limits.max_top_k}")
        kind = asked.kind or self._index.default_kind
        return top_k, check_kind(kind, self._index.manifest, self._index.directory)


class _TooLarge(Exception):
    pass


class _TooSlow(Exception):
    pass


def make_app(index: Index, limits: ServerLimits) -> Starlette:
    """The ASGI application, for any server. That server must handle slow headers and idle connections."""
    _require_server()
    from starlette.applications import Starlette
    from starlette.routing import Route

    app = _App(index, limits)
    routes = [
        Route("/search", app.search, methods=["GET", "POST"]),
        Route("/health", app.health, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=app.lifespan)


def make_config(index: Index, limits: ServerLimits) -> uvicorn.Config:
    """The application in a server with limited connections."""
    app = make_app(index, limits)
    import uvicorn

    from agent_r1.tools.search.connections import bounded_protocol

    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # accepting more would fail for all clients
    protocol = bounded_protocol(
        seconds=limits.seconds, max_connections=max(1, min(limits.max_connections, open_files - FILES_RESERVED))
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="error",  # no log line for every invalid request
        access_log=False,
        timeout_graceful_shutdown=math.ceil(limits.seconds),
    )


def serve(
    index: Index, *, host: str, port: int, limits: ServerLimits, announce: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then answer what is under way and return.

    `announce` is told the address when clients can connect to it; port 0 is a free one.
    """
    config = make_config(index, limits)
    import uvicorn

    with _bound(host, port) as listener:
        index.search(["warm up"], 1)  # loads what ranks, so that a damaged index is found before a client finds it
        _listening(listener, config.backlog)  # only now: a client that connected earlier would hang while it loads
        if announce is not None:
            shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
            announce(f"http://{shown}:{listener.getsockname()[1]}")
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):  # raised again when everything is answered
            server.run(sockets=[listener])
            if not server.started:
                raise RuntimeError("the search server did not start; its log says why")


def _listening(listener: socket.socket, backlog: int) -> None:
    try:
        listener.listen(backlog)
    except OSError as error:  # another server that began at the same time was quicker
        host, port = listener.getsockname()[:2]
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}. Choose another address or port") from error


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has its address: one that is listened at already is found out before an index is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended server leaves does not matter
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}. Choose another address or port") from error
    return listener


def _from_address(request: Request) -> SearchRequest:
    given = request.query_params
    if "query" not in given:
        raise BadRequest("GET /search needs ?query=...")
    try:
        top_k = int(given["top_k"]) if "top_k" in given else None
    except ValueError:
        raise BadRequest(f"'top_k' must be a whole number, got {show(given['top_k'])}") from None
    return SearchRequest.read({"queries": [given["query"]], "top_k": top_k, "kind": given.get("kind")})


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")
    return Response(text, status_code=status, headers=headers, media_type="application/json")


def _problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": message}, status, headers)


def _require_server() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise ConfigError("the search server needs starlette and uvicorn: pip install 'agent-r1[server]'") from error
    assert starlette
    assert uvicorn
