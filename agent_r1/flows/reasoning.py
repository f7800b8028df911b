"""Strip the thinking of earlier replies from what the model is shown (`context.reasoning=strip`).

The thinking was sampled and is trained with its own step; later prompts are rendered without it. The first observation,
which may hold examples, stays as it is.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from itertools import chain

from agent_r1.flows.context import ContextPolicy, ContextView, Writer
from agent_r1.tokens.formats.base import Span, ToolCallFormat, remove_spans
from agent_r1.tokens.rendering import EDITED, PARSED_KEYS
from agent_r1.types import Message

KEYS = PARSED_KEYS - {"tool_calls"}  # keys that hold thinking
_BLOCK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class StripReasoning(ContextPolicy):
    """Strips replies, then lets another policy choose what to show of the conversation; None shows all of it."""

    def __init__(self, policy: ContextPolicy | None, *, tool_format: ToolCallFormat) -> None:
        self._policy = policy
        self._format = tool_format

    def __copy__(self) -> StripReasoning:
        """Copy the other policy too: it may hold a summary of the conversation so far."""
        other = object.__new__(type(self))
        vars(other).update({**vars(self), "_policy": copy(self._policy)})
        return other

    def begin(self, messages: list[Message]) -> None:
        super().begin(messages)
        if self._policy is not None:
            self._policy.begin(messages)

    async def prepare(self, messages: list[Message], writer: Writer) -> None:
        if self._policy is not None:
            await self._policy.prepare(self._stripped(messages), writer)

    async def show(self, messages: list[Message]) -> ContextView:
        stripped = self._stripped(messages)
        everything = ContextView(messages=stripped, hidden=0)
        view = everything if self._policy is None else await self._policy.show(stripped)
        changed = {id(now) for before, now in zip(messages, stripped, strict=True) if now is not before}
        return replace(view, hidden=view.hidden + sum(id(message) in changed for message in view.messages))

    def _stripped(self, messages: list[Message]) -> list[Message]:
        opening = messages[: self._opening_size]
        return [*opening, *(self._strip(message) for message in messages[self._opening_size :])]

    def _strip(self, message: Message) -> Message:
        if message.get("role") != "assistant":
            return message
        shown = {key: value for key, value in message.items() if key not in KEYS}
        if isinstance(content := message.get("content"), str):
            # A content that the env has parsed does not begin inside thinking, even if the prompt opened it.
            parsed = "</think>" not in content and any(message.get(key) for key in PARSED_KEYS)
            shown["content"] = strip_thinking(
                content, self._format.for_prompt(thinks=False) if parsed else self._format
            )
        if message.get("tool_calls"):
            # The env may have parsed the thinking away already, but the ids of the reply still hold it.
            shown[EDITED] = True
        return message if shown == message else shown


def strip_thinking(text: str, tool_format: ToolCallFormat) -> str:
    """Return a reply without its thinking, even if the prompt opened it or nothing closed it.

    The calls that the env answers do not change, wherever they are: some formats have calls in the middle of thinking,
    and all run those in thinking that the prompt opened and nothing closed.
    """
    opened = tool_format.prompt_thinks is True and not text.lstrip().startswith("<think>")
    if not opened and "<think>" not in text:
        return text
    calls = [event.span for event in tool_format.parse(text)[1] if getattr(event, "malformed", True)]
    plain = text  # text within a call that looks like a tag does not count
    for begin, end in calls:
        plain = f"{plain[:begin]}{' ' * (end - begin)}{plain[end:]}"
    thoughts: list[Span] = []
    start = 0
    if opened:
        end = plain.find("</think>")
        start = len(text) if end < 0 else end + len("</think>")
        thoughts.append((0, start))
    thoughts += [found.span() for found in _BLOCK.finditer(plain, start)]
    return remove_spans(text, _outside(calls, thoughts, plain)) if thoughts else text


def _outside(calls: list[Span], thoughts: list[Span], plain: str) -> list[Span]:
    """Return the parts of the thoughts that lie outside of the calls; blanks between two calls stay."""
    parts: list[Span] = []
    for begin, end in thoughts:
        inside = [call for call in calls if begin <= call[0] and call[1] <= end]
        bounds = [begin, *chain.from_iterable(inside), end]
        parts += [part for part in zip(bounds[::2], bounds[1::2], strict=True) if plain[slice(*part)].strip()]
    return parts
