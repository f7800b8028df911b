"""The gateway's HTTP server: one per run, on a free loopback port, in the event loop of the episodes.

    /s/SESSION/v1/chat/completions      or /v1/chat/completions with the session as the API key

Sessions are unguessable, and end with their episode. Whatever one client does (a body that is not JSON or too large, a
connection that stalls, the key of another episode) is answered or closed without touching the episodes of others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agent_r1.errors import RolloutError
from agent_r1.guard import trace
from agent_r1.resources import Resource
from agent_r1.serve.connections import bounded_protocol
from agent_r1.serve.gateway.anthropic_api import AnthropicMessages
from agent_r1.serve.gateway.client import MODEL, ClientSettings
from agent_r1.serve.gateway.dialects import ChatCompletions, Dialect
from agent_r1.serve.gateway.responses_api import Responses
from agent_r1.serve.gateway.session import Session
from agent_r1.wire.api_error import SERVER, ApiError
from agent_r1.wire.chat_answer import SSE_HEADERS, to_json
from agent_r1.wire.request_body import parse_object, read_body

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8192
MAX_BODY_BYTES = 20_000_000
READ_SECONDS = 60.0  # time to send a body
STALL_SECONDS = 30.0  # a client that reads nothing for this long is disconnected
MAX_ENDED = 10_000  # sessions remembered as ended; older ones are unknown
_PATH = re.compile(r"(?:/s/(?P<session>[\w-]{1,128}))?/v1/(?P<endpoint>[\w/]{1,64})")

COUNT = "messages/count_tokens"
DIALECTS: dict[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": AnthropicMessages(),
    COUNT: AnthropicMessages(counts_only=True),
}


class GatewayServer(Resource):
    """Serves the sessions of one run."""

    def __init__(self, *, episode_seconds: float) -> None:
        self.port = 0  # 0 while the server is closed
        self._seconds = episode_seconds
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind((HOST, 0))
        config = uvicorn.Config(
            self._app,
            http=bounded_protocol(
                seconds=max(READ_SECONDS, self._seconds),  # an agent may be busy between two calls
                busy_seconds=READ_SECONDS + self._seconds,
                stall_seconds=STALL_SECONDS,
                max_connections=MAX_CONNECTIONS,
            ),
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                raise RolloutError("the gateway's server did not start; see the log")
            await asyncio.sleep(0.005)
        self.port = listener.getsockname()[1]

    async def close(self) -> None:
        self.port = 0
        for session in self._sessions.values():
            session.seal()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=5)
            self._serving.cancel()

    @contextmanager
    def serving(self, session: Session) -> Iterator[ClientSettings]:
        """Offer a session to its agent. It is sealed at the end."""
        if not self.port:
            raise RolloutError("the gateway is not open: play the rows inside `task.run`")
        name = secrets.token_urlsafe(32)
        self._sessions[name] = session
        root = f"http://{HOST}:{self.port}/s/{name}"
        try:
            yield ClientSettings(base_url=f"{root}/v1", anthropic_base_url=root, api_key=name)
        finally:
            session.seal()
            del self._sessions[name]
            self._ended[name] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        path = _PATH.fullmatch(request.url.path)
        endpoint = path["endpoint"] if path else ""
        dialect = DIALECTS.get(endpoint, DIALECTS["chat/completions"])
        try:
            answer = await self._route(request, path and path["session"], endpoint)
        except ApiError as error:
            answer = JSONResponse(dialect.error(error), error.status, error.headers)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 (ours: it must not end the server, and the client may try again)
            logger.error("the gateway failed to answer %s\n%s", endpoint, trace(error))
            failed = ApiError(500, "the gateway failed; see the log of the run", kind=SERVER)
            answer = JSONResponse(dialect.error(failed), 500)
        await answer(scope, receive, send)

    async def _route(self, request: Request, name: str | None, endpoint: str) -> Response:
        session = self._find(name, request)
        if request.method == "GET" and endpoint == "models":
            return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "agent-r1"}]})
        if endpoint not in DIALECTS:
            raise ApiError(404, f"there is no {request.method} {request.url.path[-100:]} here", code="not_found")
        if request.method != "POST":
            raise ApiError(405, f"{endpoint} takes POST, got {request.method}", code="method_not_allowed")
        body = await read_body(
            request.stream(),
            max_bytes=MAX_BODY_BYTES,
            seconds=READ_SECONDS,
            length=request.headers.get("content-length"),
        )
        return await _answer(session, DIALECTS[endpoint], endpoint, body, request)

    def _find(self, name: str | None, request: Request) -> Session:
        """Find the session by the path, or else by the key. A key of another session is refused; any other key is
        ignored."""
        key = _api_key(request)
        if name is not None and key != name and (key in self._sessions or key in self._ended):
            raise ApiError(401, "this is the key of another session", code="invalid_api_key")
        wanted = key if name is None else name
        if wanted in self._ended:
            raise ApiError(410, "the episode of this session has ended", code="session_closed")
        if wanted not in self._sessions:
            message = "unknown session: use the base URL or the key that the agent was given"
            raise ApiError(401, message, code="invalid_api_key")
        return self._sessions[wanted]


class _Server(uvicorn.Server):  # type: ignore[misc]  # mypy does not read uvicorn
    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to the run."""
        return nullcontext()


def _api_key(request: Request) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer[7:].strip() if bearer.lower().startswith("bearer ") else request.headers.get("x-api-key", "")


async def _answer(session: Session, dialect: Dialect, endpoint: str, body: bytes, request: Request) -> Response:
    asked = dialect.read(parse_object(body))
    if endpoint == COUNT:
        return JSONResponse({"input_tokens": session.count_tokens(asked)})
    repeated = request.headers.get("idempotency-key")
    fingerprint = hashlib.sha256(b"\0".join((endpoint.encode(), (repeated or "").encode(), body))).hexdigest()
    is_retry = repeated is not None or request.headers.get("x-stainless-retry-count", "0") != "0"
    said = await session.answer(asked, fingerprint=fingerprint, is_retry=is_retry)
    if await request.is_disconnected():
        raise ClientDisconnect
    session.delivered(fingerprint)
    if not asked.stream:
        return Response(to_json(dialect.write(said, asked)), media_type="application/json")
    return StreamingResponse(_stream(dialect.events(said, asked)), headers=SSE_HEADERS)


async def _stream(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event
