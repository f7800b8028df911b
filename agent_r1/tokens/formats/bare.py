"""Calls without marks, which only their form distinguishes from an answer: llama3_json and pythonic."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from agent_r1.tokens.formats.base import (
    Event,
    ParsedCall,
    ParseFailure,
    ScannedFormat,
    Span,
    check_json,
    dump_json,
    read_json,
    skip_space,
)


class Llama3JsonFormat(ScannedFormat):
    """Llama 3: bare JSON, with or without `<|python_tag|>`, several separated by semicolons.

    Without the tag, an object that starts with "name" and "parameters" is a call anywhere in the response, and at the
    start of the response so is any text that begins like a call.
    """

    has_marks = False
    form = '{"name": "...", "parameters": {...}}'
    starts = r"""<\|python_tag\|>|\{\s*["']name["']\s*:\s*["'][^"'\n]*["']\s*,\s*["'](?:parameters|arguments)["']"""
    opening = r"""\s*\{\s*(?:["']?(?:name|parameters)\b|["']type["']\s*:\s*["']function["'])"""

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        events: list[Event] = []
        tagged = start[0].startswith("<")
        brace = start.end() if tagged else text.index("{", start.start())
        begin = start.start() if tagged else brace
        while True:
            events.append(self._read_call(text, begin, brace))
            rest = skip_space(text, events[-1].span[1])
            begin = brace = skip_space(text, rest + 1) if text.startswith(";", rest) else rest
            if isinstance(events[-1], ParseFailure) or not text.startswith("{", brace) or len(events) > self.max_calls:
                return events

    def _read_call(self, text: str, start: int, brace: int) -> Event:
        value, end, problem = read_json(text, brace)
        if not problem:
            return self.read_object(value, "parameters", (start, end))
        following = self._tags.search(text, max(brace, start + 1))
        end = following.start() if following else len(text)
        return self.failure(f"the call cannot be read: {problem}", (start, end))

    def _parse(self, text: str) -> tuple[str, list[Event]]:
        content, events = super()._parse(text)
        return content.strip("; \n") if events else content, events

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        """Also accept an object with "arguments", which differs from this format only in that key."""
        return any(event.name in tools for event in self.parse(text)[1])

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return dump_json({"name": name, "parameters": dict(arguments)})


class PythonicFormat(ScannedFormat):
    """Llama 3.2 and 4: a Python list of calls with keyword arguments, `[f(a=1), g(b="x")]`. Only literals are read.

    It is a call only at the start of the response: elsewhere, the same text may be code in an answer.
    """

    has_marks = False
    form = '[NAME(KEY=VALUE)], with values as Python writes them, such as "text", 3 or [1, 2]'
    starts = r"<\|python_(?:start|tag)\|>"
    opening = r"\s*(?:<\|python_(?:start|tag)\|>\s*)?\[\s*[A-Za-z_][\w.]*\("
    _list = re.compile(r"\s*(?:<\|python_(?:start|tag)\|>\s*)?\[")
    _end = re.compile(r"\s*<\|python_end\|>")
    _in_prose = re.compile(r"(?:^|:)[ \t]*(?=\[\s*([A-Za-z_][\w.]*)\()", re.MULTILINE)
    _token = re.compile(
        r"""'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|[\[\](){},]""",
        re.DOTALL,
    )

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        opened = self._list.match(text, start.start())
        items = self._items(text, opened.end()) if opened else None
        if items is None:
            problem = "is not closed with ]" if opened else "is missing"
            return [self.failure(f"the list of calls {problem}", (start.start(), len(text)))]
        end = items[-1][1] + 1
        closing = self._end.match(text, end)
        events: list[Event] = []
        begin = start.start()
        for index, (first, last) in enumerate(items):
            stop = last if index + 1 < len(items) else closing.end() if closing else end
            events.append(self._read_item(text[first:last].strip(), (begin, stop)))
            begin = stop
        return events

    def _items(self, text: str, start: int) -> list[Span] | None:
        """Return the spans of the items in the list whose opening bracket ends at `start`; None if it is not closed."""
        items: list[Span] = []
        depth, begin = 0, start
        for token in self._token.finditer(text, start):
            if token[0] in "[({":
                depth += 1
            elif token[0] in "])}" and depth:
                depth -= 1
            elif depth == 0 and token[0] in ",])}":
                items.append((begin, token.start()))
                begin = token.end()
                if token[0] != ",":
                    return items
        return None

    def _read_item(self, source: str, span: Span) -> Event:
        name = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes such as "\d"
                call = ast.parse(source, mode="eval").body
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if not isinstance(call, ast.Call) or not re.fullmatch(r"[^\W\d][\w.]*", name):
                raise ValueError(f"{source[:40]!r} is not a call")
            return ParsedCall(name=name, arguments=_literal_arguments(call), span=span)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            problem = str(error.msg if isinstance(error, SyntaxError) else error).split("\n")[0][:100]
            return self.failure(f"the call cannot be read: {problem}", span, name=name)

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        """Also in the middle of a response, at the start of a line or after a colon."""
        named = (match for match in self._in_prose.finditer(text) if match[1] in tools)
        starts = (self._list.match(text, match.end()) for match in islice(named, self.max_calls))
        found = (event for start in starts if start for event in self.read_calls(text, start))
        return any(isinstance(event, ParsedCall) and event.name in tools for event in found)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return self.check_written(f"[{name}({values})]", name, arguments)


_JSON_WORDS = {"true": True, "false": False, "null": None}


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _literal_arguments(call: ast.Call) -> dict[str, Any]:
    """Read the arguments without evaluating anything. Raises ValueError or TypeError for values that JSON cannot
    hold."""
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("arguments must be given by name")
    arguments = {str(each.arg): ast.literal_eval(_JsonWords().visit(each.value)) for each in call.keywords}
    if len(arguments) < len(call.keywords):
        raise ValueError("an argument is given twice")
    check_json(arguments)
    read_back: dict[str, Any] = json.loads(dump_json(arguments))  # tuples become lists, and all keys text
    return read_back
