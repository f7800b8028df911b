"""Calls with a head that names the tool, then the arguments as JSON: DeepSeek, Kimi K2 and Mistral.

Their marks are special tokens, which a message cannot carry as text. So responses enter the conversation as
`tool_calls`, and the model's chat template writes the marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from agent_r1.tokens.call_format import (
    Event,
    ParsedCall,
    ParseFailure,
    ScannedFormat,
    call_of,
    dump_json,
    read_json,
    skip_space,
    sure,
)


class HeadedFormat(ScannedFormat):
    """One call: `opens`, `head` with the groups `name` and perhaps `id`, a JSON object, `tail`.

    `form` is the template for writing calls, with NAME for the name and {...} for the arguments.
    """

    opens: ClassVar[re.Pattern[str]]
    head: ClassVar[re.Pattern[str]]
    tail: ClassVar[re.Pattern[str]]
    joiner = "\n"

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        opened = self.opens.match(text, start.start())
        if opened is None:
            return [self._failure(text, start, f"{start[0].strip()} stands outside a call")]
        head = self.head.match(text, opened.end())
        if head is None:
            return [self._failure(text, opened, f"no tool name at {text[opened.end() : opened.end() + 20]!r}")]
        name, call_id = head["name"], head.groupdict().get("id") or ""
        value, end, problem = read_json(text, head.end())
        tail = self.tail.match(text, end)
        if not problem and tail is None:
            found = text[end : end + 20]
            problem = f"unexpected {found!r} after the arguments" if found.strip() else "the call is not closed"
        if not problem and not isinstance(value, dict):
            problem = f"the arguments must be a JSON object, got {type(value).__name__}"
        if problem:
            return [self._failure(text, opened, problem, name=name, body=head.end())]
        return [ParsedCall(name=name, arguments=value, span=(start.start(), sure(tail).end()), call_id=call_id)]

    def _failure(
        self, text: str, start: re.Match[str], problem: str, *, name: str = "", body: int | None = None
    ) -> ParseFailure:
        """Up to the next mark that opens a call; later marks of this call belong to it."""
        at = start.end()
        while (following := self._tags.search(text, at)) and not self.opens.match(text, following.start()):
            if following[0] in ("<think>", "</think>"):
                break
            at = following.end()
        end = following.start() if following else len(text)
        why = f"the call{name and f' of {name}'} cannot be read: {problem}. Write {self.form}"
        source = "" if body is None else text[body:end].strip()
        return ParseFailure(message=why, span=(start.start(), end), name=name, source=source)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = self.form.replace("NAME", name, 1).replace("{...}", dump_json(dict(arguments)), 1)
        return self.check_written(written, name, arguments)


class DeepSeekV3Format(HeadedFormat):
    """DeepSeek V3 and R1: the arguments in a JSON fence."""

    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    starts = r"<｜tool▁(?:calls?▁(?:begin|end)|sep)｜>"
    opens = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>")
    head = re.compile(r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[^\s<>`{}]+)\s*```(?:json)?")
    tail = re.compile(r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")
    as_tool_calls = True

    def message_arguments(self, event: Event) -> str:
        return dump_json(event.arguments) if isinstance(event, ParsedCall) else event.source


class DeepSeekV31Format(DeepSeekV3Format):
    """DeepSeek V3.1: the name before the separator, the arguments after it."""

    form = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    head = re.compile(r"\s*(?P<name>[^\s<>`{}]+)\s*<｜tool▁sep｜>")
    tail = re.compile(r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")


class KimiK2Format(HeadedFormat):
    """Kimi K2: the name inside the call's id, which the result repeats."""

    form = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    starts = r"<\|tool_call(?:s_section)?_(?:begin|end)\|>|<\|tool_call_argument_begin\|>"
    opens = re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>")
    head = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
    tail = re.compile(r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?")
    as_tool_calls = True


class MistralV11Format(HeadedFormat):
    """Mistral from tokenizer version 11 on: a mark per call."""

    form = "[TOOL_CALLS]NAME[ARGS]{...}"
    starts = r"\[TOOL_CALLS\]|\[ARGS\](?=\s*\{)"  # help texts of command lines contain [ARGS], too
    opens = re.compile(r"\[TOOL_CALLS\]")
    head = re.compile(r"\s*(?P<name>[^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]+)\s*)?(?:\[ARGS\])?")
    tail = re.compile("")
    as_tool_calls = True


class MistralFormat(MistralV11Format):
    """Mistral up to tokenizer version 10: one mark, then a JSON list of calls."""

    form = '[TOOL_CALLS] [{"name": "NAME", "arguments": {...}}]'

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        if start[0] != "[TOOL_CALLS]":
            return super().read_calls(text, start)
        at = skip_space(text, start.end())
        if not text.startswith("[", at):
            return [self._failure(text, start, f"expected a JSON list of calls at {text[at : at + 20]!r}")]
        events: list[Event] = []
        begin, closed = start.start(), False
        while not closed:
            value, end, problem = read_json(text, at + 1)
            after = skip_space(text, end)
            closed = text.startswith("]", after)
            if not problem and not closed and not text.startswith(",", after):
                problem = f"expected , or ] at {text[after : after + 20]!r}"
            if problem:
                failure = self._failure(text, start, problem)
                return [*events, ParseFailure(message=failure.message, span=(begin, failure.span[1]))]
            at = after
            event = call_of(value, "arguments", (begin, after + 1 if closed else end), self.form)
            events.append(event)
            begin = event.span[1]
        return events
