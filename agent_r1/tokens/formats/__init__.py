"""How models write tool calls. `table.py` lists the formats, `infer.py` finds the format of a chat template."""

from agent_r1.tokens.formats.base import (
    MAX_CALLS,
    Event,
    ParsedCall,
    ParseFailure,
    ScannedFormat,
    ToolCallFormat,
)
from agent_r1.tokens.formats.headed import HeadedFormat
from agent_r1.tokens.formats.retool import RetoolFormat
from agent_r1.tokens.formats.table import (
    AUTO,
    FALLBACK,
    FORMATS,
    detect_format,
    format_name,
    get_format,
    register_format,
)

__all__ = [
    "AUTO",
    "FALLBACK",
    "FORMATS",
    "MAX_CALLS",
    "Event",
    "HeadedFormat",
    "ParseFailure",
    "ParsedCall",
    "RetoolFormat",
    "ScannedFormat",
    "ToolCallFormat",
    "detect_format",
    "format_name",
    "get_format",
    "register_format",
]
