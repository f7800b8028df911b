"""`MCPTools`: offers the tools of a server as agent-r1 tools, and holds the connections that their calls share.

A server is asked for its tools once, before the run. A call that fails because the server died is text for the model;
the next call connects again, and only if that fails too does an episode fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, wraps
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, validate_call

from agent_r1.errors import ConfigError, RolloutError, did_you_mean
from agent_r1.guard import describe
from agent_r1.tools.base import BaseTool, ToolError, ToolResult, ToolSet
from agent_r1.tools.mcp.connection import (
    CHECK_SECONDS,
    CLOSE_SECONDS,
    Connection,
    Server,
    ServerError,
    require_sdk,
)
from agent_r1.tools.mcp.results import as_result

if TYPE_CHECKING:
    from mcp.types import Tool as RemoteTool

    from agent_r1.tools.mcp.json_schema import SchemaArguments

logger = logging.getLogger(__name__)

Sessions = Literal["run", "episode"]
Seconds = Annotated[float, Field(gt=0)]


def _checked(create: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor raise ConfigError for a value of a wrong type, which YAML may have."""
    strictly = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))(create)

    @wraps(create)
    def checked(self: object, **settings: Any) -> None:
        try:
            strictly(self, **settings)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(map(str, wrong["loc"]))
            raise ConfigError(f"{name} of an MCP server: {wrong['msg']}, got {wrong['input']!r:.100}") from error

    return checked


