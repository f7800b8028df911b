"""A model's response, read for a client: text, thinking and calls, by the model's own tool-call format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.tokens.formats.base import ParsedCall, ToolCallFormat
from agent_r1.wire.chat_answer import CallOut, new_id

_THINKING = re.compile(r"<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response in parts."""

    text: str  # the text for the user
    calls: tuple[CallOut, ...] = ()
    reasoning: str = ""
    num_unreadable: int = 0  # calls that cannot be read; their text is in `text`


def read_reply(
    text: str, tool_format: ToolCallFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True
) -> Reply:
    """Split a response. Without tools, nothing is read as a call.

    Calls to tools that were not offered are returned too, for the client to answer. A call that cannot be read stays
    in the text as the model wrote it, so that the client sees what happened.
    """
    reasoning, spoken = split_thinking(text, opened=tool_format.prompt_thinks is True)
    if not tools:
        return Reply(text=spoken, reasoning=reasoning)
    content, events = tool_format.parse(text)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    parsed = [event for event in events if isinstance(event, ParsedCall)]
    broken = [text[event.span[0] : event.span[1]] for event in events if not isinstance(event, ParsedCall)]
    calls = tuple(
        CallOut(
            call_id=event.call_id or new_id("call"),
            name=event.name,
            arguments=json.dumps(
                tool_format.convert_arguments(event.arguments, schemas.get(event.name, {})), ensure_ascii=False
            ),
        )
        for event in (parsed if parallel else parsed[:1])
    )
    shown = "\n".join(filter(None, [content, *broken]))
    return Reply(text=shown, calls=calls, reasoning=reasoning, num_unreadable=len(broken))


def split_thinking(text: str, *, opened: bool) -> tuple[str, str]:
    """The thinking and the rest. `opened`: the prompt ends with <think>, so the response begins inside it."""
    if "<think>" not in text and "</think>" not in text and not opened:
        return "", text
    whole = f"<think>{text}" if opened and not text.lstrip().startswith("<think>") else text
    thoughts = [thought.strip() for thought in _THINKING.findall(whole)]
    spoken = _THINKING.sub("", whole)
    return "\n".join(filter(None, thoughts)), spoken.lstrip() if whole.lstrip().startswith("<think>") else spoken
