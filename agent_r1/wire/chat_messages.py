"""The conversation and the tools of a request, as our messages and tool schemas.

Messages are built anew from the fields that the API knows. So nothing in them can name a file, mark itself as the
result of a tool, or reach a chat template under a key that has a meaning there. Pictures must come as data URLs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.data.files import is_nested_deeper
from agent_r1.errors import DataError
from agent_r1.text import sanitize
from agent_r1.types import Message
from agent_r1.vision.pictures import MAX_PER_MESSAGE, Picture, image_part
from agent_r1.wire.api_error import invalid, unsupported
from agent_r1.wire.request_body import MAX_NESTING, Fields

MAX_MESSAGES = 10_000
MAX_TOOLS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def read_messages(values: Sequence[Any]) -> list[Message]:
    """The conversation. Arguments of calls are decoded, and results get the name of the tool that was called."""
    if not values:
        raise invalid("messages must hold at least one message", "messages", code="missing_required_parameter")
    if len(values) > MAX_MESSAGES:
        raise invalid(f"messages holds {len(values)} messages; the limit is {MAX_MESSAGES}", "messages")
    messages: list[Message] = []
    called: dict[str, str] = {}  # tool names by call id
    for index, value in enumerate(values):
        message = _read_message(Fields(value, f"messages[{index}]"), called)
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        messages.append(message)
    return messages


def _read_message(fields: Fields, called: Mapping[str, str]) -> Message:
    role = fields.text("role", required=True, choices=ROLES)
    message: Message = {"role": "system" if role == "developer" else role, "content": ""}
    name = fields.text("name")
    message["content"] = _read_content(fields, pictures=role in ("user", "tool"))
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            if thoughts := fields.text(key):
                message["reasoning_content"] = sanitize(thoughts)
        _skip_empty(fields, "refusal", "annotations", "audio", "function_call")
        if calls := fields.list("tool_calls"):
            where = fields.name("tool_calls")
            message["tool_calls"] = [_read_call(Fields(call, f"{where}[{i}]")) for i, call in enumerate(calls)]
            message["content"] = message["content"] or None
    elif role == "tool":
        call_id = fields.text("tool_call_id", required=True) or ""
        message |= {"name": sanitize(name or called.get(call_id, "unknown")), "tool_call_id": sanitize(call_id)}
        name = None
    if name is not None:
        message["name"] = sanitize(name)
    fields.finish()
    return message


def _skip_empty(fields: Fields, *keys: str) -> None:
    for key in keys:
        if fields.take(key):
            raise unsupported(fields.name(key), f"{fields.name(key)} is not supported")


def _read_content(fields: Fields, *, pictures: bool) -> Any:
    """A text, or a list of parts if any of them is a picture."""
    content, name = fields.take("content"), fields.name("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return sanitize(content)
    if not isinstance(content, list):
        raise invalid(f"{name} must be a string or a list of parts", name, code="invalid_type")
    parts = [_read_part(Fields(part, f"{name}[{i}]"), pictures=pictures) for i, part in enumerate(content)]
    shown = sum(part["type"] == "image" for part in parts)
    if shown > MAX_PER_MESSAGE:
        raise invalid(f"{name} shows {shown} pictures; the limit is {MAX_PER_MESSAGE}", name)
    return parts if shown else "\n".join(part["text"] for part in parts)


def _read_part(fields: Fields, *, pictures: bool) -> dict[str, Any]:
    kind = fields.text("type", required=True)
    _ = fields.take("cache_control")  # a hint of other APIs that routers pass on
    if kind == "text":
        part: dict[str, Any] = {"type": "text", "text": sanitize(fields.text("text", required=True) or "")}
    elif kind == "image_url" and pictures:
        part = {"type": "image", "image": _read_picture(fields)}
    else:
        raise unsupported(fields.name("type"), f"{fields.name('type')}: a part {kind!r:.80} is not supported here")
    fields.finish()
    return part


def _read_picture(fields: Fields) -> Picture:
    given = fields.take("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    name = fields.name("image_url")
    if not isinstance(url, str) or not _DATA_URL.match(url):  # a path or file: URL would read the server's files
        raise invalid(f"{name} must be a data URL (data:image/png;base64,...); nothing is fetched", name)
    try:
        read = image_part({"type": "image_url", "image_url": {"url": url}}, what=name)
    except DataError as error:
        raise invalid(str(error)[:300], name) from None
    assert read is not None  # it has the form of an image_url
    picture: Picture = read["image"]
    return picture


def _read_call(fields: Fields) -> dict[str, Any]:
    """A call in the history. Arguments that are not a JSON object stay text."""
    call_id = fields.text("id", required=True) or ""
    fields.text("type", choices=("function",))
    _ = fields.take("index")  # present if the client assembled the call from a stream
    function = fields.object("function")
    if function is None:
        raise fields.missing("function")
    name = function.text("name", required=True) or ""
    text = function.take("arguments")
    if text is not None and not isinstance(text, str | dict):
        raise function.wrong("arguments", "a JSON text", text)
    function.finish()
    fields.finish()
    arguments = text if isinstance(text, dict) else decode_arguments(text or "{}")
    return {
        "id": sanitize(call_id),
        "type": "function",
        "function": {"name": sanitize(name), "arguments": arguments},
    }


def decode_arguments(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return sanitize(text)
    if not isinstance(value, dict) or is_nested_deeper(value, MAX_NESTING, text=text):
        return sanitize(text)
    return value


def read_tools(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools as OpenAI function schemas, with the keys that chat templates know."""
    if len(values) > MAX_TOOLS:
        raise invalid(f"tools holds {len(values)} tools; the limit is {MAX_TOOLS}", "tools")
    tools = [_read_tool(Fields(value, f"tools[{index}]")) for index, value in enumerate(values)]
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"tools holds two tools named {name!r}", "tools")
    return tools


def _read_tool(fields: Fields) -> dict[str, Any]:
    if (kind := fields.text("type", required=True)) != "function":
        name = fields.name("type")
        raise unsupported(name, f"{name}: only tools of type 'function' are supported, got {kind!r:.80}")
    function = fields.object("function")
    if function is None:
        raise fields.missing("function")
    name = function.text("name", required=True) or ""
    if not TOOL_NAME.fullmatch(name):
        raise function.refuse("name", f"must be letters, digits, _ . : or -, got {name[:80]!r}")
    description = function.text("description") or ""
    parameters = function.take("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise function.refuse("parameters", "must be a JSON schema of type 'object'")
    if not isinstance(parameters.get("properties", {}), dict):
        raise function.refuse("parameters", "must have an object as its properties")
    _ = function.take("strict")  # ignored: the model's output is not constrained
    function.finish()
    _ = fields.take("cache_control")
    fields.finish()
    shown = {"name": name, "description": description, "parameters": {"type": "object", "properties": {}} | parameters}
    return {"type": "function", "function": shown}
