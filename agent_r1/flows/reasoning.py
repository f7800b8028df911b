"""Strip the thinking of earlier replies from what the model is shown (`context.reasoning=strip`).

The thinking was sampled and is trained with its own step; later prompts are rendered without it. The first observation,
which may hold examples, stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agent_r1.flows.context import ContextPolicy, ContextView, Writer
from agent_r1.tokens.formats.base import Span, ToolCallFormat, remove_spans
from agent_r1.tokens.rendering import EDITED
from agent_r1.types import Message

KEYS = frozenset({"reasoning_content", "reasoning", "thinking"})  # of replies that the env has parsed
_BLOCK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class StripReasoning(ContextPolicy):
    """Strips replies, then lets another policy choose what to show of the conversation; None shows all of it."""

    def __init__(self, policy: ContextPolicy | None, *, tool_format: ToolCallFormat) -> None:
        self._policy = policy
        self._format = tool_format

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
            shown["content"] = strip_thinking(content, self._format)
        if message.get("tool_calls"):
            # The env may have parsed the thinking away already, but the ids of the reply still hold it.
            shown[EDITED] = True
        return message if shown == message else shown


def strip_thinking(text: str, tool_format: ToolCallFormat) -> str:
    """Return a reply without its thinking, even if the prompt opened it or nothing closed it. Calls do not change."""
    removed: list[Span] = []
    start = 0
    if tool_format.prompt_thinks is True and not text.lstrip().startswith("<think>"):
        end = text.find("</think>")
        start = len(text) if end < 0 else end + len("</think>")
        removed.append((0, start))
    removed += [(start + begin, start + end) for begin, end in _thoughts(text[start:], tool_format)]
    return remove_spans(text, removed) if removed else text


def _thoughts(text: str, tool_format: ToolCallFormat) -> list[Span]:
    """Find the thinking in a text that does not begin inside it. Text within a call that looks like a tag does not
    count."""
    if "<think>" not in text:
        return []
    for event in tool_format.for_prompt(thinks=False).parse(text)[1]:
        begin, end = event.span
        if getattr(event, "malformed", True):  # else a call inside thinking
            text = f"{text[:begin]}{' ' * (end - begin)}{text[end:]}"
    return [found.span() for found in _BLOCK.finditer(text)]
