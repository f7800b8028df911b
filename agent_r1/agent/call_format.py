"""The contract of a tool-call format: what a parser reports, and what formats share. The formats: `tool_calls.py`."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent_r1.types import Message

MAX_CALLS = 32  # of one response: a policy that repeats itself must not flood tools, context or the parser

Span = tuple[int, int]  # characters [start, end) of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any]
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseFailure:
    """A call that cannot be read."""

    message: str  # for the model: what is wrong, and how a call is written
    span: Span
    name: str = ""  # where the text still tells
    source: str = ""  # the arguments as written, where the text still tells


Event = ParsedCall | ParseFailure
Parsed = tuple[str, list[Event]]  # what is addressed to the user (no calls, no thinking), and the calls


class ToolCallFormat(ABC):
    """How one family of models writes calls and reads results."""

    form: ClassVar[str]  # how to write a call, as told to a model that did not
    roles: ClassVar[tuple[str, ...]] = ("tool", "user")  # that may carry results; the first is the format's own
    fixed_tool: str | None = None  # the only tool this format can call

    def parse(self, text: str) -> Parsed:
        """Read a response. Never raises; spans are ordered and do not overlap."""
        content, events = self._parse(text)
        if len(events) > MAX_CALLS:
            message = f"there are more than {MAX_CALLS} calls; the rest was not read. Make fewer calls at once"
            events[MAX_CALLS:] = [ParseFailure(message=message, span=(events[MAX_CALLS].span[0], len(text)))]
        return content, events

    @abstractmethod
    def _parse(self, text: str) -> Parsed:
        """Read a response up to the call after `MAX_CALLS`."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one call, as `parse` reads it; for demonstrations. ValueError if the format cannot say it."""

    def typed(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with JSON types, by the tool's schema; a format that writes JSON has them already."""
        return dict(arguments)

    def assistant_message(self, text: str) -> Message:
        """The response as a message of the conversation."""
        return {"role": "assistant", "content": text}

    def result_messages(self, results: Sequence[str], calls: Sequence[Event], role: str | None = None) -> list[Message]:
        """The answers to the calls of one response, in order; role "user" is for templates without a tool role."""
        if (role or self.roles[0]) == "tool":
            named = zip(results, calls, strict=True)
            return [{"role": "tool", "name": call.name or "unknown", "content": result} for result, call in named]
        # One message: many templates refuse two user turns in a row.
        # Marked, so that rendering lets none of it become a control token, as with role "tool".
        return [{"role": "user", "from_tool": True, "content": "\n".join(self.wrap(result) for result in results)}]

    def wrap(self, result: str) -> str:
        return f"<tool_response>\n{result}\n</tool_response>"


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def sure(match: re.Match[str] | None) -> re.Match[str]:
    assert match is not None  # for patterns that match the empty text, too
    return match


def skip_space(text: str, start: int) -> int:
    return sure(_SPACE.match(text, start)).end()


def read_json(text: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at `start` (spaces allowed), where it ends, and what is wrong with it ("" for nothing)."""
    start = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        dump_json(value).encode()  # refuses what Python reads and JSON or UTF-8 cannot say: NaN, half a surrogate pair
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        return None, start, f"{error.msg} {f'at {near!r}' if near else 'at the end'}"
    except (ValueError, RecursionError) as error:  # those, numbers of 5,000 digits, thousands of brackets
        return None, start, str(error).split("\n")[0][:100]
    return value, end, ""


def call_of(value: Any, key: str, span: Span, form: str) -> Event:
    """The call in a decoded `{"name": ..., key: {...}}`."""
    value = value if isinstance(value, dict) else {}
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ParseFailure(message=f'the call has no "name". Write {form}', span=span)
    arguments = value.get(key)
    if isinstance(arguments, str):  # some models quote the object
        decoded, end, problem = read_json(arguments, 0)
        arguments = decoded if not problem and not arguments[end:].strip() else arguments
    if not isinstance(arguments, dict):
        problem = f"must be a JSON object, got {type(arguments).__name__}" if key in value else "is missing"
        return ParseFailure(message=f'"{key}" of the call {problem}. Write {form}', span=span, name=name)
    return ParsedCall(name=name, arguments=arguments, span=span)


def content_without(text: str, holes: Sequence[Span]) -> str:
    """The text without the holes."""
    parts, at = [], 0
    for start, end in holes:
        parts.append(text[at:start])
        at = end
    return "".join([*parts, text[at:]]).strip()
