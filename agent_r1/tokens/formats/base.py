"""The contract of a tool-call format: what a parser reports, and what formats share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from agent_r1.data.files import is_nested_deeper
from agent_r1.types import Message

MAX_CALLS = 32  # default of `max_calls`
MAX_NESTING = 60  # levels of lists and mappings in the arguments of a call

Span = tuple[int, int]  # characters [start, end) of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any]
    span: Span
    call_id: str = ""  # empty if the model wrote none


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseFailure:
    """A call that cannot be read."""

    message: str  # tells the model what is wrong and how to write a call
    span: Span
    name: str = ""  # empty if it cannot be read
    source: str = ""  # the arguments as written; empty if they cannot be found
    malformed: bool = True  # False: written correctly, but one call too many or inside thinking


Event = ParsedCall | ParseFailure
Parsed = tuple[str, list[Event]]  # the text for the user (without calls and thinking); the calls and failures


class ToolCallFormat(ABC):
    """How one family of models writes calls and reads results."""

    form: str  # how to write a call; shown to a model that got one wrong
    roles: tuple[str, ...] = ("tool", "user")  # may carry results; the first is the default
    has_marks: bool = True  # calls contain text that no answer contains, so even a broken one is recognised
    # Responses enter the conversation as `tool_calls`, because message content cannot contain control tokens.
    as_tool_calls: bool = False
    arguments_as_text: bool = False  # chat templates of this format accept only arguments that are JSON text
    fixed_tool: str | None = None  # the only tool this format can call
    prompt_thinks: bool | None = None  # whether prompts end with an open <think>; None: unknown
    max_calls: int = MAX_CALLS  # calls read per response, because a model may repeat itself

    def parse(self, text: str) -> Parsed:
        """Read a response. Never raises; spans are ordered and do not overlap."""
        content, events = self._parse(text)
        limit = self.max_calls
        if len(events) > limit:
            message = f"there are more than {limit} calls; the rest was not read. Make fewer calls at once"
            span = (events[limit].span[0], len(text))
            events[limit:] = [ParseFailure(message=message, span=span, malformed=False)]
        return content, events

    @abstractmethod
    def _parse(self, text: str) -> Parsed:
        """Read a response, at least up to the call after `max_calls`."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write one call so that `parse` reads it back; for demonstrations. ValueError if the format cannot do it."""

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        """Whether the text calls one of `tools` in this format."""
        return any(isinstance(event, ParsedCall) and event.name in tools for event in self.parse(text)[1])

    def convert_arguments(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Give arguments JSON types, by the tool's schema. Formats that write JSON have them already."""
        return dict(arguments)

    def for_prompt(self, *, thinks: bool) -> Self:
        """Return this format for prompts that do or do not end with an open `<think>`."""
        changed = copy(self)
        changed.prompt_thinks = thinks
        return changed

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
        """The arguments in the type that chat templates of this format accept."""
        if isinstance(event, ParseFailure):
            return event.source
        return dump_json(event.arguments) if self.arguments_as_text else event.arguments

    def result_messages(self, results: Sequence[str], calls: Sequence[Event], role: str | None = None) -> list[Message]:
        """The answers to the calls of one response, in order; role "user" is for templates without a tool role."""
        if (role or self.roles[0]) == "tool":
            messages: list[Message] = []
            for index, (result, call) in enumerate(zip(results, calls, strict=True)):
                call_id = {"tool_call_id": _call_id(call, index)} if self.as_tool_calls else {}
                messages.append({"role": "tool", "name": call.name or "unknown", **call_id, "content": result})
            return messages
        # One message, because many templates refuse two user turns in a row. `from_tool` makes rendering treat it like
        # role "tool": nothing in it becomes a control token.
        return [{"role": "user", "from_tool": True, "content": "\n".join(map(self.wrap, results))}]

    def wrap(self, result: str) -> str:
        return f"<tool_response>\n{result}\n</tool_response>"

    # For subclasses

    def failure(self, problem: str, span: Span, *, name: str = "", source: str = "") -> ParseFailure:
        return ParseFailure(message=f"{problem}. Write {self.form}", span=span, name=name, source=source)

    def read_object(self, value: Any, key: str, span: Span) -> Event:
        """The call in a decoded `{"name": ..., key: {...}}`."""
        value = value if isinstance(value, dict) else {}
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return self.failure('the call has no "name"', span)
        arguments = value.get(key)
        if isinstance(arguments, str):  # some models quote the object
            decoded, end, problem = read_json(arguments, 0)
            arguments = decoded if not problem and not arguments[end:].strip() else arguments
        if not isinstance(arguments, dict):
            problem = f"must be a JSON object, got {type(arguments).__name__}" if key in value else "is missing"
            return self.failure(f'"{key}" of the call {problem}', span, name=name)
        return ParsedCall(name=name, arguments=arguments, span=span)

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

    starts: str  # regular expression for the start of a call, or of a stray piece of one
    opening: str = r"(?!)"  # regular expression for calls that count only at the start of the visible text
    joiner: str = ""  # joins the pieces of text around calls

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        return re.compile(rf"</?think>|{self.starts}")

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        return re.compile(self.opening)

    @abstractmethod
    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        """Return the calls and failures that begin at `start`; there is at least one."""

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        early: list[Event] = []  # events before the first </think> without a <think>
        thoughts: list[Span] = []
        at, at_beginning, may_close = 0, True, self.prompt_thinks is not False
        while len(events) <= self.max_calls:
            tag = (self._opening.match(text, at) if at_beginning else None) or self._tags.search(text, at)
            if tag is None:
                break
            at_beginning = tag[0] in ("<think>", "</think>")
            if tag[0] == "<think>":
                may_close = False
                end = text.find("</think>", tag.end())
                at = len(text) if end < 0 else end + len("</think>")
                thoughts.append((tag.start(), at))
                if end < 0 and (call := re.compile(self.starts).search(text, tag.end())):
                    message = "the call is inside thinking; close it with </think> before the call"
                    thoughts[-1] = (tag.start(), call.start())
                    events.append(ParseFailure(message=message, span=(call.start(), at), malformed=False))
            elif tag[0] == "</think>":
                at = tag.end()
                if may_close:  # either the prompt opened the thinking or the tag is stray; decided at the end
                    events, early, thoughts, may_close = [], events, [(0, at)], False
                else:
                    thoughts.append(tag.span())
            else:
                events.extend(self.read_calls(text, tag))
                at = events[-1].span[1]
        content = remove_spans(text, sorted([*thoughts, *[event.span for event in events]]), self.joiner)
        if not events and self.prompt_thinks is None:
            # Nothing shows that the prompt opened the thinking, so keep the calls before a stray tag.
            events = [event for event in early if isinstance(event, ParsedCall)]
        return content, events


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


dump_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # json.dumps makes an encoder per value


def check_json(value: Any) -> None:
    """Raise ValueError for values that JSON or UTF-8 cannot represent (NaN, half a surrogate pair), and for values
    nested too deeply to be copied and stored."""
    text = dump_json(value)
    text.encode()
    if is_nested_deeper(value, MAX_NESTING, text=text):
        raise ValueError(f"nested more than {MAX_NESTING} levels deep")


def skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None  # it matches the empty text, too
    return match.end()


def read_json(text: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at `start` (after blanks), where it ends, and what is wrong with it ("" if nothing is)."""
    start = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        check_json(value)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        return None, start, f"{error.msg} {f'at {near!r}' if near else 'at the end'}"
    except (ValueError, RecursionError) as error:  # also raised by numbers of 5,000 digits and thousands of brackets
        return None, start, str(error).split("\n")[0][:100]
    return value, end, ""


def remove_spans(text: str, spans: Sequence[Span], joiner: str = "") -> str:
    parts, at = [], 0
    for start, end in spans:
        parts.append(text[at:start])
        at = end
    parts.append(text[at:])
    if joiner:
        parts = [part.strip() for part in parts if part.strip()]
    return joiner.join(parts).strip()
