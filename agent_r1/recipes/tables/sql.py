"""The tool `sql`: SELECT queries over the table of an episode, in SQLite.

Every episode has its own database in memory, made at its first call. An authorizer lets queries read that table and
call harmless functions, and refuses everything else: writes, ATTACH, pragmas, extensions, recursion. A query that takes
too long is interrupted. Long results are cut, and the model is told so. A query that SQLite refuses gets an error that
the model reads; it never fails the episode.

Two functions read cells that hold more than a number or a date: `num('$1,200 (est.)')` is 1200, and
`iso('June 20, 1990')` is '1990-06-20', so that dates can be ordered.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.guard import call
from agent_r1.recipes.tables.answers import normalized, read_date
from agent_r1.recipes.tables.table import NAME, Cell, Table, first_number, show
from agent_r1.tools.base import BaseTool, ToolError, ToolResult

# Not printf, whose widths take any amount of time, and not random, so that queries can be repeated.
FUNCTION_NAMES = """
abs avg ceil char coalesce concat count cume_dist date datetime dense_rank first_value floor glob group_concat hex
ifnull iif instr iso julianday lag last_value lead length like lower ltrim max min mod nth_value ntile nullif num
percent_rank
pow power quote rank replace round row_number rtrim sign sqrt strftime substr substring sum time total trim typeof
unicode upper
"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
# SQLite cannot interrupt the preparation of a query, in which nested common table expressions grow exponentially. This
# limit ends it within seconds. It applies to everything that SQLite does in this process.
MAX_HEAP_BYTES = 256 * 2**20
LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4000,
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,  # characters of one text, so that no function can fill the memory
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
STEPS_PER_LOOK = 50  # SQLite instructions between checks of the clock; one of them may take a tenth of a second
MAX_RESULT_CHARS = 1_000_000  # characters that are read, because Python's memory for them is beyond the limits above
FAULTS = (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError)  # errors of a query; ValueError: invalid characters
ADVICE = {
    "to use function": "this function is not available",
    "not authorized": "only SELECT over the table t is possible",
    "authorization denied": "only SELECT over the table t is possible",
    "prohibited": "only SELECT over the table t is possible",
    "no such table": "the only table is t",
    "one statement": "send one SELECT at a time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    is_cut: bool  # there are more rows


class QueryError(Exception):
    """The query is wrong, forbidden or too slow. The text is for the model."""


class Database:
    """The table of one episode. May be used from any thread, one query at a time."""

    def __init__(self, table: Table, *, seconds: float) -> None:
        self._columns = table.columns
        self._seconds = seconds
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        places = ", ".join("?" for _ in table.columns)
        self._connection.execute(f"CREATE TABLE {NAME} ({', '.join(table.columns)})")
        self._connection.executemany(f"INSERT INTO {NAME} VALUES ({places})", table.rows)
        self._connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP_BYTES}")
        self._connection.execute("PRAGMA query_only = on")
        self._connection.execute("PRAGMA temp_store = memory")
        self._connection.create_function("num", 1, first_number, deterministic=True)
        self._connection.create_function("iso", 1, iso_date, deterministic=True)
        for limit, value in LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_progress_handler(self._is_late, STEPS_PER_LOOK)
        self._connection.set_authorizer(authorize)

    def select(self, query: str, *, max_rows: int) -> Found:
        """Run one query. Raises QueryError."""
        with self._lock:
            self._deadline = time.monotonic() + self._seconds
            try:
                with closing(self._connection.cursor()) as cursor:
                    cursor.execute(query)
                    if cursor.description is None:
                        raise QueryError("there is no query. Write SELECT ...")
                    rows = _read(cursor, max_rows + 1)
                    names = tuple(str(column[0]) for column in cursor.description)
            except FAULTS as error:
                raise QueryError(self._explain(error)) from error
        return Found(columns=names, rows=rows[:max_rows], is_cut=len(rows) > max_rows)

    def close(self) -> None:
        self._connection.interrupt()
        with self._lock:
            self._connection.close()

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return "the query needs too much memory. Read fewer rows, or write a simpler query"
        text = str(error)
        if text == "interrupted":
            return f"the query took longer than {self._seconds:g} s and was stopped. Read fewer rows"
        if "no such column" in text:
            return f"{text}. Columns: {', '.join(self._columns)}"
        advice = next((advice for part, advice in ADVICE.items() if part in text), None)
        return text if advice is None else f"{text}: {advice}"


