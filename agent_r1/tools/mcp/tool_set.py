"""`MCPTools`: offers the tools of a server as agent-r1 tools, and holds the connections that their calls share.

A server is asked for its tools once, before the run. A call that fails because the server died is text for the model;
the next call connects again, and only if that fails too does an episode fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, wraps
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from agent_r1.errors import ConfigError, RolloutError, did_you_mean, import_extra
from agent_r1.guard import describe
from agent_r1.tools.base import BaseTool, ToolError, ToolResult, ToolSet
from agent_r1.tools.mcp.connection import (
    CHECK_SECONDS,
    CLOSE_SECONDS,
    Connection,
    ServerError,
)
from agent_r1.tools.schema import Arguments

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as RemoteTool

logger = logging.getLogger(__name__)

EMPTY = "(no output)"
Seconds = Annotated[float, Field(gt=0)]
Made = TypeVar("Made")


def _refused_in_one_line(cls: type[Made]) -> type[Made]:
    """Refuse wrong settings in one line, without the values of `env` and `headers`, which may be secret."""
    init: Callable[..., None] = cls.__init__

    @wraps(init)
    def checked(self: Made, *args: Any, **settings: Any) -> None:
        try:
            init(self, *args, **settings)
        except ValidationError as error:
            problem = error.errors()[0]
            if not problem["loc"]:
                raise problem["ctx"]["error"] from None  # from `__post_init__`
            name, *inner = map(str, problem["loc"])
            said = f"of an MCP server: {problem['msg'][0].lower()}{problem['msg'][1:]}"
            if name not in ("env", "headers"):
                raise ConfigError(f"{name} {said}, got {problem['input']!r:.100}") from None
            hint = "; put the value in quotes" if problem["type"] == "string_type" else ""
            raise ConfigError(f"{'.'.join([name, *inner])} {said}{hint}") from None

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_refused_in_one_line
@dataclass(kw_only=True, eq=False, config=ConfigDict(strict=True, extra="forbid"))
class MCPTools(ToolSet):
    """The tools of an MCP server, to be listed among other tools.

    In `url`, `env` and `headers`, `$NAME` is replaced by an environment variable when the server is started, so that
    secrets appear neither in the config nor in messages.
    """

    command: str | Sequence[str] | None = None  # starts a server that talks over stdin and stdout
    url: str | None = None  # URL of a running server (streamable HTTP), instead of a command
    env: Mapping[str, str] | None = None  # environment of the command, beside PATH, HOME etc.
    cwd: str | Path | None = None  # working directory of the command; in YAML: relative to the recipe's folder
    headers: Mapping[str, str] | None = None  # headers of requests to the url
    only: Sequence[str] | None = None  # names of tools; None: all
    prefix: str = ""  # put before the name of each tool
    sessions: Literal["run", "episode"] = "run"  # episode: each has its own connection, so servers may keep its state
    connections: Annotated[int, Field(ge=1)] = 1  # shared by the episodes of a run; the least busy one takes a call
    timeout: Seconds = 30.0  # time limit of a call
    start_seconds: Seconds = 60.0  # time for a server to start
    parallel: bool = False  # calls of one response may overlap

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ConfigError(f"an MCP server needs either a command or a url, got {self.command!r} and {self.url!r}")
        for name in ("headers",) if self.url is None else ("env", "cwd"):
            if getattr(self, name):
                raise ConfigError(f"{name} has no effect on an MCP server with a {'url' if self.url else 'command'}")
        if self.url is not None and not self.url.startswith(("http://", "https://", "$")):
            raise ConfigError(f"the url of an MCP server must start with http:// or https://, got {self.url!r}")
        if self.url is None and not self.words:
            raise ConfigError("the command of an MCP server is empty")
        if self.connections > 1 and self.sessions == "episode":
            raise ConfigError("leave out connections with sessions: episode, where each episode has its own")
        self._connections: dict[str, Connection] = {}  # by episode, or by the number of a shared connection
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closing: set[asyncio.Task[None]] = set()
        self._failure: tuple[float, ServerError] | None = None  # the last failed attempt to connect, and when
        self._tools: list[BaseTool] | None = None

    @property
    def words(self) -> list[str]:
        """The command as a list of words."""
        return self.command.split() if isinstance(self.command, str) else list(self.command or ())

    @property
    def place(self) -> str:
        return self.url or " ".join(self.words)

    @property
    def made_of(self) -> object:
        return repr(self)

    def tools(self) -> list[BaseTool]:
        """Return the server's tools. The first call starts or asks the server. Raises ConfigError if it cannot."""
        if self._tools is None:
            import_extra("mcp.client.client", "a server of tools", "mcp")  # a module of version 2
            self._tools = [MCPTool(self, remote) for remote in self._select(self._list())]
        return self._tools

    def _list(self) -> list[RemoteTool]:
        """Ask the server in another thread, because an event loop may run in this one."""
        found: Future[list[RemoteTool]] = Future()

        async def ask() -> list[RemoteTool]:
            connection = Connection(self)
            await connection.open()
            try:
                async with asyncio.timeout(self.start_seconds):
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
            raise ConfigError(f"the MCP server {self.place!r} could not list its tools: {describe(error)}") from error

    def _select(self, remote: Sequence[RemoteTool]) -> list[RemoteTool]:
        by_name = {tool.name: tool for tool in remote}
        for name in self.only or ():
            if name not in by_name:
                raise ConfigError(
                    f"only: the MCP server {self.place!r} has no tool {name!r}.{did_you_mean(name, by_name)}"
                )
        chosen = list(by_name.values()) if self.only is None else [by_name[name] for name in self.only]
        if not chosen:
            raise ConfigError(f"the MCP server {self.place!r} has no tools" + ("" if by_name else " at all"))
        return chosen

    async def open(self) -> None:
        """Connect, so that a server that has gone since it listed its tools stops the run at once."""
        if self.sessions == "episode":
            return
        try:
            await asyncio.gather(*(self._connection(str(number)) for number in range(self.connections)))
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
            logger.warning("a call of %s on %s failed: %s%s", name, self.place, error, connection.stderr())
            raise ToolError(f"the call failed: {error}. The tool may work again when it is called again") from error
        return _as_result(result)

    def release(self, episode: str) -> None:
        """End the connection of an episode. Does not wait for the server to exit."""
        self._retire(episode)
        self._locks.pop(episode, None)  # only now: a call that reconnects holds it

    def _key(self, episode: str | None) -> str:
        if self.sessions == "episode":
            return episode or ""
        in_progress = {key: connection.calls for key, connection in self._connections.items()}
        return min(map(str, range(self.connections)), key=lambda key: in_progress.get(key, 0))

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
                logger.warning("connecting to the MCP server %s again", self.place)
                self._retire(key)
            made = Connection(self)
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

    def __init__(self, owner: MCPTools, remote: RemoteTool) -> None:
        self._owner, self._remote = owner, remote.name
        self._episode: str | None = None
        self.name = owner.prefix + remote.name
        self.description = remote.description or remote.title or remote.name
        self.parameters = {"type": "object", "properties": {}, **remote.input_schema}
        self.parallel = owner.parallel
        # A backstop: the call has a time limit of its own, which leaves time to connect before.
        self.timeout = owner.timeout + owner.start_seconds + 2 * CHECK_SECONDS + CLOSE_SECONDS

    @cached_property
    def arguments(self) -> Arguments:
        from agent_r1.tools.mcp.json_schema import arguments_from_server

        return arguments_from_server(self.name, self.parameters)

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


