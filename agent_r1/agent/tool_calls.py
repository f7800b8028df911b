"""Wire formats of tool calls: one parser and one writer per format, behind the table `FORMATS`.

A parser reports what it finds as events in text order: a call, or a call that went wrong. A malformed or unclosed call
is never passed over, or the episode would end with it as its answer. What a model writes while it thinks is not a call.
Nothing here knows which tools exist; `tool_env.py` does.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from agent_r1.agent.call_format import (
    MAX_CALLS,
    Event,
    Parsed,
    ParsedCall,
    ParseFailure,
    Span,
    ToolCallFormat,
    call_of,
    content_without,
    dump_json,
    read_json,
    skip_space,
    sure,
)
from agent_r1.agent.tool_schema import allows_text
from agent_r1.types import Message

__all__ = ["FORMATS", "Event", "ParseFailure", "ParsedCall", "RetoolFormat", "ToolCallFormat"]


class _TaggedFormat(ToolCallFormat):
    """Calls between `<tool_call>` and `</tool_call>`, thinking between `<think>` and `</think>`."""

    _tags: ClassVar[re.Pattern[str]] = re.compile(r"<tool_call>|<think>|</think>")
    _starts = _tags  # of what is read; a format may know further starts of calls

    @abstractmethod
    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        """The call whose `<tool_call>` ends at `start`, where its body ends, and what is wrong with it."""

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        thoughts: list[Span] = []
        at = 0
        while len(events) <= MAX_CALLS and (tag := self._starts.search(text, at)):
            if tag[0] == "<think>":
                end = text.find("</think>", tag.end())
                at = len(text) if end < 0 else end + len("</think>")
                thoughts.append((tag.start(), at))
                if end < 0 and (call := text.find("<tool_call>", tag.end())) >= 0:
                    message = "the call stands inside thinking; close it with </think> before the call"
                    thoughts[-1] = (tag.start(), call)
                    events.append(ParseFailure(message=message, span=(call, at)))
            elif tag[0] == "</think>":  # the prompt opened the thinking: all so far was thought
                at = tag.end()
                events, thoughts = [], [(0, at)]
            else:
                events.append(self._read_call(text, tag))
                at = events[-1].span[1]
        return content_without(text, sorted([*thoughts, *(event.span for event in events)])), events

    def _read_call(self, text: str, tag: re.Match[str]) -> Event:
        call, end, problem = self._read_body(text, tag.end())
        close = skip_space(text, end)
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
        value, end, problem = read_json(text, start)
        return (None if problem else call_of(value, "arguments", (0, 0), self.form)), end, problem

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{dump_json({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


class Qwen3CoderFormat(_TaggedFormat):
    """Qwen3-Coder: XML-like, values written as plain text, so their types come from the tool's schema."""

    _starts = re.compile(r"<tool_call>|<function=|<think>|</think>")
    _function = re.compile(r"\s*<function=([^<>\s]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\s]+)>")
    _function_end = re.compile(r"\s*</function>")
    _loose_end = re.compile(r"</function>|(?=<tool_call>|<think>|</think>)|\Z")
    _structure = re.compile(r"<parameter=|</parameter>|</function>|</?tool_call>")  # cannot stand in a value
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"

    def _read_call(self, text: str, tag: re.Match[str]) -> Event:
        if tag[0] != "<function=":
            return super()._read_call(text, tag)
        end = sure(self._loose_end.search(text, tag.end())).end()
        return ParseFailure(message=f"the call is not inside <tool_call>. Write {self.form}", span=(tag.start(), end))

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        function = self._function.match(text, start)
        if function is None:
            return None, start, f"no <function=NAME> at {text[start : start + 20]!r}"
        arguments: dict[str, Any] = {}
        at = function.end()
        while parameter := self._parameter.match(text, at):
            close = self._structure.search(text, parameter.end())
            if close is None or close[0] != "</parameter>":
                return None, at, f"the value of {parameter[1]!r} is not closed with </parameter>"
            value = text[parameter.end() : close.start()]
            arguments[parameter[1]] = value.removeprefix("\n").removesuffix("\n")
            at = close.end()
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
        value, end, problem = read_json(text, 0)
        if not problem and not text[end:].strip():
            return value
        # Python's spelling is common in this format; anything else is left for the tool's check to refuse.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts: dict[str, Any] = {}
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in arguments.items():
            texts[key] = value if isinstance(value, str) else dump_json(value)
            lines.append(f"<parameter={key}>\n{texts[key]}\n</parameter>")
        written = "\n".join([*lines, "</function>\n</tool_call>"])
        if self.parse(written)[1] != [ParsedCall(name=name, arguments=texts, span=(0, len(written)))]:
            raise ValueError(
                f"qwen3_coder cannot write this call, it has no way to quote its own tags: {written[:200]!r}"
            )
        return written


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

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        at = 0
        while len(events) <= MAX_CALLS and (head := self._start.search(text, at)):
            brace = head.end() if head[0].startswith("<") else text.index("{", head.start())
            start = head.start() if head[0].startswith("<") else brace
            while True:
                events.append(self._read_call(text, start, brace))
                at = events[-1].span[1]
                rest = skip_space(text, at)
                start = brace = skip_space(text, rest + 1) if text.startswith(";", rest) else rest
                if isinstance(events[-1], ParseFailure) or not text.startswith("{", brace) or len(events) > MAX_CALLS:
                    break
        return content_without(text, [event.span for event in events]).strip("; \n"), events

    def _read_call(self, text: str, start: int, brace: int) -> Event:
        value, end, problem = read_json(text, brace)
        if not problem:
            return call_of(value, "parameters", (start, end), self.form)
        following = self._start.search(text, max(brace, start + 1))
        end = following.start() if following else len(text)
        return ParseFailure(message=f"the call cannot be read: {problem}. Write {self.form}", span=(start, end))

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return dump_json({"name": name, "parameters": dict(arguments)})


