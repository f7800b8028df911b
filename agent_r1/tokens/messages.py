"""What `rendering.py` asks of a single message: who wrote it, and whether it is what the policy has just said.

Pure functions of messages; nothing here knows templates or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1.errors import DataError
from agent_r1.tokens.control_tokens import SLOT
from agent_r1.types import Message

TOOL_ROLES = frozenset({"tool", "ipython", "function"})  # whoever speaks in these is outside our control
PARSED_KEYS = frozenset({"tool_calls", "reasoning_content", "reasoning", "thinking"})  # a reply taken apart by the env


def is_from_tool(message: Message) -> bool:
    """Text that a tool wrote, also where it comes as a user message for want of a tool role."""
    return message.get("role") in TOOL_ROLES or bool(message.get("from_tool"))


def told_apart(message: Message) -> tuple[Message, str]:
    """The message as far as its sender wrote it, and what a tool wrote below that: `from_tool` is then this text, which
    the content ends with (or its last part is). Where it does not, nothing is told apart, and all is the tool's."""
    text, content = message.get("from_tool"), message.get("content")
    if not isinstance(text, str) or not text or not content:
        return message, ""
    own = {key: value for key, value in message.items() if key != "from_tool"}
    if isinstance(content, str) and content.endswith(text):
        return {**own, "content": content[: -len(text)]}, text
    if isinstance(content, list) and content[-1] == {"type": "text", "text": text}:
        return {**own, "content": content[:-1]}, text
    return message, ""


def joined(message: Message, text: str, close: Callable[[Any], Any]) -> Message:
    """What was told apart as one again; `close` keeps what the sender wrote from running into the text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{close(content)}{text}"}
    return {**message, "content": [*content[:-1], *map(close, content[-1:]), {"type": "text", "text": text}]}


def text_of(content: Any) -> str | None:
    """The text of a content: a string, or a list of one text part."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def says(message: Message, text: str) -> bool:
    """Whether this is the assistant saying `text` and nothing else."""
    more = any(value for key, value in message.items() if key not in ("role", "content"))
    return message.get("role") == "assistant" and not more and text_of(message.get("content")) == text


def is_parsed_from(message: Message, text: str) -> bool:
    """Whether this can be the assistant's `text`, taken apart: every line of prose and every tool name is in there."""
    parsed = {key: value for key, value in message.items() if value and key in PARSED_KEYS}
    if message.get("role") != "assistant" or not parsed:
        return False
    names = [call.get("function", call).get("name") for call in parsed.pop("tool_calls", [])]
    prose = [text_of(value) for value in (*parsed.values(), message.get("content") or "")]
    if not all(isinstance(value, str) for value in (*names, *prose)):
        return False
    lines = [line.strip() for value in prose for line in str(value).splitlines()]
    return all(piece in text for piece in (*names, *lines))


def follows(messages: list[Message], before: list[Message], text: str) -> bool:
    """Whether `messages` are those before, then a reply that can be the assistant's `text`, then anything."""
    if len(messages) <= len(before) or messages[: len(before)] != before:
        return False
    reply = messages[len(before)]
    return says(reply, text) or is_parsed_from(reply, text)


def with_slot(safe: list[Message], index: int) -> list[Message]:
    """The messages with `SLOT` for the content of one of them, in the shape that content has."""
    shape = [{"type": "text", "text": SLOT}] if isinstance(safe[index].get("content"), list) else SLOT
    return [*safe[:index], {**safe[index], "content": shape}, *safe[index + 1 :]]


def schema_as_json(tool: Mapping[str, Any]) -> str:
    """As JSON, schemas are told apart as templates show them: 1 is not True, and the order of keys counts."""
    try:
        return json.dumps(tool)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a tool schema cannot be written as JSON: {error}. Use strings, numbers, lists and dicts: {tool!r:.300}"
        ) from error
