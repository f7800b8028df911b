"""Infer the tool-call format of a chat template by rendering a call and parsing it.

Rendering is more reliable than inspecting the template's source: it works for any template, also with several branches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from os.path import commonprefix
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.base import ParsedCall, ToolCallFormat
from agent_r1.tokens.formats.table import AUTO, FALLBACK, FORMATS, format_name, get_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message

Show = Callable[[list[Message], bool], str]  # renders messages, with or without the probe's tool; "" if refused

NAME, ARGUMENTS = "probe_tool", {"text": "probe value"}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL = {"type": "function", "function": {"name": NAME, "description": "Probe.", "parameters": PARAMETERS}}
# Mistral's templates require nine letters and digits, Kimi's an id that contains the name.
CALL_IDS = ("probecall", f"functions.{NAME}:0")

_ASK = {"role": "user", "content": "Ping?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFormat:
    """How a chat template writes calls."""

    name: str | None  # name of a known format
    written: str  # a call as the template writes it; "" if it shows none
    thinks: bool  # prompts end with an open <think>

    def choose(self, asked: str | ToolCallFormat) -> ToolCallFormat:
        """Return the template's format for `AUTO`, else `asked`. ConfigError if `asked` contradicts the template."""
        if asked == AUTO and self.name is None and self.written:
            raise ConfigError(
                f"no known tool-call format can read the chat template's calls: {self.written[:120]!r}. Register a "
                "format for it with register_format, or set task.env_kwargs.tool_format"
            )
        chosen = FORMATS[self.name or FALLBACK] if asked == AUTO else get_format(asked)
        may_differ = asked != AUTO and self.name is not None and self.written and chosen.fixed_tool is None
        if may_differ and not _reads(chosen, self.written):
            raise ConfigError(
                f"tool_format={format_name(chosen)!r} contradicts the chat template, which writes calls as "
                f"{self.name!r}: {self.written[:120]!r}. Remove tool_format, or set a matching template in "
                "model.chat_template"
            )
        return chosen.for_prompt(thinks=self.thinks)

    def __str__(self) -> str:
        if self.name is None and self.written:
            return "unknown: no format can read the calls of the chat template"
        if self.name is None:
            return f"{FALLBACK}, because the chat template does not write calls"
        return f"{self.name}, as in the chat template"


def requested_format(env_kwargs: Mapping[str, Any]) -> str | ToolCallFormat:
    """The format that the settings of an env ask for."""
    requested: str | ToolCallFormat = env_kwargs.get("tool_format", AUTO)
    return requested


def template_format(renderer: Renderer) -> TemplateFormat:
    """Infer how the template of `renderer` writes calls."""

    def show(messages: list[Message], with_tools: bool) -> str:
        return renderer.decode(renderer.try_render(messages, [TOOL] if with_tools else ()))

    return infer_format(show)


def infer_format(show: Show) -> TemplateFormat:
    """Like `template_format`, for any function that renders messages."""
    prompt = show([_ASK], True)
    thinks = prompt.rstrip().endswith("<think>")
    written = ""
    for reply in _render_calls(show):
        written = reply
        for name, each in FORMATS.items():
            if each.fixed_tool is None and _reads(each, reply):
                return TemplateFormat(name=name, written=reply, thinks=thinks)
    # Some templates list tools and explain how to call them, but leave calls out of the conversation.
    explains = not written and prompt != show([_ASK], False)
    return TemplateFormat(name=_explained_format(prompt) if explains else None, written=written, thinks=thinks)


def _render_calls(show: Show) -> Iterator[str]:
    """Render a call and its result. Templates differ in the structure of calls that they accept."""
    plain = show([_ASK, {"role": "assistant", "content": "%%"}, _ASK], True)
    before = plain.partition("%%")[0] if "%%" in plain else ""
    for call_id, arguments, content in product(CALL_IDS, (ARGUMENTS, json.dumps(ARGUMENTS)), ("", None)):
        function = {"name": NAME, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        calling = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "name": NAME, "tool_call_id": call_id, "content": "pong"}
        text = show([_ASK, calling, result], True)
        reply = text[len(commonprefix([before, text])) :]  # noqa: RUF071 (of characters, not of paths)
        if ARGUMENTS["text"] in reply:
            yield reply


def _reads(each: ToolCallFormat, reply: str) -> bool:
    calls = [event for event in each.for_prompt(thinks=False).parse(reply)[1] if isinstance(event, ParsedCall)]
    return any(call.name == NAME and each.convert_arguments(call.arguments, PARAMETERS) == ARGUMENTS for call in calls)


def _explained_format(prompt: str) -> str | None:
    """The format whose marks occur in a prompt, preferably one with a complete example call."""
    events = {name: each.parse(prompt)[1] for name, each in FORMATS.items() if each.has_marks}
    whole = (name for name, found in events.items() if any(isinstance(event, ParsedCall) for event in found))
    return next(whole, None) or next((name for name, found in events.items() if found), None)
