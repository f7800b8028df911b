"""Calls between `<tool_call>` and `</tool_call>`: hermes, qwen3_coder and glm45."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from agent_r1.tools.schema import allows_text


class TaggedFormat(ScannedFormat):
    """Base class of the three formats."""

    starts = r"</?tool_call>"

    @abstractmethod
    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        """Read the call whose `<tool_call>` ends at `start`. Returns the call, the end of its body, and any problem."""

    def read_calls(self, text: str, start: re.Match[str]) -> list[Event]:
        if start[0] == "</tool_call>":
            why = f"</tool_call> closes no call. Write {self.form}"
            return [ParseFailure(message=why, span=start.span())]
        return [self._read_call(text, start)]

    def _read_call(self, text: str, start: re.Match[str]) -> Event:
        call, end, problem = self._read_body(text, start.end())
        close = skip_space(text, end)
        if call is not None and text.startswith("</tool_call>", close):
            return replace(call, span=(start.start(), close + len("</tool_call>")))
        name = call.name if call is not None else ""
        close, reopened = text.find("</tool_call>", end), text.find("<tool_call>", end)
        if close < 0 or 0 <= reopened < close:
            following = self._tags.search(text, end)
            why = f"the call is not closed with </tool_call>{problem and f' ({problem})'}"
            close = following.start() if following else len(text)
        else:
            why = f"the call cannot be read: {problem or f'unexpected {text[end:close].strip()[:40]!r} after it'}"
            close += len("</tool_call>")
        return ParseFailure(message=f"{why}. Write {self.form}", span=(start.start(), close), name=name)


class HermesFormat(TaggedFormat):
    """Hermes and Qwen: JSON inside `<tool_call>`."""

    form = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        value, end, problem = read_json(text, start)
        return (None if problem else call_of(value, "arguments", (0, 0), self.form)), end, problem

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{dump_json({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


class TextValuesFormat(TaggedFormat):
    """Values are written as plain text, so their types come from the tool's schema."""

    def typed(self, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        schemas = parameters.get("properties", {})
        return {key: self._typed_value(value, schemas.get(key, {})) for key, value in arguments.items()}

    def _typed_value(self, text: str, schema: Mapping[str, Any]) -> Any:
        if allows_text(schema):
            return text
        value, end, problem = read_json(text, 0)
        if not problem and not text[end:].strip():
            return value
        # Python's spelling is common in these formats; the tool's own check refuses anything else.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else dump_json(value) for key, value in arguments.items()}
        return self.check_written(self._write(name, texts), name, texts)

    @abstractmethod
    def _write(self, name: str, texts: Mapping[str, str]) -> str:
        """The text of one call. The format has no way to quote its own tags; the caller checks."""


class Qwen3CoderFormat(TextValuesFormat):
    """Qwen3-Coder: XML-like."""

    starts = r"</?tool_call>|<function="
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    _function = re.compile(r"\s*<function=([^<>\s]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\s]+)>")
    _function_end = re.compile(r"\s*</function>")
    _loose_end = re.compile(r"</function>(?:\s*</tool_call>)?|(?=<tool_call>|<think>|</think>)|\Z")
    _structure = re.compile(r"<parameter=|</parameter>|</function>|</?tool_call>")  # must not occur in a value

    def _read_call(self, text: str, start: re.Match[str]) -> Event:
        if start[0] != "<function=":
            return super()._read_call(text, start)
        end = sure(self._loose_end.search(text, start.end())).end()
        return ParseFailure(message=f"the call is not inside <tool_call>. Write {self.form}", span=(start.start(), end))

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

    def _write(self, name: str, texts: Mapping[str, str]) -> str:
        parameters = [f"<parameter={key}>\n{text}\n</parameter>" for key, text in texts.items()]
        return "\n".join([f"<tool_call>\n<function={name}>", *parameters, "</function>\n</tool_call>"])


class Glm45Format(TextValuesFormat):
    """GLM 4.5 and later: the name, then pairs of `<arg_key>` and `<arg_value>`."""

    form = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    starts = r"</?tool_call>|<arg_key>|<arg_value>"
    _name = re.compile(r"\s*([^\s<>{}\[\]\"']+)(?=\s*<)")
    _pair = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
    _structure = re.compile(r"</?arg_key>|</?arg_value>|</?tool_call>")  # must not occur in a value
    _loose_end = re.compile(r"</tool_call>|(?=<tool_call>|<think>|</think>)|\Z")

    def _read_call(self, text: str, start: re.Match[str]) -> Event:
        if start[0] == "<tool_call>":
            return super()._read_call(text, start)
        end = sure(self._loose_end.search(text, start.end())).end()
        return ParseFailure(message=f"the call is not inside <tool_call>. Write {self.form}", span=(start.start(), end))

    def _read_body(self, text: str, start: int) -> tuple[Event | None, int, str]:
        name = self._name.match(text, start)
        if name is None:
            return None, start, f"no tool name at {text[start : start + 20]!r}"
        arguments: dict[str, Any] = {}
        at = name.end()
        while pair := self._pair.match(text, at):
            close = self._structure.search(text, pair.end())
            if close is None or close[0] != "</arg_value>":
                return None, at, f"the value of {pair[1]!r} is not closed with </arg_value>"
            arguments[pair[1].strip()] = text[pair.end() : close.start()]
            at = close.end()
        return ParsedCall(name=name[1], arguments=arguments, span=(0, 0)), at, ""

    def _write(self, name: str, texts: Mapping[str, str]) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>" for key, text in texts.items()]
        return "\n".join([f"<tool_call>{name}", *pairs, "</tool_call>"])
