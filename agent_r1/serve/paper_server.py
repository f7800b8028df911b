"""A paper service with the endpoints and JSON of Semantic Scholar's, over any library of papers on this machine.

    GET /graph/v1/paper/search?query=&limit=&offset=&fields=   also without /graph/v1, here and below
    GET /graph/v1/paper/ID?fields=
    GET /graph/v1/paper/ID/references?limit=&offset=&fields=   /citations
    GET /recommendations/v1/papers/forpaper/ID?limit=&fields=
    GET /health

Searches run in threads. Limits apply to requests under way (503 above that), to requests per second if a rate is
set (429), to open connections and to their idle time. Both refusals say when to retry. For encryption
and access control, put a proxy in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from agent_r1.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

FIELDS = ("paperId", "title", "abstract", "year", "venue", "authors", "referenceCount", "citationCount")
DEFAULT_FIELDS = "paperId,title"
DEFAULT_LIMIT, MAX_LIMIT, MAX_OFFSET = 10, 1000, 9_000
MAX_QUERY_CHARS = 1000
THREADS = 2
FILES_RESERVED = 64  # file descriptors kept for the library, the log and the server itself


class PaperRecord(Protocol):
    @property
    def paper_id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def abstract(self) -> str: ...
    @property
    def year(self) -> int | None: ...
    @property
    def authors(self) -> Sequence[str]: ...
    @property
    def venue(self) -> str: ...
    @property
    def references(self) -> Sequence[str]: ...


class PaperLibrary(Protocol):
    """What is served. Used from several threads."""

    def __len__(self) -> int: ...
    def __contains__(self, paper_id: object) -> bool: ...
    def get(self, paper_id: str) -> PaperRecord: ...
    def find(self, query: str, limit: int) -> Sequence[PaperRecord]: ...
    def references(self, paper_id: str) -> Sequence[PaperRecord]: ...
    def citations(self, paper_id: str) -> Sequence[PaperRecord]: ...
    def similar(self, paper_id: str, limit: int) -> Sequence[PaperRecord]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperLimits:
    rate: float | None = None  # requests per second of all clients together; None: no limit
    max_running: int = 512  # requests under way
    seconds: float = 20.0  # time limit for sending a request's headers, and for answering it
    max_connections: int = 2048

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {value}")


class _Refusal(Exception):
    def __init__(self, status: int, message: str, wait: int | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, {} if wait is None else {"Retry-After": str(wait)}


class _App:
    def __init__(self, library: PaperLibrary, limits: PaperLimits) -> None:
        self._library, self._limits = library, limits
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="papers")
        self._running = 0
        self._next_request = 0.0  # when the rate allows it

    async def search(self, request: Request) -> Response:
        def answer() -> dict[str, Any]:
            query = request.query_params.get("query", "")
            if not query.strip() or len(query) > MAX_QUERY_CHARS:
                raise _Refusal(400, f"give a query of 1 to {MAX_QUERY_CHARS} characters")
            limit, offset, show = self._page(request)
            found = self._library.find(query, offset + limit)
            return {"total": len(found), "offset": offset, "data": [show(paper) for paper in found[offset:]]}

        return await self._answer(answer)

    async def paper(self, request: Request) -> Response:
        return await self._answer(lambda: self._page(request)[2](self._library.get(self._id(request))))

    async def linked(self, request: Request, kind: str) -> Response:
        def answer() -> dict[str, Any]:
            limit, offset, show = self._page(request)
            find, name = {
                "references": (self._library.references, "citedPaper"),
                "citations": (self._library.citations, "citingPaper"),
            }[kind]
            found = find(self._id(request))[offset : offset + limit]
            return {"offset": offset, "data": [{name: show(paper)} for paper in found]}

        return await self._answer(answer)

    async def recommended(self, request: Request) -> Response:
        def answer() -> dict[str, Any]:
            limit, _, show = self._page(request)
            found = self._library.similar(self._id(request), limit)
            return {"recommendedPapers": [show(paper) for paper in found]}

        return await self._answer(answer)

    async def health(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok", "num_papers": len(self._library), "running": self._running})

    async def _answer(self, work: Callable[[], Mapping[str, Any]]) -> Response:
        from starlette.responses import JSONResponse

        try:
            self._admit()
            self._running += 1
            try:
                found = await asyncio.wait_for(
                    asyncio.get_running_loop().run_in_executor(self._threads, work), self._limits.seconds
                )
            finally:
                self._running -= 1
        except _Refusal as error:
            return JSONResponse({"error": str(error)}, error.status, error.headers)
        except TimeoutError:
            return JSONResponse({"error": f"no answer within {self._limits.seconds:g} s"}, 504)
        except Exception:
            logger.exception("a request failed")
            return JSONResponse({"error": "the server failed; see its log"}, 500)
        return JSONResponse(found)

    def _admit(self) -> None:
        if self._running >= self._limits.max_running:
            raise _Refusal(503, "too many requests are under way; try again later", wait=1)
        if self._limits.rate is not None:
            now = time.monotonic()
            if now < self._next_request:
                raise _Refusal(429, "Too Many Requests", wait=math.ceil(self._next_request - now))
            self._next_request = max(now, self._next_request) + 1 / self._limits.rate

    def _id(self, request: Request) -> str:
        paper_id: str = request.path_params["paper_id"]
        if paper_id not in self._library:
            raise _Refusal(404, f"Paper with id {paper_id[:80]} not found")
        return paper_id

    def _page(self, request: Request) -> tuple[int, int, Callable[[PaperRecord], dict[str, Any]]]:
        """Read limit, offset and fields."""
        given = request.query_params
        limit, offset = (_number(given, "limit", DEFAULT_LIMIT), _number(given, "offset", 0))
        if not (1 <= limit <= MAX_LIMIT and 0 <= offset <= MAX_OFFSET):
            raise _Refusal(400, f"limit must be 1 to {MAX_LIMIT} and offset 0 to {MAX_OFFSET}")
        fields = list(dict.fromkeys(["paperId", *(given.get("fields") or DEFAULT_FIELDS).split(",")]))
        unknown = [field for field in fields if field not in FIELDS]
        if unknown:
            raise _Refusal(400, f"Unrecognized or unsupported fields: [{', '.join(unknown)[:80]}]")
        return limit, offset, partial(self._record, fields=fields)

    def _record(self, paper: PaperRecord, fields: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Callable[[], Any]] = {
            "paperId": lambda: paper.paper_id,
            "title": lambda: paper.title,
            "abstract": lambda: paper.abstract or None,
            "year": lambda: paper.year,
            "venue": lambda: paper.venue,
            "authors": lambda: [{"authorId": None, "name": name} for name in paper.authors],
            "referenceCount": lambda: len(paper.references),
            "citationCount": lambda: len(self._library.citations(paper.paper_id)),
        }
        return {field: values[field]() for field in fields}


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _Refusal(400, f"{name} must be an integer")
    return int(text)


def make_paper_config(library: PaperLibrary, limits: PaperLimits) -> uvicorn.Config:
    """Return the configuration of a uvicorn server with limited connections."""
    try:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError("the paper server needs starlette and uvicorn: pip install 'agent-r1[server]'") from error
    from agent_r1.serve.connections import bounded_protocol

    app = _App(library, limits)
    routes = [Route("/health", app.health)]
    for prefix in ("/graph/v1", ""):
        routes.append(Route(f"{prefix}/paper/search", app.search))
        for kind in ("references", "citations"):
            routes.append(Route(f"{prefix}/paper/{{paper_id:path}}/{kind}", partial(app.linked, kind=kind)))
        routes.append(Route(f"{prefix}/paper/{{paper_id:path}}", app.paper))
    routes.append(Route("/recommendations/v1/papers/forpaper/{paper_id:path}", app.recommended))
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # accepting more would fail for all clients
    places = max(1, min(limits.max_connections, open_files - FILES_RESERVED))
    return uvicorn.Config(
        Starlette(routes=routes),
        http=bounded_protocol(seconds=limits.seconds, max_connections=places),
        ws="none",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(limits.seconds),
    )


def papers_command(
    data: Annotated[
        Path | None, typer.Option(help="A folder that `agent-r1 data recipe paper_search` has filled.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for the whole network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8210,
    rate: Annotated[float | None, typer.Option(help="Requests per second; more are refused with 429.")] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of a request.")] = 20.0,
) -> None:
    """Serve the papers of the recipe paper_search over HTTP, as Semantic Scholar does, until interrupted."""
    from agent_r1.build.resolve import resolve
    from agent_r1.serve.listening import bind, link_name

    limits = PaperLimits(rate=rate, seconds=seconds)
    folder = resolve("data.library_folder", recipe="paper_search")(None if data is None else str(data))
    library: PaperLibrary = resolve("corpus.open_library", recipe="paper_search")(folder)
    config = make_paper_config(library, limits)
    import uvicorn

    with bind(host, port) as listener:
        library.find("language", 1)  # loads everything, so that a damaged library fails here
        listener.listen(config.backlog)
        typer.echo(f"{len(library):,} papers at http://{link_name(host)}:{listener.getsockname()[1]}")
        with contextlib.suppress(KeyboardInterrupt):  # raised again when everything is answered
            uvicorn.Server(config).run(sockets=[listener])
