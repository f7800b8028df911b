"""harmony, the format of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_r1.tokens.formats.base import Event, Parsed, ParsedCall, ToolCallFormat, dump_json, read_json, skip_space
from agent_r1.types import Message


class HarmonyFormat(ToolCallFormat):
    """gpt-oss: messages with a channel and a recipient. The stop token `<|call|>` may be missing from the text.

    A message to a function is a call. A message on the channel `analysis` without a recipient is thinking. All others
    are for the user. The chat template keeps one call per message and models stop after it, so a second is refused.
    """

    _end = re.compile(r"<\|(?:end|call|return|start|channel)\|>|\Z")
    _control = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
    _header = re.compile(r"<\|start\|>|<\|channel\|>|\bto=functions\.")
    _recipient = re.compile(r"\bto=([^\s<]+)")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"

    def _parse(self, text: str) -> Parsed:
        _, said, events = self._read(text)
        return said, events

    def assistant_message(self, text: str) -> Message:
        thought, said, events = self._read(text)
        message: Message = {"role": "assistant", "content": said}
        if events:  # with a call, the template accepts either thinking or content
            call, message["content"] = events[0], ""
            thought = "\n".join(filter(None, [thought, said]))
            function = {"name": call.name or "unknown", "arguments": self.message_arguments(call)}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return {**message, "thinking": thought} if thought else message

    def _read(self, text: str) -> tuple[str, str, list[Event]]:
        """Split a response into thinking, content and calls."""
        thoughts: list[str] = []
        said: list[str] = []
        events: list[Event] = []
        at = 0
        while len(events) <= self.max_calls and (body := text.find("<|message|>", at)) >= 0:
            start = max(text.rfind("<|start|>", at, body), at)
            self._read_between(text, at, start, said, events)
            header = text[start:body]
            body += len("<|message|>")
            recipient, channel = self._recipient.search(header), self._channel.search(header)
            if recipient:
                events.append(self._read_call(text, start, body, recipient[1], is_first=not events))
                at = events[-1].span[1]
            else:
                end = self._find_end(text, body)
                (thoughts if channel and channel[1] == "analysis" else said).append(text[body : end.start()])
                at = end.end() if end[0] in ("<|end|>", "<|call|>", "<|return|>") else end.start()
        self._read_between(text, at, len(text), said, events)
        return self._join(thoughts), self._join(said), events

    def _read_between(self, text: str, start: int, end: int, said: list[str], events: list[Event]) -> None:
        """Read text between messages: an answer, or a call without its `<|message|>`."""
        header = self._header.search(text, start, end)
        said.append(text[start : header.start() if header else end])
        if header and (recipient := self._recipient.search(text, header.start(), end)):
            name = recipient[1].removeprefix("functions.")
            events.append(self.failure("the call stops before its <|message|>", (header.start(), end), name=name))

    def _find_end(self, text: str, start: int) -> re.Match[str]:
        end = self._end.search(text, start)
        assert end is not None  # it matches the end of the text
        return end

    def _join(self, parts: list[str]) -> str:
        # Broken messages leave control tokens behind, and the chat template refuses contents that contain them.
        return "\n".join(filter(None, (self._control.sub(" ", part).strip() for part in parts)))

    def _read_call(self, text: str, start: int, body: int, recipient: str, *, is_first: bool) -> Event:
        name = recipient.removeprefix("functions.")
        value, end, problem = read_json(text, body)
        close = self._end.match(text, skip_space(text, end))
        if problem or close is None:
            problem = problem or f"unexpected {text[end : end + 20]!r} after the arguments"
            close = self._find_end(text, body)
        stop = close.start() if close[0] in ("<|start|>", "<|channel|>") else close.end()
        if not problem and not isinstance(value, dict):
            problem = f"the arguments must be a JSON object, got {type(value).__name__}"
        if not is_first:
            problem = "only the first call of a message is run; make one call, then wait for its result"
        if problem:
            source = text[body : close.start()].strip()
            problem = f"the call of {name} cannot be read: {problem}"
            return replace(self.failure(problem, (start, stop), name=name, source=source), malformed=is_first)
        return ParsedCall(name=name, arguments=value, span=(start, stop))

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        return f"{header}<|message|>{dump_json(dict(arguments))}<|call|>"