def _as_result(result: CallToolResult) -> ToolResult:
    """Return text for the model, pictures, and structured content as info. Raises ToolError for an error result."""
    texts, images = [], []
    for block in result.content:
        text, image = _read_block(block)
        if text:
            texts.append(text)
        if image is not None:
            images.append(image)
    structured = result.structured_content
    if not texts and not images and structured is not None:
        texts = [json.dumps(structured, ensure_ascii=False)]
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "the tool failed without a message")
    info = {} if structured is None else {"structured": structured}
    return ToolResult(text or ("" if images else EMPTY), info=info, images=images)


def _read_block(block: Any) -> tuple[str, bytes | None]:
    """Return the text and the picture of a part of a result."""
    if block.type == "text":
        return block.text, None
    if block.type == "image":
        return "", _decoded(block.data)
    if block.type == "audio":
        return f"[audio, {block.mime_type}, is not shown]", None
    if block.type == "resource_link":
        return " ".join(filter(None, [block.name, str(block.uri), block.description])), None
    resource = block.resource  # embedded
    if hasattr(resource, "text"):
        return resource.text, None
    if (resource.mime_type or "").startswith("image/"):
        return "", _decoded(resource.blob)
    return f"[{resource.uri}, {resource.mime_type or 'binary'}, is not shown]", None


def _decoded(data: str) -> bytes:
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise ToolError(f"the tool returned a picture that cannot be decoded: {error}") from error
