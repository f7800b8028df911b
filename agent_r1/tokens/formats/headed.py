"""Calls with a mark and the tool's name before the arguments as JSON: DeepSeek, Kimi K2 and Mistral."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.tokens.formats.base import (
    Event,
    ParsedCall,
    ParseFailure,
    ScannedFormat,
    dump_json,
    read_json,
    skip_space,
)


@dataclass(kw_only=True)
class HeadedFormat(ScannedFormat):
    """One call: `opens`, `head` with the groups `name` and perhaps `id`, a JSON object, `tail`.

    `starts`, `opens`, `head` and `tail` are regular expressions. `form` is the template for writing calls, with NAME
    for the name and {...} for the arguments.
    """

    form: str
    starts: str  # every mark that belongs to a call and not to an answer
    opens: str
    head: str
    tail: str = ""
    as_tool_calls: bool = False  # set it if the marks are special tokens: the chat template then writes them
    arguments_as_text: bool = False
    joiner = "\n"

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        opened = re.compile(self.opens).match(text, start.start())
        if opened is None:
            return [self._failure(text, start, f"{start[0].strip()} is outside a call")]
        head = re.compile(self.head).match(text, opened.end())
        if head is None:
            return [self._failure(text, opened, f"no tool name at {text[opened.end() : opened.end() + 20]!r}")]
        name, call_id = head["name"], head.groupdict().get("id") or ""
        value, end, problem = read_json(text, head.end())
        tail = re.compile(self.tail).match(text, end)
        if not problem and not isinstance(value, dict):
            problem = f"the arguments must be a JSON object, got {type(value).__name__}"
        if not problem and tail is not None:
            return [ParsedCall(name=name, arguments=value, span=(start.start(), tail.end()), call_id=call_id)]
        if not problem:
            found = text[end : end + 20]
            problem = f"unexpected {found!r} after the arguments" if found.strip() else "the call is not closed"
        return [self._failure(text, opened, problem, name=name, body=head.end())]

    def _failure(
        self, text: str, start: re.Match[str], problem: str, *, name: str = "", body: int | None = None
    ) -> ParseFailure:
        """A failure up to the next mark that opens a call; other marks before it belong to this call."""
        opens, at = re.compile(self.opens), start.end()
        while (following := self._tags.search(text, at)) and not opens.match(text, following.start()):
            if following[0] in ("<think>", "</think>"):
                break
            at = following.end()
        end = following.start() if following else len(text)
        source = "" if body is None else text[body:end].strip()
        problem = f"the call{name and f' of {name}'} cannot be read: {problem}"
        return self.failure(problem, (start.start(), end), name=name, source=source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = self.form.replace("NAME", name, 1).replace("{...}", dump_json(dict(arguments)), 1)
        return self.check_written(written, name, arguments)


class CallListFormat(HeadedFormat):
    """One mark, then a JSON list of calls."""

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        opened = re.compile(self.opens).match(text, start.start())
        if opened is None:
            return super().read_calls(text, start)
        at = skip_space(text, opened.end())
        if not text.startswith("[", at):
            return [self._failure(text, start, f"expected a JSON list of calls at {text[at : at + 20]!r}")]
        events: list[Event] = []
        begin, closed = start.start(), False
        while not closed:
            value, end, problem = read_json(text, at + 1)
            at = skip_space(text, end)
            closed = text.startswith("]", at)
            if not problem and not closed and not text.startswith(",", at):
                problem = f"expected , or ] at {text[at : at + 20]!r}"
            if problem:
                failure = self._failure(text, start, problem)
                return [*events, ParseFailure(message=failure.message, span=(begin, failure.span[1]))]
            events.append(self.read_object(value, "arguments", (begin, at + 1 if closed else end)))
            begin = events[-1].span[1]
        return events
