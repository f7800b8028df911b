"""One connection to an MCP server: a process that we start (stdio) or a URL (streamable HTTP).

The SDK requires that the task which opens a connection also closes it, so a connection is a task of its own and
calls come from the tasks of episodes. Knows nothing about our tools.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from agent_r1.guard import describe

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as RemoteTool

    from agent_r1.tools.mcp.tool_set import MCPTools

CHECK_SECONDS = 5.0  # time for a server to prove that it still answers
CLOSE_SECONDS = 8.0  # the SDK asks a process to exit, terminates it, then kills it
STDERR_BYTES = 2000  # how much of a server's last output errors quote
MAX_STDERR_BYTES = 1 << 24  # how much of it is kept in a file


class ServerError(Exception):
    """A server cannot be started or reached."""


def expand(text: str) -> str:
    """Replace `$NAME` by the environment variable and `$$` by a dollar sign."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "$":
            return "$"
        if name not in os.environ:
            raise ServerError(f"the environment variable {name} is not set; write $$ for a dollar sign")
        return os.environ[name]

    return re.sub(r"\$(\$|[A-Za-z_]\w*)", value, text)


class Connection:
    """A connection that is opened once and closed once."""

    def __init__(self, server: MCPTools) -> None:
        self.server = server
        self.calls = 0  # calls in progress
        self._in_doubt = False  # a call failed or timed out, so the server may be gone
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._stderr: IO[str] | None = None  # what the process writes
        self._said = ""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raise ServerError with the reason and the end of the server's stderr if it does not start in time."""
        self._task = asyncio.create_task(self._serve())
        try:
            either: set[asyncio.Future[Any]] = {self._task, self._ready}
            await asyncio.wait(either, timeout=self.server.start_seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._ready.done():
            return
        if self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            reason = "the connection was closed" if error is None else _reason(error)
        else:
            reason = f"no answer within {self.server.start_seconds:g} s (start_seconds)"
        await self.close()
        verb = "be reached" if self.server.url else "start"
        raise ServerError(f"the MCP server {self.server.place!r} could not {verb}: {reason}{self.stderr()}")

    async def is_alive(self) -> bool:
        """Whether calls may be sent. Asks the server if an earlier call failed."""
        assert self._task is not None
        if self._task.done() or self._stop.is_set():
            return False
        if self._in_doubt:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._ready.result().list_tools(cache_mode="refresh")
            except Exception:  # noqa: BLE001 (whatever went wrong, a new connection is better)
                return False
            self._in_doubt = False
        return True

    async def tools(self) -> list[RemoteTool]:
        """All tools that the server offers. The caller limits the time."""
        client, cursor, found = self._ready.result(), None, list[Any]()
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: Mapping[str, Any], *, seconds: float) -> CallToolResult:
        """Raise what the SDK raises, or TimeoutError."""
        answered, self.calls = False, self.calls + 1
        try:
            async with asyncio.timeout(seconds):
                result = await self._ready.result().call_tool(name, dict(arguments))
            answered = True
            return result
        finally:
            self.calls -= 1
            self._in_doubt = self._in_doubt or not answered
            self.stderr()

    def stderr(self) -> str:
        """Return what the server last wrote to stderr, as the end of a message; empty if it wrote nothing."""
        if self._stderr is not None and not self._stderr.closed:
            fd = self._stderr.fileno()
            size = os.fstat(fd).st_size
            said = os.pread(fd, STDERR_BYTES, max(0, size - STDERR_BYTES)).decode(errors="replace").strip()
            self._said = f"; it last wrote to stderr:\n{said}" if said else ""
            if size > MAX_STDERR_BYTES:
                os.ftruncate(fd, 0)
        return self._said

    async def close(self) -> None:
        """End the connection, and the process if we started it."""
        self._stop.set()
        if self._task is None:
            return
        if not self._task.done():  # otherwise it may have ended with another event loop
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS if self._ready.done() else 0)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # read, so that asyncio does not report it

    async def _serve(self) -> None:
        from mcp import Client

        server = self.server
        async with AsyncExitStack() as stack:
            transport = await self._over_http(stack) if server.url else await self._over_stdio(stack)
            # Only older versions of the protocol have sessions over HTTP.
            mode = "legacy" if server.url and server.sessions == "episode" else "auto"
            client = await stack.enter_async_context(Client(transport, mode=mode))
            self._ready.set_result(client)
            await self._stop.wait()

    async def _over_stdio(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        server = self.server
        program, *arguments = server.words
        self._stderr = stack.enter_context(TemporaryFile("a+"))  # noqa: SIM115 ("a": it can be truncated meanwhile)
        stack.callback(self.stderr)  # when the process has ended
        parameters = StdioServerParameters(
            command=sys.executable if program == "python" else program,
            args=arguments,
            env={key: expand(value) for key, value in (server.env or {}).items()},
            cwd=server.cwd,
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errlog=self._stderr)

    async def _over_http(self, stack: AsyncExitStack) -> Any:
        from mcp.client.streamable_http import streamable_http_client

        from agent_r1.tools.mcp.http import make_http_client

        client = make_http_client({key: expand(value) for key, value in (self.server.headers or {}).items()})
        await stack.enter_async_context(client)
        return streamable_http_client(expand(self.server.url or ""), http_client=client)


def _reason(error: BaseException) -> str:
    """The innermost cause; the SDK wraps exceptions in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServerError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"there is no program or folder {error.filename!r}"
    return describe(error)
