"""A real MCP server, written with the official SDK. `python mcp_server.py` talks over stdio, with a port over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents
from pydantic import BaseModel, Field

server = MCPServer("shelf", log_level="CRITICAL")
books: dict[int, list[str]] = {}  # by session; over stdio all calls have the same one

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4xcUFAAMQAQ/XkOTlAAAAAElFTkSuQmCC"  # a PNG
SHOWN = ImageContent(type="image", data=PIXEL, mime_type="image/png")


class Place(BaseModel):
    shelf: Annotated[int, Field(ge=1, le=9)]
    label: str | None = None


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def put(title: str, ctx: Context[Any, Any], place: Place | Literal["floor"] = "floor") -> str:
    """Put a book somewhere and return all books."""
    kept = books.setdefault(id(ctx.session) if "http" in sys.argv else 0, [])
    kept.append(title)
    return ", ".join(kept)


@server.tool()
def picture() -> CallToolResult:
    """Return a picture of the shelf."""
    return CallToolResult(content=[TextContent(type="text", text="here it is"), SHOWN])


@server.tool()
def refuse() -> CallToolResult:
    """Return an error."""
    return CallToolResult(content=[TextContent(type="text", text="the shelf is full")], is_error=True)


@server.tool()
def mixed() -> CallToolResult:
    """Return parts of several kinds."""
    resource = TextResourceContents(uri="file:///notes.txt", text="a note")
    return CallToolResult(
        content=[
            TextContent(type="text", text="two parts"),
            EmbeddedResource(type="resource", resource=resource),
            SHOWN,
        ],
        structured_content={"count": 2},
    )


@server.tool()
async def wait(seconds: float) -> str:
    """Answer after a while."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def hang() -> str:
    """Block the whole server, as one without threads does."""
    time.sleep(60)
    return "never"


@server.tool()
def crash() -> str:
    """End the server's process."""
    sys.stderr.write("the shelf fell over\n")
    os._exit(3)


@server.tool()
def inc(a: int) -> int:
    """Add one. Every third call ends the server's process."""
    count = Path("count.txt")  # in the folder of the recipe
    calls = int(count.read_text(encoding="utf-8")) + 1 if count.exists() else 1
    count.write_text(str(calls), encoding="utf-8")
    return a + 1 if calls % 3 else os._exit(3)


@server.tool()
async def pid() -> int:
    """Return the id of the server's process, after a while."""
    await asyncio.sleep(0.2)
    return os.getpid()


@server.tool()
def secret() -> str:
    """Return the value of a variable of the server."""
    return os.environ.get("SHELF_KEY", "none")


if __name__ == "__main__":
    if "fail" in sys.argv:
        sys.stderr.write("no shelf at /mnt/shelf\n")
        raise SystemExit(2)
    if "http" in sys.argv:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
    else:
        server.run()
