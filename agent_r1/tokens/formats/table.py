"""All tool-call formats by name: `FORMATS`.

A parser reports what it finds as events in text order: a call, or a call that went wrong. A malformed or unclosed call
is never skipped, or the episode would end with it as the answer. Text inside thinking is not a call. Parsers do not
know which tools exist; `ToolEnv` does.
"""

from __future__ import annotations

from collections.abc import Collection

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tokens.formats.bare import Llama3JsonFormat, PythonicFormat
from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.tokens.formats.harmony import HarmonyFormat
from agent_r1.tokens.formats.headed import CallListFormat, HeadedFormat
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.tagged import HermesFormat, TextValuesFormat

AUTO = "auto"  # the format that the chat template writes
FALLBACK = "hermes"  # used if the template does not show a format

FORMATS: dict[str, ToolCallFormat] = {
    "hermes": HermesFormat(),  # Qwen's, too
    "qwen3_coder": TextValuesFormat(
        form="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
        starts=r"</?tool_call>|<function=",
        name=r"\s*<function=([^<>\s]+)>",
        key=r"\s*<parameter=([^<>\s]+)>",
        value_end="</parameter>",
        end=r"\s*</function>",
        tags=r"<parameter=|</parameter>|</function>|</?tool_call>",
        write="<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>",
        write_pair="<parameter={key}>\n{value}\n</parameter>\n",
        strip_newlines=True,
    ),
    "glm45": TextValuesFormat(
        form="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
        starts=r"</?tool_call>|<arg_key>|<arg_value>",
        name=r"\s*([^\s<>{}\[\]\"']+)(?=\s*<)",
        key=r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>",
        value_end="</arg_value>",
        tags=r"</?arg_key>|</?arg_value>|</?tool_call>",
        write="<tool_call>{name}\n{pairs}</tool_call>",
        write_pair="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "llama3_json": Llama3JsonFormat(),
    "pythonic": PythonicFormat(),
    "mistral": CallListFormat(  # up to tokenizer version 10
        form='[TOOL_CALLS] [{"name": "NAME", "arguments": {...}}]',
        starts=r"\[TOOL_CALLS\]|\[ARGS\](?=\s*\{)",
        opens=r"\[TOOL_CALLS\]",
        head="(?!)",
        as_tool_calls=True,
    ),
    "mistral_v11": HeadedFormat(  # tokenizer version 11 and later
        form="[TOOL_CALLS]NAME[ARGS]{...}",
        starts=r"\[TOOL_CALLS\]|\[ARGS\](?=\s*\{)",  # help texts of command lines contain [ARGS], too
        opens=r"\[TOOL_CALLS\]",
        head=r"\s*(?P<name>[^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]+)\s*)?(?:\[ARGS\])?",
        as_tool_calls=True,
    ),
    "deepseek_v3": HeadedFormat(  # V3 and R1: the arguments in a JSON fence
        form=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        starts=r"<｜tool▁(?:calls?▁(?:begin|end)|sep)｜>",
        opens=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
        head=r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[^\s<>`{}]+)\s*```(?:json)?",
        tail=r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        as_tool_calls=True,
        arguments_as_text=True,
    ),
    "deepseek_v31": HeadedFormat(
        form="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        starts=r"<｜tool▁(?:calls?▁(?:begin|end)|sep)｜>",
        opens=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
        head=r"\s*(?P<name>[^\s<>`{}]+)\s*<｜tool▁sep｜>",
        tail=r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        as_tool_calls=True,
        arguments_as_text=True,
    ),
    "kimi_k2": HeadedFormat(  # the name is inside the call's id, which the result repeats
        form=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
        starts=r"<\|tool_call(?:s_section)?_(?:begin|end)\|>|<\|tool_call_argument_begin\|>",
        opens=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        head=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        tail=r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        as_tool_calls=True,
    ),
    "harmony": HarmonyFormat(),  # gpt-oss
    "retool": RetoolFormat(),
}


def register_format(name: str, tool_format: ToolCallFormat) -> None:
    """Add your own format: it can be set by name, inferred from chat templates, and recognised in other runs."""
    if not isinstance(tool_format, ToolCallFormat):
        raise ConfigError(f"register_format({name!r}, ...) needs a ToolCallFormat instance, got {tool_format!r}")
    known = FORMATS.get(name, tool_format)
    if known.form != tool_format.form:  # a module that is imported twice registers the same format again
        raise ConfigError(f"the tool-call format {name!r} is taken by {known.form!r}: choose another name")
    FORMATS[name] = tool_format


def get_format(name: str | ToolCallFormat) -> ToolCallFormat:
    """Return the format of this name, or the given object. `auto` is hermes here; a run resolves it first."""
    if isinstance(name, ToolCallFormat):
        return name
    if not isinstance(name, str) or name not in {AUTO, *FORMATS}:
        raise ConfigError(f"unknown tool_format {name!r}.{did_you_mean(str(name), [AUTO, *FORMATS])}")
    return FORMATS[FALLBACK if name == AUTO else name]


def format_name(tool_format: ToolCallFormat) -> str:
    known = (name for name, each in FORMATS.items() if each.form == tool_format.form)
    return next(known, type(tool_format).__name__)


def detect_format(text: str, tools: Collection[str]) -> str | None:
    """The format in which `text` calls one of `tools`, or tries to call something; None for an answer.

    JSON, lists and code are answers unless they are a complete call of one of `tools`.
    """
    ordered = sorted(FORMATS.items(), key=lambda item: not item[1].has_marks)  # bare JSON may be part of a marked call
    called = (name for name, each in ordered if each.has_call(text, tools))
    tried = (name for name, each in ordered if each.has_marks and each.parse(text)[1])
    return next(called, None) or next(tried, None)
