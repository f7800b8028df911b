"""Convert the result of a call to an MCP server into a `ToolResult`."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from agent_r1.tools.base import ToolError, ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult

EMPTY = "(no output)"


def as_result(result: CallToolResult) -> ToolResult:
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
