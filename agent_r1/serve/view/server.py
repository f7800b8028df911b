"""The viewer's HTTP server: static files of this package, JSON under /api, and the pictures of runs. Read-only.

What agents write is hostile input, and so is every other page in the user's browser:
* A strict Content-Security-Policy: only our own scripts run, nothing is loaded from elsewhere, nobody may frame us.
  Trusted Types make the browser refuse to parse text as HTML, should the page ever try.
* On a loopback address, requests must name a loopback host, or a web page could reach us by rebinding its DNS name.
* On any other address, requests need a token. It comes with the printed link and is then kept in a cookie.
* Nothing in a request is used as a path: runs and files are looked up by name among those that exist. Pictures have
  names of 32 hexadecimal digits and the media type of their suffix, which is never one that can hold a script.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from agent_r1.errors import AgentR1Error
from agent_r1.serve.headers import adding_headers
from agent_r1.serve.listening import LOOPBACK_NAMES, bind, is_loopback, link_name
from agent_r1.serve.view.api import Api
from agent_r1.serve.view.library import Library, NotFound

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
COOKIE = "agent-r1-view"
MAX_CONNECTIONS = 256
IDLE_SECONDS = 30.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def static_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = files("agent_r1.serve.view") / "static"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name.endswith(tuple(TYPES))}


class Guard:
    """Refuses requests that are not the user's, and puts the security headers on every answer."""

    def __init__(self, app: Any, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        refusal = self._refuse(Request(scope))
        await (refusal or self._app)(scope, receive, adding_headers(send, HEADERS))

    def _refuse(self, request: Request) -> Response | None:
        if self._token is None:
            host = request.headers.get("host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name in LOOPBACK_NAMES:
                return None
            return PlainTextResponse("This viewer answers only to localhost. Open it as http://localhost:PORT\n", 403)
        if secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), self._token.encode()):
            return None
        given = request.query_params.get("token", "")
        if request.url.path == "/" and secrets.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse("/", 303)  # so that the token is not left in the address bar
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", path="/")
            return answer
        return PlainTextResponse("This viewer needs its token: open the link that `agent-r1 view` printed.\n", 401)


def make_app(library: Library, *, token: str | None = None) -> Guard:
    """Return the ASGI application. Without a token it answers only to loopback names."""
    api, static = Api(library), static_files()

    async def question(request: Request) -> Response:
        params = dict(request.query_params)
        try:
            status, content = 200, await run_in_threadpool(api.answer, request.path_params["name"], params)
        except NotFound as error:
            status, content = 404, {"error": str(error)}
        except (AgentR1Error, OSError) as error:
            status, content = 400, {"error": str(error)}
        # Escaped to ASCII: text of agents may hold halves of surrogate pairs, which UTF-8 cannot.
        text = json.dumps(content, ensure_ascii=True, allow_nan=False, default=str)
        return Response(text, status, media_type="application/json")

    async def picture(request: Request) -> Response:
        try:
            content, media_type = await run_in_threadpool(api.picture, **request.path_params)
        except (AgentR1Error, OSError):
            return PlainTextResponse("not found\n", 404)
        return Response(content, media_type=media_type)

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in static:
            return PlainTextResponse("not found\n", 404)
        return Response(static[name], media_type=TYPES[name[name.rindex(".") :]])

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/static/{name}", page, methods=["GET"]),
        Route("/api/{name}", question, methods=["GET"]),
        Route("/pictures/{run}/{name}", picture, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes), token=token)


def serve(library: Library, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until interrupted. `announce` gets the link once the page can be opened. Port 0 is a free port."""
    from agent_r1.serve.connections import bounded_protocol

    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    config = uvicorn.Config(
        make_app(library, token=token),
        http=bounded_protocol(seconds=IDLE_SECONDS, max_connections=MAX_CONNECTIONS),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    with bind(host, port) as listener:
        listener.listen(config.backlog)
        name = link_name(host)
        query = "" if token is None else f"?{urlencode({'token': token})}"
        announce(f"http://{name}:{listener.getsockname()[1]}/{query}")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
