"""Wire formats of tool calls: one parser and one writer per format, behind the table `FORMATS`.

A parser reports what it finds as events in text order: a call, or a call that went wrong. A malformed or unclosed call
is never passed over, or the episode would end with it as its answer. What a model writes while it thinks is not a call.
Nothing here knows which tools exist; `tool_env.py` does.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from agent_r1.agent.tool_schema import allows_text
from agent_r1.types import Message

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

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """Read a response. Never raises; spans are ordered and do not overlap."""

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
        return [{"role": "user", "content": "\n".join(self.wrap(result) for result in results)}]

    def wrap(self, result: str) -> str:
        return f"<tool_response>\n{result}\n</tool_response>"


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"\s*")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _sure(match: re.Match[str] | None) -> re.Match[str]:
    assert match is not None  # for patterns that match the empty text, too
    return match


def _skip_space(text: str, start: int) -> int:
    return _sure(_SPACE.match(text, start)).end()


def _read_json(text: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at `start` (spaces allowed), where it ends, and what is wrong with it ("" for nothing)."""
    start = _skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        _dump(value).encode()  # half of a surrogate pair cannot be shown to any model
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        return None, start, f"{error.msg} {f'at {near!r}' if near else 'at the end'}"
    except (ValueError, RecursionError) as error:  # NaN, lone surrogates, absurd numbers, thousands of brackets
        return None, start, str(error).split("\n")[0][:100]
    return value, end, ""