class MCPTools(ToolSet):
    """The tools of an MCP server, to be listed among other tools."""

    @_checked
    def __init__(  # noqa: PLR0913 (all settings of a server)
        self,
        *,
        command: str | Sequence[str] | None = None,  # starts a server that talks over stdin and stdout
        url: str | None = None,  # URL of a running server (streamable HTTP), instead of a command
        env: Mapping[str, str] | None = None,  # environment of the command, beside PATH, HOME etc.; $NAME is replaced
        cwd: str | Path | None = None,  # working directory of the command; in YAML: relative to the recipe's folder
        headers: Mapping[str, str] | None = None,  # headers of requests to the url; $NAME is replaced
        only: Sequence[str] | None = None,  # names of tools; None: all
        prefix: str = "",  # put before the name of each tool
        sessions: Sessions = "run",  # episode: each episode has its own connection, so servers may keep its state
        connections: Annotated[
            int, Field(ge=1)
        ] = 1,  # shared by the episodes of a run; calls go to the one with the fewest in progress
        timeout: Seconds = 30.0,  # time limit of a call
        start_seconds: Seconds = 60.0,  # time for a server to start
        parallel: bool = False,  # calls of one response may overlap
    ) -> None:
        if connections > 1 and sessions == "episode":
            raise ConfigError(
                f"connections={connections} does not go with sessions: episode, where each episode has one"
            )
        self.server = Server(
            command=_words(command, url, env=env, cwd=cwd, headers=headers),
            url=url,
            env=dict(env or {}),
            cwd=None if cwd is None else Path(cwd),
            headers=dict(headers or {}),
            handshake=sessions == "episode" and url is not None,
            start_seconds=start_seconds,
        )
        self.timeout, self.parallel = timeout, parallel
        self._only, self._prefix = only, prefix
        self._per_episode, self._shared = sessions == "episode", connections
        self._connections: dict[str, Connection] = {}  # by episode, or by the number of a shared connection
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closing: set[asyncio.Task[None]] = set()
        self._failure: tuple[float, ServerError] | None = None  # the last failed attempt to connect, and when
        self._tools: list[BaseTool] | None = None

    @property
    def made_of(self) -> object:
        chosen = None if self._only is None else list(self._only)
        return repr((self.server, chosen, self._prefix, self._per_episode, self._shared, self.timeout, self.parallel))

    def tools(self) -> list[BaseTool]:
        """Return the server's tools. The first call starts or asks the server. Raises ConfigError if it cannot."""
        if self._tools is None:
            require_sdk()
            self._tools = [MCPTool(self, remote, self._prefix) for remote in self._select(self._list())]
        return self._tools

    def _list(self) -> list[RemoteTool]:
        """Ask the server in another thread, because an event loop may run in this one."""
        found: Future[list[RemoteTool]] = Future()

        async def ask() -> list[RemoteTool]:
            connection = Connection(self.server)
            await connection.open()
            try:
                async with asyncio.timeout(self.server.start_seconds):
                    return await connection.tools()
            finally:
                await connection.close()

        def work() -> None:
            try:
                found.set_result(asyncio.run(ask()))
            except Exception as error:  # noqa: BLE001 (raised below, in the caller's thread)
                found.set_exception(error)

        Thread(target=work, daemon=True).start()
        try:
            return found.result()
        except ServerError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            raise ConfigError(
                f"the MCP server {str(self.server)!r} could not list its tools: {describe(error)}"
            ) from error

    def _select(self, remote: Sequence[RemoteTool]) -> list[RemoteTool]:
        by_name = {tool.name: tool for tool in remote}
        for name in self._only or ():
            if name not in by_name:
                raise ConfigError(
                    f"only: the MCP server {str(self.server)!r} has no tool {name!r}.{did_you_mean(name, by_name)}"
                )
        chosen = list(by_name.values()) if self._only is None else [by_name[name] for name in self._only]
        if not chosen:
            raise ConfigError(f"the MCP server {str(self.server)!r} has no tools" + ("" if by_name else " at all"))
        return chosen

    async def open(self) -> None:
        """Connect, so that a server that has gone since it listed its tools stops the run at once."""
        if self._per_episode:
            return
        try:
            await asyncio.gather(*(self._connection(str(number)) for number in range(self._shared)))
        except ServerError as error:
            raise RolloutError(str(error)) from error

    async def close(self) -> None:
        """End all connections, including those of episodes."""
        for key in list(self._connections):
            self._retire(key)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)
        self._locks.clear()  # another run may have another event loop

    async def call(self, name: str, arguments: Mapping[str, Any], episode: str | None) -> ToolResult:
        """Call a tool of the server by the name it has there. Raises ToolError for whatever the model should read, and
        ServerError if the server died and cannot be restarted."""
        from mcp import MCPError

        connection = await self._connection(self._key(episode))
        try:
            result = await connection.call(name, arguments, seconds=self.timeout)
        except TimeoutError:
            raise ToolError(f"the tool did not answer within {self.timeout:g} s") from None
        except MCPError as error:
            logger.warning("a call of %s on %s failed: %s%s", name, self.server, error, connection.stderr())
            raise ToolError(f"the call failed: {error}. The tool may work again when it is called again") from error
        return as_result(result)

    def release(self, episode: str) -> None:
        """End the connection of an episode. Does not wait for the server to exit."""
        self._retire(episode)
        self._locks.pop(episode, None)  # only now: a call that reconnects holds it

    def _key(self, episode: str | None) -> str:
        if self._per_episode:
            return episode or ""
        in_progress = {key: connection.calls for key, connection in self._connections.items()}
        return min(map(str, range(self._shared)), key=lambda key: in_progress.get(key, 0))

    async def _connection(self, key: str) -> Connection:
        """Return a connection that works, a new one if necessary."""
        asked = time.monotonic()
        async with self._locks[key]:
            if self._failure is not None and self._failure[0] > asked:
                raise self._failure[1]  # several calls waited for one attempt
            known = self._connections.get(key)
            if known is not None and await known.is_alive():
                return known
            if known is not None:
                logger.warning("connecting to the MCP server %s again", self.server)
                self._retire(key)
            made = Connection(self.server)
            try:
                await made.open()
            except ServerError as error:
                self._failure = time.monotonic(), error
                raise
            self._connections[key] = made
            return made

    def _retire(self, key: str) -> None:
        connection = self._connections.pop(key, None)
        if connection is not None:
            closing = asyncio.create_task(connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class MCPTool(BaseTool):
    """One tool of a server."""

    def __init__(self, owner: MCPTools, remote: RemoteTool, prefix: str) -> None:
        self._owner, self._remote = owner, remote.name
        self._episode: str | None = None
        self.name = prefix + remote.name
        self.description = remote.description or remote.title or remote.name
        self.parameters = {"type": "object", "properties": {}, **remote.input_schema}
        self.parallel = owner.parallel
        # A backstop: the call has a time limit of its own, which leaves time to connect before.
        self.timeout = owner.timeout + owner.server.start_seconds + 2 * CHECK_SECONDS + CLOSE_SECONDS

    @cached_property
    def arguments(self) -> SchemaArguments:  # type: ignore[override]
        from agent_r1.tools.mcp.json_schema import SchemaArguments

        return SchemaArguments(self.name, self.parameters)

    def for_episode(self, episode: str) -> BaseTool:
        mine = copy(self)
        mine._episode = episode
        return mine

    async def end_episode(self) -> None:
        if self._episode is not None:
            self._owner.release(self._episode)

    async def open(self) -> None:
        await self._owner.open()

    async def close(self) -> None:
        await self._owner.close()

    async def execute(self, args: dict[str, Any]) -> ToolResult:  # type: ignore[override]
        return await self._owner.call(self._remote, args, self._episode)


def _words(command: str | Sequence[str] | None, url: str | None, **settings: Any) -> tuple[str, ...]:
    """Return the command as words. Raises ConfigError unless there is exactly one of command and url."""
    if (command is None) == (url is None):
        raise ConfigError(f"an MCP server needs either a command or a url, got command={command!r} and url={url!r}")
    for name in ("headers",) if url is None else ("env", "cwd"):
        if settings[name]:
            raise ConfigError(f"{name} has no effect on an MCP server with a {'command' if url is None else 'url'}")
    if url is not None and not url.startswith(("http://", "https://", "$")):
        raise ConfigError(f"the url of an MCP server must start with http:// or https://, got {url!r}")
    words = tuple(command.split() if isinstance(command, str) else command or ())
    if url is None and not words:
        raise ConfigError("the command of an MCP server is empty")
    return words
