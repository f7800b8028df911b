"""The tool `python` with the table of the row as `rows`, for the preset `python`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent_r1.recipes.tables.table import Table
from agent_r1.tools.base import ToolResult
from agent_r1.tools.python.tool import PythonTool

NUM = r"""import json as _json, re as _re
def num(x):
    if isinstance(x, (int, float)):
        return x
    found = _re.search(r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-\u2212]?\.\d+", str(x or ""), _re.A)
    value = float(found[0].replace(",", "").replace("\u2212", "-")) if found else None
    if value is None or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value.is_integer() else value
"""


class TablePython(PythonTool):
    """Runs a program that finds the table in `rows`, a list of dicts. Each call is a new program."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**({"libraries": []} | settings))
        self.description += " The table is in rows, a list of dicts. num(x) is the first number in a text, or None."

    async def execute(  # type: ignore[override]
        self, args: dict[str, Any], table: Mapping[str, Any], session: str | None = None
    ) -> ToolResult:
        return await super().execute({"code": f"{setup(Table.read(table))}\n{args['code']}"}, session=session)


def setup(table: Table) -> str:
    """One line that defines `rows` and `num`, so that line numbers in tracebacks are off by one at most."""
    rows = json.dumps(table.rows, ensure_ascii=False)
    return f"exec({NUM!r}); rows = [dict(zip({list(table.columns)!r}, row)) for row in _json.loads({rows!r})]"