class HarmonyFormat(ToolCallFormat):
    """gpt-oss: messages with a channel and a recipient. Its stop token `<|call|>` may be missing from the text.

    A message to a function is a call; on the channel `analysis` without recipient the model thinks; the rest is for the
    user. The chat template keeps one call per message, and models stop at their first, so a second one is refused.
    """

    _end = re.compile(r"<\|(?:end|call|return|start|channel)\|>|\Z")
    _control = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
    _recipient = re.compile(r"\bto=([^\s<]+)")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"

    def _parse(self, text: str) -> Parsed:
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
        while len(events) <= MAX_CALLS and (body := text.find("<|message|>", at)) >= 0:
            start = max(text.rfind("<|start|>", at, body), at)
            said.append(text[at:start])
            header = text[start:body]
            body += len("<|message|>")
            recipient, channel = self._recipient.search(header), self._channel.search(header)
            if recipient:
                events.append(self._read_call(text, start, body, recipient[1], again=bool(events)))
                at = events[-1].span[1]
            else:
                end = sure(self._end.search(text, body))
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
        return self._joined(thoughts), self._joined(said), events

    def _joined(self, parts: list[str]) -> str:
        # Broken messages leave control tokens behind, and the chat template refuses contents that carry them.
        return "\n".join(filter(None, (self._control.sub(" ", part).strip() for part in parts)))

    def _read_call(self, text: str, start: int, body: int, recipient: str, *, again: bool) -> Event:
        name = recipient.removeprefix("functions.")
        value, end, problem = read_json(text, body)
        close = self._end.match(text, skip_space(text, end))
        if problem or close is None:
            problem = problem or f"unexpected {text[end : end + 20]!r} after the arguments"
            close = sure(self._end.search(text, body))
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
        return f"{header}<|message|>{dump_json(dict(arguments))}<|call|>"


@dataclass(frozen=True)
class RetoolFormat(ToolCallFormat):
    """ReTool: `<code>` runs in one tool, its output comes back as `<interpreter>`. Code may stand inside thinking."""

    fixed_tool: str = "python"
    argument: str = "code"

    roles = ("user",)
    _fenced = re.compile(r"<code>\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*</code>", re.DOTALL)
    _plain = re.compile(r"<code>(.*?)</code>", re.DOTALL)
    form = "<code>\n```python\n...\n```\n</code>"

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        at = 0
        while len(events) <= MAX_CALLS and (start := text.find("<code>", at)) >= 0:
            found = self._fenced.match(text, start)
            if found and "<code>" in found[1]:  # this fence is open, and another block closes its own
                found = None
            code = found[1] if found else ""
            if not found and (found := self._plain.match(text, start)):
                code = found[1].removeprefix("\n").removesuffix("\n")
            at = found.end() if found else len(text)
            if code.strip():
                events.append(ParsedCall(name=self.fixed_tool, arguments={self.argument: code}, span=(start, at)))
            else:
                why = f"the code is {'empty' if found else 'not closed with </code>'}. Write {self.form}"
                events.append(ParseFailure(message=why, span=(start, at), name=self.fixed_tool))
        return content_without(text, [event.span for event in events]), events

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = f"<code>\n```python\n{arguments.get(self.argument)}\n```\n</code>"
        if self.parse(written)[1] != [ParsedCall(name=name, arguments=dict(arguments), span=(0, len(written)))]:
            raise ValueError(
                f"retool can only call {self.fixed_tool}({self.argument}: string), got {name}({arguments})"
            )
        return written

    def wrap(self, result: str) -> str:
        return f"<interpreter>\n{result}\n</interpreter>"


FORMATS: dict[str, ToolCallFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "llama3_json": Llama3JsonFormat(),
    "harmony": HarmonyFormat(),
    "retool": RetoolFormat(),
}
