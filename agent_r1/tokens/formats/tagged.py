"""Calls between `<tool_call>` and `</tool_call>`: hermes, qwen3_coder and glm45."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.tokens.formats.base import Event, ParsedCall, ScannedFormat, dump_json, read_json, skip_space
from agent_r1.tools.schema import allows_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OUTSIDE_END = re.compile(r"</tool_call>|(?=<tool_call>|</?think>)|\Z")


class TaggedFormat(ScannedFormat):
    """Base class of the three formats."""

    starts = r"</?tool_call>"

    @abstractmethod
    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        """Read the call whose `<tool_call>` ends at `start`. Returns the call, the end of its body, and any problem."""

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        if start[0] == OPEN:
            return [self._read_call(text, start)]
        if start[0] == CLOSE:
            return [self.failure(f"{CLOSE} closes no call", start.span())]
        end = _OUTSIDE_END.search(text, start.end())
        assert end is not None  # it matches the end of the text
        return [self.failure(f"the call is not inside {OPEN}", (start.start(), end.end()))]

    def _read_call(self, text: str, start: re.Match[str]) -> Event:
        call, end, problem = self._read_body(text, start.end())
        close = skip_space(text, end)
        if call is not None and text.startswith(CLOSE, close):
            return replace(call, span=(start.start(), close + len(CLOSE)))
        name = call.name if call is not None else ""
        close, reopened = text.find(CLOSE, end), text.find(OPEN, end)
        if close < 0 or 0 <= reopened < close:
            following = self._tags.search(text, end)
            stop = following.start() if following else len(text)
            return self.failure(
                f"the call is not closed with {CLOSE}{problem and f' ({problem})'}", (start.start(), stop), name=name
            )
        problem = problem or f"unexpected {text[end:close].strip()[:40]!r} after it"
        return self.failure(f"the call cannot be read: {problem}", (start.start(), close + len(CLOSE)), name=name)


class HermesFormat(TaggedFormat):
    """JSON inside the tags."""

    form = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        value, end, problem = read_json(text, start)
        return (None if problem else self.read_object(value, "arguments", (0, 0))), end, problem

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN}\n{dump_json({'name': name, 'arguments': dict(arguments)})}\n{CLOSE}"


@dataclass(kw_only=True)
class TextValuesFormat(TaggedFormat):
    """A name, then pairs of key and value as plain text. Their types come from the tool's schema.

    `name`, `key` and `end` are regular expressions: for the name, for a key with the text that opens its value, and for
    the text after the last pair. `write` and `write_pair` are templates. A value must not contain anything in `tags`.
    """

    form: str
    starts: str
    name: str
    key: str
    value_end: str
    end: str = ""
    tags: str
    write: str
    write_pair: str
    strip_newlines: bool = False  # remove one line break before and one after each value

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        name = re.compile(self.name).match(text, start)
        if name is None:
            return None, start, f"no tool name at {text[start : start + 20]!r}"
        key_pattern, tags = re.compile(self.key), re.compile(self.tags)
        arguments: dict[str, Any] = {}
        at = name.end()
        while key := key_pattern.match(text, at):
            close = tags.search(text, key.end())
            if close is None or close[0] != self.value_end:
                return None, at, f"the value of {key[1]!r} is not closed with {self.value_end}"
            value = text[key.end() : close.start()]
            arguments[key[1].strip()] = value.removeprefix("\n").removesuffix("\n") if self.strip_newlines else value
            at = close.end()
        end = re.compile(self.end).match(text, at)
        if end is None:
            return None, at, f"expected an argument or the end of the call, found {text[at : at + 40].lstrip()[:20]!r}"
        return ParsedCall(name=name[1], arguments=arguments, span=(0, 0)), end.end(), ""

    def convert_arguments(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        schemas = parameters.get("properties", {})
        return {key: _convert_text(value, schemas.get(key, {})) for key, value in arguments.items()}

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else dump_json(value) for key, value in arguments.items()}
        pairs = "".join(self.write_pair.format(key=key, value=text) for key, text in texts.items())
        return self.check_written(self.write.format(name=name, pairs=pairs), name, texts)


def _convert_text(text: str, schema: Mapping[str, Any]) -> Any:
    if allows_text(schema):
        return text
    value, end, problem = read_json(text, 0)
    if not problem and not text[end:].strip():
        return value
    # Python's spelling is common in these formats; the tool's own check refuses anything else.
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)
