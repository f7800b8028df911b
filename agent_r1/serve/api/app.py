"""The server: its paths, access control, and its life from listening to the last answer.

* On a loopback address without a key, requests must name a loopback host, or a web page could reach us by rebinding its
  DNS name; and a request from a page of another origin is refused, because browsers send some without asking.
* On any other address, every request needs the API key. Only the chat page and /health can be read without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_r1 import __version__
from agent_r1.errors import ConfigError
from agent_r1.resources import Resource, opened
from agent_r1.serve.api.bare_mode import BareMode
from agent_r1.serve.api.bare_text import start_text
from agent_r1.serve.api.counters import Counters
from agent_r1.serve.api.endpoints import (
    Asked,
    ChatWriter,
    CompletionWriter,
    Endpoint,
    Receive,
    Scope,
    Send,
    send_json,
)
from agent_r1.serve.api.events import Mode
from agent_r1.serve.api.limits import Admission, ServeLimits
from agent_r1.serve.api.served_model import ServedModel
from agent_r1.serve.connections import bounded_protocol
from agent_r1.serve.headers import adding_headers
from agent_r1.serve.listening import LOOPBACK_NAMES, bind, is_loopback, link_name
from agent_r1.serve.view.server import HEADERS, TYPES
from agent_r1.wire.api_error import ApiError, unsupported
from agent_r1.wire.chat_answer import new_id, now
from agent_r1.wire.chat_request import parse_chat
from agent_r1.wire.text_completions import TextWriter, parse_text_completion

FILES_RESERVED = 64  # file descriptors kept for the model, the log and the server itself
SHUTDOWN_SECONDS = 10  # time for answers that are being written when the server is stopped
OPEN_PATHS = ("/", "/health", "/favicon.ico")  # as well as /static/: nothing here is secret


class Server:
    """The application. `resources` are open, and the engine runs, as long as it does."""

    def __init__(
        self, mode: Mode, model: ServedModel, *, limits: ServeLimits, resources: Sequence[Resource] = ()
    ) -> None:
        self.model = model
        self._mode, self._limits, self._resources = mode, limits, resources
        self._created = now()
        self._counters, self._admission = Counters(), Admission(limits.max_requests)
        self._static = _static_files()

    def app(self) -> Starlette:
        endpoint: dict[str, Any] = {
            "limits": self._limits,
            "admission": self._admission,
            "counters": self._counters,
        }
        chat = Endpoint(route="chat", read=self._read_chat, **endpoint)
        text = Endpoint(route="completions", read=self._read_text, **endpoint)
        return Starlette(
            routes=[
                Route("/", self._page, methods=["GET"]),
                Route("/static/{name}", self._page, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._models, methods=["GET"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", text, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refuse_path},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            async with opened(self._resources):
                yield
        finally:
            await self.model.engine.close()

    # requests

    def _read_chat(self, body: dict[str, Any]) -> Asked:
        request = parse_chat(body, extensions=self._mode.extensions)
        self._check_model(request.model)
        writer = ChatWriter(
            model=self.model.name,
            answer_id=new_id("chatcmpl"),
            created=now(),
            n=request.n,
            include_usage=request.include_usage,
        )
        return Asked(start=lambda: self._mode.start(request), writer=writer, stream=request.stream)

    def _read_text(self, body: dict[str, Any]) -> Asked:
        mode, limits = self._mode, self._limits
        if not isinstance(mode, BareMode):
            raise unsupported("prompt", "this server runs an agent (--agent): use /v1/chat/completions")
        bare: BareMode = mode
        request = parse_text_completion(body)
        self._check_model(request.model)
        head: dict[str, Any] = {"model": self.model.name, "answer_id": new_id("cmpl"), "created": now()}
        writer = CompletionWriter(
            TextWriter(**head, include_usage=request.include_usage),
            include_usage=request.include_usage,
        )
        return Asked(start=lambda: start_text(bare, request, limits), writer=writer, stream=request.stream)

    def _check_model(self, name: str) -> None:
        if name != self.model.name:
            message = f"the model {name[:200]!r} does not exist here; this server has {self.model.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    # about the server

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "agent-r1",
            "max_model_len": self.model.max_context_tokens,
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self.model.name:
            message = f"the model {name[:200]!r} does not exist here"
            return JSONResponse(ApiError(404, message, code="model_not_found").as_json(), 404)
        return JSONResponse(model)

    async def _health(self, request: Request) -> Response:
        mode = "model" if isinstance(self._mode, BareMode) else "agent"
        about = {"status": "ok", "version": __version__, "model": self.model.name, "mode": mode}
        return JSONResponse({**about, "active_requests": self._admission.active})

    async def _metrics(self, request: Request) -> Response:
        stats = getattr(self.model.engine, "stats", None)  # engines outside this process have none
        engine = dataclasses.asdict(stats) if dataclasses.is_dataclass(stats) else {}  # type: ignore[arg-type]
        text = self._counters.text(active=self._admission.active, engine=engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._static:
            return _refuse(404, f"there is no {request.url.path[:200]}")
        return Response(self._static[name], media_type=TYPES[name[name.rindex(".") :]])


def _static_files() -> dict[str, bytes]:
    folder = files("agent_r1.serve.api") / "static"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name.endswith(tuple(TYPES))}


def _refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(ApiError(status, message).as_json(), status, headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}. The API is under /v1"
    return _refuse(error.status_code, message, error.headers)


class Gate:
    """Refuses requests without access, and adds the security headers to every answer."""

    def __init__(self, app: Any, *, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        send = adding_headers(send, HEADERS)
        try:
            self._check(Request(scope))
        except ApiError as error:  # the body is not read, so the connection cannot be used again
            await send_json(send, error.as_json(), error.status, {**error.headers, "Connection": "close"})
            return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        path = request.url.path
        if self._key is not None:
            given = request.headers.get("authorization", "")
            kind, _, key = given.partition(" ")
            known = kind.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self._key)
            if not known and path not in OPEN_PATHS and not path.startswith("/static/"):
                message = "send this server's API key as 'Authorization: Bearer KEY'"
                headers = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
            return
        host = request.headers.get("host", "").lower()
        if _host_name(host) not in LOOPBACK_NAMES:
            raise ApiError(403, "this server answers only to localhost; for other names, set an API key")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            raise ApiError(403, "this server does not answer to web pages of other origins; set an API key")


def _host_name(host: str) -> str:
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def make_config(server: Server, *, key: str | None, limits: ServeLimits) -> uvicorn.Config:
    """The configuration of a uvicorn server with limited connections."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # accepting more would fail for all clients
    return uvicorn.Config(
        Gate(server.app(), key=key),
        http=bounded_protocol(
            seconds=limits.idle_seconds,
            max_connections=max(1, min(limits.max_connections, open_files - FILES_RESERVED)),
            busy_seconds=limits.request_seconds + 2 * limits.read_seconds,
            stall_seconds=limits.stall_seconds,
        ),
        timeout_keep_alive=math.ceil(limits.idle_seconds) + 1,  # our own limit applies first
        ws="none",
        log_level="error",  # do not log each invalid request
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=min(SHUTDOWN_SECONDS, math.ceil(limits.request_seconds)),
    )


def serve(
    server: Server, *, host: str, port: int, key: str | None, limits: ServeLimits, announce: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM, then end the answers in progress. `announce` gets the address of the server."""
    check_key(host, key)
    config = make_config(server, key=key, limits=limits)
    with bind(host, port) as listener:
        listener.listen(config.backlog)
        announce(f"http://{link_name(host)}:{listener.getsockname()[1]}")
        running = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):  # raised again when everything is answered
            running.run(sockets=[listener])
            if not running.started:
                raise RuntimeError("the server did not start; see the messages above")


def check_key(host: str, key: str | None) -> None:
    """Raise ConfigError if others than this machine could use the server without a key."""
    if key is not None and (not key.isascii() or not key.isprintable() or len(key) < 8 or " " in key):
        raise ConfigError("the API key must be at least 8 printable ASCII characters without spaces")
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: set --api-key or AGENT_R1_API_KEY, which clients then "
            "send as OPENAI_API_KEY, or listen on 127.0.0.1"
        )