def _call_of(value: Any, key: str, span: Span, form: str) -> Event:
    """The call in a decoded `{"name": ..., key: {...}}`."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return ParseFailure(message=f'the call has no "name". Write {form}', span=span)
    arguments = value.get(key)
    if isinstance(arguments, str):  # some models quote the object
        decoded, end, problem = _read_json(arguments, 0)
        arguments = decoded if not problem and not arguments[end:].strip() else arguments
    if not isinstance(arguments, dict):
        problem = f"must be a JSON object, got {type(arguments).__name__}" if key in value else "is missing"
        return ParseFailure(message=f'"{key}" of the call {problem}. Write {form}', span=span, name=name)
    return ParsedCall(name=name, arguments=arguments, span=span)


def _content(text: str, holes: Sequence[Span]) -> str:
    """The text without the holes."""
    parts, at = [], 0
    for start, end in holes:
        parts.append(text[at:start])
        at = end
    return "".join([*parts, text[at:]]).strip()


class _TaggedFormat(ToolCallFormat):
    """Calls between `<tool_call>` and `</tool_call>`, thinking between `<think>` and `</think>`."""

    _tags: ClassVar[re.Pattern[str]] = re.compile(r"<tool_call>|<think>|</think>")
    _starts = _tags  # of what is read; a format may know further starts of calls

    @abstractmethod
    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        """The call whose `<tool_call>` ends at `start`, where its body ends, and what is wrong with it."""

    def parse(self, text: str) -> Parsed:
        events: list[Event] = []
        thoughts: list[Span] = []
        at = 0
        while tag := self._starts.search(text, at):
            if tag[0] == "<think>":
                end = text.find("</think>", tag.end())
                at = len(text) if end < 0 else end + len("</think>")
                thoughts.append((tag.start(), at))
            elif tag[0] == "</think>":  # the prompt opened the thinking: all so far was thought
                at = tag.end()
                events, thoughts = [], [(0, at)]
            else:
                events.append(self._read_call(text, tag))
                at = events[-1].span[1]
        return _content(text, sorted([*thoughts, *(event.span for event in events)])), events

    def _read_call(self, text: str, tag: re.Match[str]) -> Event:
        call, end, problem = self._read_body(text, tag.end())
        close = _skip_space(text, end)
        if call is not None and text.startswith("</tool_call>", close):
            return replace(call, span=(tag.start(), close + len("</tool_call>")))
        name = call.name if call is not None else ""
        close, reopened = text.find("</tool_call>", end), text.find("<tool_call>", end)
        if close < 0 or 0 <= reopened < close:
            following = self._tags.search(text, end)
            why = f"the call is not closed with </tool_call>{problem and f' ({problem})'}"
            close = following.start() if following else len(text)
        else:
            why = f"the call cannot be read: {problem or f'unexpected {text[end:close].strip()[:40]!r} after it'}"
            close += len("</tool_call>")
        return ParseFailure(message=f"{why}. Write {self.form}", span=(tag.start(), close), name=name)


class HermesFormat(_TaggedFormat):
    """Hermes and Qwen: JSON inside `<tool_call>`."""

    form = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        value, end, problem = _read_json(text, start)
        return (None if problem else _call_of(value, "arguments", (0, 0), self.form)), end, problem

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{_dump({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


class Qwen3CoderFormat(_TaggedFormat):
    """Qwen3-Coder: XML-like, values written as plain text, so their types come from the tool's schema."""

    _starts = re.compile(r"<tool_call>|<function=|<think>|</think>")
    _function = re.compile(r"\s*<function=([^<>\s]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>", re.DOTALL)
    _function_end = re.compile(r"\s*</function>")
    _structure = re.compile(r"<parameter=|</parameter>|</function>|</?tool_call>")  # cannot stand in a value
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"

    def _read_call(self, text: str, tag: re.Match[str]) -> Event:
        if tag[0] != "<function=":
            return super()._read_call(text, tag)
        end = re.compile(r"</function>|(?=<tool_call>|<think>|</think>)|\Z").search(text, tag.end())
        message = f"the call is not inside <tool_call>. Write {self.form}"
        return ParseFailure(message=message, span=(tag.start(), _sure(end).end()))

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        function = self._function.match(text, start)
        if function is None:
            return None, start, f"no <function=NAME> at {text[start : start + 20]!r}"
        arguments: dict[str, Any] = {}
        at = function.end()
        while parameter := self._parameter.match(text, at):
            if self._structure.search(parameter[2]):
                return None, at, f"the value of {parameter[1]!r} is not closed with </parameter>"
            arguments[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        end = self._function_end.match(text, at)
        if end is None:
            found = text[at : at + 40].lstrip()[:20]
            return None, at, f"expected <parameter=KEY>...</parameter> or </function>, found {found!r}"
        return ParsedCall(name=function[1], arguments=arguments, span=(0, 0)), end.end(), ""

    def typed(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        schemas = parameters.get("properties", {})
        return {key: self._typed_value(value, schemas.get(key, {})) for key, value in arguments.items()}

    def _typed_value(self, text: str, schema: Mapping[str, Any]) -> Any:
        if allows_text(schema):
            return text
        value, end, problem = _read_json(text, 0)
        if not problem and not text[end:].strip():
            return value
        # Python's spelling is common in this format; anything else is left for the tool's check to refuse.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _dump(value)
            if self._structure.search(text) or re.search(r"[<>\s]", key) or not key:
                raise ValueError(f"qwen3_coder cannot write the argument {key!r}: {text[:80]!r}")
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>\n</tool_call>"])


class Llama3JsonFormat(ToolCallFormat):
    """Llama 3: bare JSON, with or without `<|python_tag|>`, several separated by semicolons.

    Without the tag nothing marks a call, so this counts as one: an object with "name" and "parameters" first, anywhere,
    and at the start of the response anything that begins like a call.
    """

    _start = re.compile(
        r"""<\|python_tag\|>|\A\s*\{\s*["']?(?:name|parameters)\b|\A\s*\{\s*["']type["']\s*:\s*["']function["']"""
        r"""|\{\s*["']name["']\s*:\s*["'][^"'\n]*["']\s*,\s*["']parameters["']"""
    )
    form = '{"name": "...", "parameters": {...}}'

    def parse(self, text: str) -> Parsed:
        events: list[Event] = []
        at = 0
        while head := self._start.search(text, at):
            brace = head.end() if head[0].startswith("<") else text.index("{", head.start())
            start = head.start() if head[0].startswith("<") else brace
            while True:
                events.append(self._read_call(text, start, brace))
                at = events[-1].span[1]
                rest = _skip_space(text, at)
                start = brace = _skip_space(text, rest + 1) if text.startswith(";", rest) else rest
                if isinstance(events[-1], ParseFailure) or not text.startswith("{", brace):
                    break
        return _content(text, [event.span for event in events]).strip("; \n"), events

    def _read_call(self, text: str, start: int, brace: int) -> Event:
        value, end, problem = _read_json(text, brace)
        if not problem:
            return _call_of(value, "parameters", (start, end), self.form)
        following = self._start.search(text, max(brace + 1, start + 1))
        end = following.start() if following else len(text)
        return ParseFailure(message=f"the call cannot be read: {problem}. Write {self.form}", span=(start, end))

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return _dump({"name": name, "parameters": dict(arguments)})


class HarmonyFormat(ToolCallFormat):
    """gpt-oss: messages with a channel and a recipient. Its stop token `<|call|>` may be missing from the text.

    A message to a function is a call; on the channel `analysis` without recipient the model thinks; the rest is for the
    user. The chat template keeps one call per message, and models stop at their first, so a second one is refused.
    """

    _end = re.compile(r"<\|(?:end|call|return|start|channel)\|>|\Z")
    _recipient = re.compile(r"\bto=([^\s<]+)")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"

    def parse(self, text: str) -> Parsed:
        _, said, events = self._read(text)
        return said, events

    def assistant_message(self, text: str) -> Message:
        thought, said, events = self._read(text)
        message: Message = {"role": "assistant", "content": said}
        if events:  # the template takes thinking or content beside a call, not both
            call, message["content"] = events[0], ""
            thought = "\n".join(filter(None, [thought, said]))
            arguments = call.arguments if isinstance(call, ParsedCall) else call.source
            function = {"name": call.name or "unknown", "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return {**message, "thinking": thought} if thought else message

    def _read(self, text: str) -> tuple[str, str, list[Event]]:
        """What was thought, what was said, and the calls."""
        thoughts: list[str] = []
        said: list[str] = []
        events: list[Event] = []
        at = 0
        while (body := text.find("<|message|>", at)) >= 0:
            start = max(text.rfind("<|start|>", at, body), at)
            said.append(text[at:start])
            header = text[start:body]
            body += len("<|message|>")
            recipient, channel = self._recipient.search(header), self._channel.search(header)
            if recipient:
                events.append(self._read_call(text, start, body, recipient[1], again=bool(events)))
                at = events[-1].span[1]
            else:
                end = _sure(self._end.search(text, body))
                (thoughts if channel and channel[1] == "analysis" else said).append(text[body : end.start()])
                at = end.end() if end[0] in ("<|end|>", "<|call|>", "<|return|>") else end.start()
        tail = text[at:]
        if cut := re.search(r"(?:<\|start\|>|<\|channel\|>|\bto=functions\.)", tail):
            said.append(tail[: cut.start()])
            if recipient := self._recipient.search(tail, cut.start()):
                name = recipient[1].removeprefix("functions.")
                message = f"the call stops before its <|message|>. Write {self.form}"
                events.append(ParseFailure(message=message, span=(at + cut.start(), len(text)), name=name))
        else:
            said.append(tail)
        thought, spoken = ("\n".join(filter(None, map(str.strip, parts))) for parts in (thoughts, said))
        return thought, spoken, events

    def _read_call(self, text: str, start: int, body: int, recipient: str, *, again: bool) -> Event:
        name = recipient.removeprefix("functions.")
        value, end, problem = _read_json(text, body)
        close = self._end.match(text, _skip_space(text, end))
        if problem or close is None:
            problem = problem or f"unexpected {text[end : end + 20]!r} after the arguments"
            close = _sure(self._end.search(text, body))
        stop = close.start() if close[0] in ("<|start|>", "<|channel|>") else close.end()
        if not problem and not isinstance(value, dict):
            problem = f"the arguments must be a JSON object, got {type(value).__name__}"
        if again:
            problem = "only the first call of a message is run; make one call, then wait for its result"
        if problem:
            message = f"the call of {name} cannot be read: {problem}. Write {self.form}"
            source = text[body : close.start()].strip()
            return ParseFailure(message=message, span=(start, stop), name=name, source=source)
        return ParsedCall(name=name, arguments=value, span=(start, stop))

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        return f"{header}<|message|>{_dump(dict(arguments))}<|call|>"


@dataclass(frozen=True)
class RetoolFormat(ToolCallFormat):
    """ReTool: `<code>` runs in one tool, its output comes back as `<interpreter>`. Code may stand inside thinking."""

    fixed_tool: str = "python"
    argument: str = "code"

    roles = ("user",)
    _fenced = re.compile(r"<code>\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*</code>", re.DOTALL)
    _plain = re.compile(r"<code>(.*?)</code>", re.DOTALL)
    form = "<code>\n```python\n...\n```\n</code>"

    def parse(self, text: str) -> Parsed:
        events: list[Event] = []
        at = 0
        while (start := text.find("<code>", at)) >= 0:
            found = self._fenced.match(text, start) or self._plain.match(text, start)
            at = found.end() if found else len(text)
            problem = "the code is not closed with </code>" if found is None else "the code is empty"
            if found and found[1].strip():
                arguments = {self.argument: found[1].removeprefix("\n").removesuffix("\n")}
                events.append(ParsedCall(name=self.fixed_tool, arguments=arguments, span=(start, at)))
            else:
                events.append(
                    ParseFailure(message=f"{problem}. Write {self.form}", span=(start, at), name=self.fixed_tool)
                )
        return _content(text, [event.span for event in events]), events

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        code = arguments.get(self.argument)
        if name != self.fixed_tool or set(arguments) != {self.argument} or not isinstance(code, str):
            raise ValueError(
                f"retool can only call {self.fixed_tool}({self.argument}: string), got {name}({arguments})"
            )
        return f"<code>\n```python\n{code}\n```\n</code>"

    def wrap(self, result: str) -> str:
        return f"<interpreter>\n{result}\n</interpreter>"


FORMATS: dict[str, ToolCallFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "llama3_json": Llama3JsonFormat(),
    "harmony": HarmonyFormat(),
    "retool": RetoolFormat(),
}
