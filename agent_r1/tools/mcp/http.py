"""The HTTP client for MCP servers: a request that fails is that call's error and leaves the connection open.

By default, one failed request ends the SDK's connection and with it the calls of all episodes, and more than 100
requests at once wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx2

READ_SECONDS = 3600.0  # each call has its own limit, which is shorter
CONNECT_SECONDS = 30.0
UNREACHABLE = -32000  # the code for a closed connection


def make_http_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client for any number of concurrent calls."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx2.AsyncClient(
        headers=dict(headers),
        timeout=httpx2.Timeout(CONNECT_SECONDS, read=READ_SECONDS),
        transport=_Contained(httpx2.AsyncHTTPTransport(limits=limits)),
    )


class _Contained(httpx2.AsyncBaseTransport):
    """Answers a request that could not be sent with an error of the protocol."""

    def __init__(self, inner: httpx2.AsyncHTTPTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            return await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            message = f"the server cannot be reached: {error or type(error).__name__}"
            body = {"jsonrpc": "2.0", "id": None, "error": {"code": UNREACHABLE, "message": message}}
            return httpx2.Response(502, json=body, request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()