def _read(cursor: sqlite3.Cursor, max_rows: int) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    size = 0
    while len(rows) < max_rows and (row := cursor.fetchone()) is not None:
        size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if size > MAX_RESULT_CHARS:
            raise QueryError(f"the result has more than {MAX_RESULT_CHARS:,} characters. Select fewer columns or rows")
        rows.append(row)
    return rows


def authorize(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
    """SQLite's authorizer: a query may read, and call harmless functions."""
    is_harmless = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS
    allowed = is_harmless or action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def iso_date(value: Any) -> str | None:
    """Format as YYYY-MM-DD so that dates sort; missing parts are 00. None if the value is not a date."""
    if isinstance(value, int):
        return f"{value:04d}-00-00"
    text = normalized(str(value or "")[:200])
    date = read_date(text)
    if date is None:
        return f"{text}-00-00" if re.fullmatch(r"\d{4}", text) else None
    return "-".join(f"{part or 0:0{width}d}" for part, width in zip(date, (4, 2, 2), strict=True))


class SqlTool(BaseTool):
    """Runs a query on the row's table."""

    name = "sql"
    timeout = 60.0  # the query itself is interrupted much earlier
    parameters: dict[str, Any] = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"query": {"type": "string", "description": "One SELECT over the table t, for SQLite."}},
        "required": ["query"],
    }

    def __init__(
        self, *, seconds: float = 1.0, max_rows: int = 20, max_cell_chars: int = 200, max_chars: int = 1500
    ) -> None:
        given = {"seconds": seconds, "max_rows": max_rows, "max_cell_chars": max_cell_chars, "max_chars": max_chars}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
                raise ConfigError(f"{key} of the tool sql must be a positive number, got {value!r}")
        self._seconds = seconds
        self._max_rows, self._max_cell_chars, self._max_chars = int(max_rows), int(max_cell_chars), int(max_chars)
        self._database: Database | None = None
        self.description = (
            "Run a SELECT query on the table t in SQLite and read the result. num(x) is the first number in a text, "
            "iso(x) a date as year-month-day."
        )

    def for_episode(self, episode: str) -> SqlTool:
        return copy(self)  # the copy has no database yet

    async def execute(self, args: dict[str, Any], table: Mapping[str, Any]) -> ToolResult:  # type: ignore[override]
        found = await call(self._select, args["query"], table)  # in a thread: it may take a second
        return ToolResult(self.show(found), info={"rows": len(found.rows), "is_cut": found.is_cut})

    async def end_episode(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _select(self, query: str, table: Mapping[str, Any]) -> Found:
        database = self._database
        if database is None:
            database = self._database = Database(Table.read(table), seconds=self._seconds)
        try:
            return database.select(query, max_rows=self._max_rows)
        except QueryError as error:
            raise ToolError(str(error)) from error

    def show(self, found: Found) -> str:
        """The result as the model reads it: names of columns, rows, and what was left out."""
        lines = [" | ".join(map(self._cell, row)) for row in (found.columns, *found.rows)]
        kept, size = [], 0
        for line in lines:
            size += len(line) + 1
            if size > self._max_chars:
                break
            kept.append(line)
        num_rows = max(0, len(kept) - 1)
        if num_rows < len(found.rows) or found.is_cut:
            kept.append(f"[only the first {num_rows} rows are shown]")
        return "\n".join(kept if found.rows else [*kept, "[no rows]"])

    def _cell(self, cell: Cell) -> str:
        text = show(cell)
        return text if len(text) <= self._max_cell_chars else f"{text[: self._max_cell_chars]} ..."
