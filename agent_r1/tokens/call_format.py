"""The contract of a tool-call format: what a parser reports, and what formats share. The formats: `tool_calls.py`."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from agent_r1.data.files import is_nested_deeper
from agent_r1.types import Message

MAX_CALLS = 32  # default of `max_calls`

Span = tuple[int, int]  # characters [start, end) of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any]
    span: Span
    call_id: str = ""  # if the model wrote one


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
    marked: ClassVar[bool] = True  # calls contain text that no answer contains, so even a broken one is recognised
    # Responses enter the conversation as `tool_calls`, because message content cannot contain control tokens.
    as_tool_calls: ClassVar[bool] = False
    fixed_tool: str | None = None  # the only tool this format can call
    prompt_thinks: bool | None = None  # whether prompts end with an open <think>; None: unknown
    max_calls: int = MAX_CALLS  # per response: a model that repeats itself must not flood tools, context or parser

    def parse(self, text: str) -> Parsed:
        """Read a response. Never raises; spans are ordered and do not overlap."""
        content, events = self._parse(text)
        limit = self.max_calls
        if len(events) > limit:
            message = f"there are more than {limit} calls; the rest was not read. Make fewer calls at once"
            events[limit:] = [ParseFailure(message=message, span=(events[limit].span[0], len(text)))]
        return content, events

    @abstractmethod
    def _parse(self, text: str) -> Parsed:
        """Read a response, at least up to the call after `max_calls`."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one call, as `parse` reads it; for demonstrations. ValueError if the format cannot say it."""

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        """Whether the text calls one of `tools` in this format."""
        return any(isinstance(event, ParsedCall) and event.name in tools for event in self.parse(text)[1])

    def typed(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with JSON types, by the tool's schema; a format that writes JSON has them already."""
        return dict(arguments)

    def for_prompt(self, *, thinks: bool) -> Self:
        """Return this format, set for prompts that do or do not end with an open `<think>`."""
        return self._changed("prompt_thinks", thinks)

    def with_max_calls(self, max_calls: int) -> Self:
        """Return this format with a limit on the calls read per response."""
        return self._changed("max_calls", max_calls)

    def _changed(self, attribute: str, value: Any) -> Self:
        bound = copy(self)
        object.__setattr__(bound, attribute, value)  # formats may be frozen dataclasses
        return bound

    def assistant_message(self, text: str) -> Message:
        """The response as a message of the conversation."""
        content, events = self.parse(text) if self.as_tool_calls else ("", [])
        if not events:
            return {"role": "assistant", "content": text}
        calls = []
        for index, event in enumerate(events):
            function = {"name": event.name, "arguments": self.message_arguments(event)}
            calls.append({"id": _call_id(event, index), "type": "function", "function": function})
        return {"role": "assistant", "content": content or None, "tool_calls": calls}

    def message_arguments(self, event: Event) -> Any:
        """The arguments as chat templates of this format take them."""
        return event.arguments if isinstance(event, ParsedCall) else event.source

    def result_messages(self, results: Sequence[str], calls: Sequence[Event], role: str | None = None) -> list[Message]:
        """The answers to the calls of one response, in order; role "user" is for templates without a tool role."""
        if (role or self.roles[0]) == "tool":
            messages: list[Message] = []
            for index, (result, call) in enumerate(zip(results, calls, strict=True)):
                call_id = {"tool_call_id": _call_id(call, index)} if self.as_tool_calls else {}
                messages.append({"role": "tool", "name": call.name or "unknown", **call_id, "content": result})
            return messages
        # One message: many templates refuse two user turns in a row.
        # Marked, so that rendering lets none of it become a control token, as with role "tool".
        return [{"role": "user", "from_tool": True, "content": "\n".join(self.wrap(result) for result in results)}]

    def wrap(self, result: str) -> str:
        return f"<tool_response>\n{result}\n</tool_response>"

    def check_written(self, written: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Return `written` if it parses as exactly this call, else raise. For formats that cannot quote everything."""
        events = self.parse(written)[1]
        read = [(event.name, event.arguments) if isinstance(event, ParsedCall) else None for event in events]
        if read != [(name, dict(arguments))]:
            raise ValueError(f"{type(self).__name__} cannot write this call: {name!r} with {dict(arguments)!r:.200}")
        return written


def _call_id(event: Event, index: int) -> str:
    """The model's own id, else one of nine letters and digits, as Mistral's templates require."""
    return (event.call_id if isinstance(event, ParsedCall) else "") or f"call{index:05d}"


class ScannedFormat(ToolCallFormat):
    """Finds calls from left to right and skips text between `<think>` and `</think>`."""

    starts: ClassVar[str]  # regular expression for the start of a call, or of a stray piece of one
    opening: ClassVar[str] = r"(?!)"  # regular expression for calls that count only at the start of the visible text
    joiner: ClassVar[str] = ""  # between the pieces of text around calls

    _starts: ClassVar[re.Pattern[str]]
    _opening: ClassVar[re.Pattern[str]]
    _tags: ClassVar[re.Pattern[str]]  # where calls start, and <think> and </think>

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "starts"):
            cls._starts, cls._opening = re.compile(cls.starts), re.compile(cls.opening)
            cls._tags = re.compile(rf"</?think>|{cls.starts}")

    @abstractmethod
    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        """The calls and failures that begin with `start`; at least one, and the first begins there."""

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        early: list[Event] = []  # before a first </think> that was not opened
        thoughts: list[Span] = []
        at, begins, may_close = 0, True, self.prompt_thinks is not False
        while len(events) <= self.max_calls:
            tag = (self._opening.match(text, at) if begins else None) or self._tags.search(text, at)
            if tag is None:
                break
            begins = tag[0] in ("<think>", "</think>")
            if tag[0] == "<think>":
                may_close = False
                end = text.find("</think>", tag.end())
                at = len(text) if end < 0 else end + len("</think>")
                thoughts.append((tag.start(), at))
                if end < 0 and (call := self._starts.search(text, tag.end())):
                    message = "the call stands inside thinking; close it with </think> before the call"
                    thoughts[-1] = (tag.start(), call.start())
                    events.append(ParseFailure(message=message, span=(call.start(), at)))
            elif tag[0] == "</think>":
                at = tag.end()
                if may_close:  # either the prompt opened the thinking or the tag is stray; decided at the end
                    events, early, thoughts, may_close = [], events, [(0, at)], False
                else:
                    thoughts.append(tag.span())
            else:
                events.extend(self.read_calls(text, tag))
                at = events[-1].span[1]
        content = content_without(text, sorted([*thoughts, *(event.span for event in events)]), self.joiner)
        if not events and self.prompt_thinks is None:
            # Nothing shows that the prompt opened the thinking: keep calls before a stray tag.
            events = [event for event in early if isinstance(event, ParsedCall)]
        return content, events


MAX_NESTING = 60  # levels of lists and mappings in the arguments of a call
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def check_json(value: Any) -> None:
    """Raise ValueError for values that JSON or UTF-8 cannot represent (NaN, half a surrogate pair), and for values
    nested too deeply to be copied and stored."""
    text = dump_json(value)
    text.encode()
    if is_nested_deeper(value, MAX_NESTING, text=text):
        raise ValueError(f"nested more than {MAX_NESTING} levels deep")


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
        check_json(value)
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


def content_without(text: str, holes: Sequence[Span], joiner: str = "") -> str:
    """The text without the holes."""
    parts, at = [], 0
    for start, end in holes:
        parts.append(text[at:start])
        at = end
    parts.append(text[at:])
    if joiner:
        parts = [part.strip() for part in parts if part.strip()]
    return joiner.join(parts).strip()
