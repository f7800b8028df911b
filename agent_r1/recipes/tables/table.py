"""A table as the agent sees it: columns with names that SQL and Python accept, numbers where a column holds only those.

Headers of Wikipedia tables repeat, are empty, hold line breaks, or are words of SQL. `make_table` gives every column a
short name of letters, digits and underscores, and puts a column `row` (1, 2, ...) first, because questions ask for what
comes first, last or next.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any

from agent_r1.errors import DataError
from agent_r1.recipes.tables.answers import normalized, read_date, without_accents

Cell = str | int | float | None

NAME = "t"  # name of the table in SQL
ROW = "row"  # the column that counts the rows
MAX_NAME_CHARS = 30
SHOWN_ROWS = 3
MAX_CELL_CHARS = 40  # characters of a cell in a description
MAX_DESCRIPTION_CHARS = 1200

_NUMBER = re.compile(r"[-\u2212]?(?:(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,14})(?:\.\d{1,9})?|\.\d{1,9})", re.ASCII)
_FIRST_NUMBER = re.compile(r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?", re.ASCII)
_NOTHING = frozenset({"", "-", "\u2013", "\u2014", "\u2212", "n/a", "?"})


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[str, ...]  # each once; the first is `row`
    rows: tuple[tuple[Cell, ...], ...]

    @staticmethod
    def read(value: Mapping[str, Any]) -> Table:
        """The inverse of `plain`."""
        return Table(columns=tuple(value["columns"]), rows=tuple(map(tuple, value["rows"])))

    @property
    def plain(self) -> dict[str, Any]:
        """The table as JSON, for `env_kwargs` of a row."""
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}

    def values(self, column: str) -> list[Cell]:
        place = self.columns.index(column)
        return [row[place] for row in self.rows]

    @cached_property
    def number_columns(self) -> frozenset[str]:
        """Columns in which no cell is a text."""
        return self._columns_where(lambda cell: not isinstance(cell, str), share=1.0)

    @cached_property
    def numeric_columns(self) -> frozenset[str]:
        """Columns most of whose cells are numbers, or begin with one or with a currency."""
        return self._columns_where(lambda cell: first_number(cell[:4] if isinstance(cell, str) else cell) is not None)

    @cached_property
    def dated_columns(self) -> frozenset[str]:
        """Columns most of whose cells are dates."""
        return self._columns_where(lambda cell: isinstance(cell, str) and read_date(normalized(cell)) is not None)

    def _columns_where(self, holds: Callable[[Cell], bool], share: float = 0.5) -> frozenset[str]:
        """Columns in which `holds` is true for more than this share of the cells; with 1.0, for all of them."""
        found = set()
        for column in self.columns:
            said = [holds(cell) for cell in self.values(column) if cell is not None]
            if sum(said) > share * len(said) or (share == 1.0 and all(said)):
                found.add(column)
        return frozenset(found)

    def describe(self) -> str:
        """The columns and the first rows, in at most `MAX_DESCRIPTION_CHARS` characters."""
        room = MAX_DESCRIPTION_CHARS
        lines = [f"Table {NAME} has {len(self.rows)} rows. Its columns, and its first rows:"]
        lines.append(_shortened(" | ".join(self.columns), room - len(lines[0]) - 1))
        used = sum(len(line) + 1 for line in lines)
        for row in self.rows[:SHOWN_ROWS]:
            line = " | ".join(_shortened(show(cell), MAX_CELL_CHARS) for cell in row)
            if used + len(line) > room:
                break
            lines.append(line)
            used += len(line) + 1
        return "\n".join(lines)


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Name the columns, and read numbers in columns of numbers. Raises DataError for rows of other lengths."""
    for index, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(f"row {index + 1} of a table has {len(row)} cells, its header has {len(header)}")
    columns = [[" ".join(row[place].split()) for row in rows] for place in range(len(header))]
    typed = [_numbers(column) or [cell or None for cell in column] for column in columns]
    cells = zip(range(1, len(rows) + 1), *typed, strict=True)
    return Table(columns=tuple(column_names(header)), rows=tuple(cells))


def column_names(header: Sequence[str]) -> list[str]:
    """`row`, then a name for each header: `Avg. Attendance` becomes `avg_attendance`."""
    names = [ROW]
    for place, text in enumerate(header, 1):
        plain = without_accents(text.replace("#", " number ").replace("%", " percent ")).lower()
        name = "_".join(re.findall(r"[a-z0-9]+", plain.replace("'", "")))[:MAX_NAME_CHARS].strip("_")
        name = name or f"column_{place}"
        name = f"c_{name}" if name[0].isdigit() or not _is_free(name) else name
        names.append(next(each for each in _numbered(name) if each not in names))
    return names


def _numbered(name: str) -> Any:
    yield name
    yield from (f"{name}_{number}" for number in count(2))


@cache
def _is_free(name: str) -> bool:
    """Whether SQLite reads the name, without quotation marks, as a column and as nothing else."""
    if name in ("rowid", "oid", "num", "iso") or name.startswith("sqlite_"):
        return False
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(f"CREATE TABLE {NAME} ({name}, other)")
            connection.execute(f"SELECT {name}, count(*) FROM {NAME} WHERE {name} > 1 GROUP BY {name} ORDER BY {name}")
        except sqlite3.Error:
            return False
    return True


def _numbers(column: Sequence[str]) -> list[Cell] | None:
    """Return the column as numbers, with None for empty cells; None if a cell is neither."""
    cells = [read_cell(cell) for cell in column]
    is_number = any(cell is not None for cell in cells) and not any(isinstance(cell, str) for cell in cells)
    return cells if is_number else None


def read_cell(text: str) -> Cell:
    """Return a number if the text is one, None if it stands for no value. `007` and `1e5` are texts."""
    if text.lower() in _NOTHING:
        return None
    if not _NUMBER.fullmatch(text):
        return text
    plain = text.replace(",", "").replace("\u2212", "-")
    return float(plain) if "." in plain else int(plain)


def first_number(value: Any) -> float | None:
    """The first number in a cell: 1200 of `$1,200 (est.)`."""
    if isinstance(value, int | float):
        return value
    found = next((match[0] for match in _FIRST_NUMBER.finditer(str(value or "")) if match[0].strip("-\u2212")), None)
    if found is None:
        return None
    number = float(found.replace(",", "").replace("\u2212", "-"))
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def show(cell: Cell | bytes) -> str:
    """A value as text, in one line."""
    if cell is None:
        return "NULL"
    if isinstance(cell, bytes):
        return f"x'{cell.hex()}'"
    return f"{cell:.12g}" if isinstance(cell, float) else " ".join(str(cell).split())


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
