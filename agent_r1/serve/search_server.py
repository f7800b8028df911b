"""An HTTP search server for many trainers: POST /search, GET /search?query=, GET /health.

Waiting queries are ranked together in a separate thread, while the event loop reads further requests. Everything is
bounded: the size of a body, queries per request, waiting queries (503 with Retry-After above that), the time to receive
a body (408) and to find its answer (504), open connections and how long each may be idle (`connections.py`). When
stopped, the server accepts no new connections and answers the requests it has. For encryption and access control, put a
proxy in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from agent_r1.batching import Batcher
from agent_r1.errors import AgentR1Error, ConfigError, check_limits
from agent_r1.tools.search.index import Hit, Index, Kind, check_kind
from agent_r1.tools.search.wire import Health, SearchRequest, write_results

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

MAX_FIELD_CHARS = 60  # characters of a field's name in an error
FILES_RESERVED = 64  # file descriptors kept for the index, the log and the server itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    top_k: int = 5  # if a request does not set it
    max_top_k: int = 100
    max_queries: int = 512  # limit per request
    max_query_chars: int = 2000
    max_body_bytes: int = 2_000_000
    max_waiting: int = 4096  # queries
    max_batch: int = 128  # queries ranked together; a new request waits for at most one running batch
    seconds: float = 20.0  # time limit for sending the headers, for sending the body, and for finding the answer
    max_connections: int = 2048  # one more closes the connection that has been idle longest

    def __post_init__(self) -> None:
        check_limits(self)


class Refusal(Exception):
    """The answer to a request that is not served."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


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
        if self.num_waiting + len(queries) > self._limits.max_waiting:
            raise Refusal(503, "too many queries are waiting; try again later", {"Retry-After": "1"})
        waiting = asyncio.gather(*(self._batcher.submit(_Query(text, top_k, kind)) for text in queries))
        try:
            return await asyncio.wait_for(waiting, self._limits.seconds)
        except TimeoutError:
            raise Refusal(504, f"no answer within {self._limits.seconds:g} s; the server is busy") from None

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
        # A larger request could never be accepted, however often it were sent.
        self._max_queries = min(limits.max_queries, limits.max_waiting)
        self._queue: QueryQueue

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._queue = QueryQueue(self._index, self._limits)
        try:
            yield
        finally:
            self._queue.close()

    async def health(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        manifest = self._index.manifest
        health = Health(
            num_passages=manifest.num_passages,
            corpus_sha256=manifest.corpus_sha256,
            kinds=manifest.kinds,
            waiting=self._queue.num_waiting,
            max_queries=self._max_queries,
            max_top_k=self._limits.max_top_k,
        )
        return JSONResponse(health.model_dump())

    async def search(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            asked = await self._read(request)
            top_k, kind = self._check(asked)
            results = await self._queue.search(asked.queries, top_k, kind)
        except Refusal as error:
            return JSONResponse({"error": str(error)}, error.status, error.headers)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        except AgentR1Error as error:
            return JSONResponse({"error": str(error)}, 500)
        return JSONResponse(write_results(asked.queries, results))

    async def _read(self, request: Request) -> SearchRequest:
        try:
            if request.method == "GET":
                given = dict(request.query_params)
                queries = [given.pop("query", None)]
                return SearchRequest.model_validate({**given, "queries": queries})
            return SearchRequest.model_validate_json(await self._read_body(request), strict=True)
        except ValidationError as error:
            raise Refusal(400, _describe_problem(error)) from None

    async def _read_body(self, request: Request) -> bytes:
        limits, body = self._limits, b""
        close = {"Connection": "close"}  # the unread rest of the body must not be parsed as a request
        try:
            async with asyncio.timeout(limits.seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.max_body_bytes:
                        raise Refusal(413, f"the body has more than {limits.max_body_bytes:,} bytes", close)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {limits.seconds:g} s", close) from None
        return body

    def _check(self, asked: SearchRequest) -> tuple[int, Kind]:
        limits = self._limits
        if len(asked.queries) > self._max_queries:
            raise Refusal(413, f"{len(asked.queries)} queries in one request; the limit is {self._max_queries}")
        if max(map(len, asked.queries)) > limits.max_query_chars:
            raise Refusal(400, f"a query has more than {limits.max_query_chars} characters")
        top_k = asked.top_k or limits.top_k
        if top_k > limits.max_top_k:
            raise Refusal(400, f"top_k is more than {limits.max_top_k}")
        kind = asked.kind or self._index.default_kind
        return top_k, check_kind(kind, self._index.manifest, self._index.directory)


def make_config(index: Index, limits: ServerLimits) -> uvicorn.Config:
    """Return the configuration of a uvicorn server with limited connections."""
    try:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError("the search server needs starlette and uvicorn: pip install 'agent-r1[server]'") from error
    from agent_r1.serve.connections import bounded_protocol

    app = _App(index, limits)
    routes = [
        Route("/search", app.search, methods=["GET", "POST"]),
        Route("/health", app.health, methods=["GET"]),
    ]
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # accepting more would fail for all clients
    return uvicorn.Config(
        Starlette(routes=routes, lifespan=app.lifespan),
        http=bounded_protocol(
            seconds=limits.seconds, max_connections=max(1, min(limits.max_connections, open_files - FILES_RESERVED))
        ),
        ws="none",
        log_level="error",  # do not log each invalid request
        access_log=False,
        timeout_graceful_shutdown=math.ceil(limits.seconds),
    )


def serve(
    index: Index, *, host: str, port: int, limits: ServerLimits, announce: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then answer pending requests and return.

    `announce` is called with the address once clients can connect. Port 0 is a free port.
    """
    config = make_config(index, limits)
    import uvicorn

    with _bind(host, port) as listener:
        index.search(["warm up"], 1)  # loads the rankers, so a damaged index fails here
        try:
            listener.listen(config.backlog)  # only now: earlier clients would hang while the index loads
        except OSError as error:  # another server started at the same time
            raise _cannot_listen(host, port, error) from error
        if announce is not None:
            shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
            announce(f"http://{shown}:{listener.getsockname()[1]}")
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):  # raised again when everything is answered
            server.run(sockets=[listener])
            if not server.started:
                raise RuntimeError("the search server did not start; see its log")


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a taken address fails before the index is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off the delay of small packets (Nagle's algorithm) only for this protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows an immediate restart
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"cannot listen at {host}, port {port}: {error}. Choose another address or port")


def _describe_problem(error: ValidationError) -> str:
    """Describe the first problem in one short line, without the values that were sent."""
    problem = error.errors(include_input=False)[0]
    field = ".".join(map(str, problem["loc"]))[:MAX_FIELD_CHARS]
    return f"{field}: {problem['msg']}" if field else problem["msg"]
