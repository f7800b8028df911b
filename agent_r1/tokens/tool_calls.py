"""Wire formats of tool calls, by name: `FORMATS`. `formats/` has one parser and one writer for each.

A parser reports what it finds as events in text order: a call, or a call that went wrong. A malformed or unclosed call
is never passed over, or the episode would end with it as its answer. What a model writes while it thinks is not a call.
No parser knows which tools exist; `tool_env.py` does.
"""

from __future__ import annotations

from collections.abc import Collection

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tokens.call_format import Event, ParsedCall, ParseFailure, ScannedFormat, ToolCallFormat
from agent_r1.tokens.formats.bare import Llama3JsonFormat, PythonicFormat
from agent_r1.tokens.formats.harmony import HarmonyFormat
from agent_r1.tokens.formats.headed import (
    DeepSeekV3Format,
    DeepSeekV31Format,
    HeadedFormat,
    KimiK2Format,
    MistralFormat,
    MistralV11Format,
)
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.tagged import Glm45Format, HermesFormat, Qwen3CoderFormat

__all__ = [
    "FORMATS",
    "Event",
    "HeadedFormat",
    "ParseFailure",
    "ParsedCall",
    "RetoolFormat",
    "ScannedFormat",
    "ToolCallFormat",
    "detect_format",
    "format_name",
    "named_format",
    "register_format",
]

AUTO = "auto"  # the format that the chat template writes
FALLBACK = "hermes"  # if the template does not show a format

FORMATS: dict[str, ToolCallFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "glm45": Glm45Format(),
    "llama3_json": Llama3JsonFormat(),
    "pythonic": PythonicFormat(),
    "mistral": MistralFormat(),
    "mistral_v11": MistralV11Format(),
    "deepseek_v3": DeepSeekV3Format(),
    "deepseek_v31": DeepSeekV31Format(),
    "kimi_k2": KimiK2Format(),
    "harmony": HarmonyFormat(),
    "retool": RetoolFormat(),
}


def register_format(name: str, tool_format: ToolCallFormat) -> None:
    """Add your own format: it can be set by name, inferred from chat templates, and recognised in other runs."""
    if not isinstance(tool_format, ToolCallFormat):
        raise ConfigError(f"register_format({name!r}, ...) needs a ToolCallFormat instance, got {tool_format!r}")
    known = FORMATS.setdefault(name, tool_format)
    if type(known).__qualname__ != type(tool_format).__qualname__:  # a module may be imported twice
        raise ConfigError(f"the tool-call format {name!r} is taken by {type(known).__qualname__}: choose another name")
    FORMATS[name] = tool_format


def named_format(name: str | ToolCallFormat) -> ToolCallFormat:
    """Return the format of this name, or the given object. A run resolves `auto` from its chat template."""
    if isinstance(name, ToolCallFormat):
        return name
    if not isinstance(name, str) or name not in {AUTO, *FORMATS}:
        raise ConfigError(f"unknown tool_format {name!r}.{did_you_mean(str(name), [AUTO, *FORMATS])}")
    return FORMATS[FALLBACK if name == AUTO else name]


def format_name(tool_format: ToolCallFormat) -> str:
    known = (name for name, each in FORMATS.items() if type(each) is type(tool_format))
    return next(known, type(tool_format).__name__)


def detect_format(text: str, tools: Collection[str]) -> str | None:
    """The format in which `text` calls one of `tools`, or tries to call something; None for an answer.

    JSON, lists and code are answers unless they are a whole call of one of `tools`.
    """
    ordered = sorted(FORMATS.items(), key=lambda item: not item[1].marked)  # bare JSON may be part of a marked call
    called = (name for name, each in ordered if each.has_call(text, tools))
    tried = (name for name, each in ordered if each.marked and each.parse(text)[1])
    return next(called, None) or next(tried, None)
