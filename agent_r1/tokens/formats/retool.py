"""retool: code between tags, run in one tool."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.tokens.call_format import (
    Event,
    Parsed,
    ParsedCall,
    ParseFailure,
    ToolCallFormat,
    content_without,
)


@dataclass(frozen=True)
class RetoolFormat(ToolCallFormat):
    """ReTool: `<code>` runs in one tool, and its output comes back as `<interpreter>`. Code may be inside thinking."""

    fixed_tool: str = "python"
    argument: str = "code"

    roles = ("user",)
    marked = False  # HTML has <code>, too
    _fenced = re.compile(r"<code>\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*</code>", re.DOTALL)
    _plain = re.compile(r"<code>(.*?)</code>", re.DOTALL)
    form = "<code>\n```python\n...\n```\n</code>"

    def _parse(self, text: str) -> Parsed:
        events: list[Event] = []
        at = 0
        while len(events) <= self.max_calls and (start := text.find("<code>", at)) >= 0:
            found = self._fenced.match(text, start)
            if found and "<code>" in found[1]:  # this block is not closed: the closing tag belongs to a later one
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

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        return self.fixed_tool in tools and self._fenced.search(text) is not None

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = f"<code>\n```python\n{arguments.get(self.argument)}\n```\n</code>"
        if self.parse(written)[1] != [ParsedCall(name=name, arguments=dict(arguments), span=(0, len(written)))]:
            raise ValueError(
                f"retool can only call {self.fixed_tool}({self.argument}: string), got {name}({arguments})"
            )
        return written

    def wrap(self, result: str) -> str:
        return f"<interpreter>\n{result}\n</interpreter>"
