"""retool: code between tags, run by one tool."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.tokens.formats.base import Event, Parsed, ParsedCall, ToolCallFormat, remove_spans


@dataclass
class RetoolFormat(ToolCallFormat):
    """ReTool: one tool runs `<code>`, and its output comes back as `<interpreter>`. Code may be inside thinking."""

    fixed_tool: str = "python"
    argument: str = "code"

    roles = ("user",)
    has_marks = False  # HTML has <code>, too
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
                problem = f"the code is {'empty' if found else 'not closed with </code>'}"
                events.append(self.failure(problem, (start, at), name=self.fixed_tool))
        return remove_spans(text, [event.span for event in events]), events

    def has_call(self, text: str, tools: Collection[str]) -> bool:
        return self.fixed_tool in tools and self._fenced.search(text) is not None

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = f"<code>\n```python\n{arguments.get(self.argument)}\n```\n</code>"
        return self.check_written(written, name, arguments)

    def wrap(self, result: str) -> str:
        return f"<interpreter>\n{result}\n</interpreter>"
