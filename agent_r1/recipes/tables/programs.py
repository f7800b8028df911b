"""Small programs over a table: filter its rows, then look something up, count, compare or compute.

A program is written as SQL for the tool `sql`, and as Python for the sandbox. The synthesiser (`synthesis.py`) searches
for programs that answer a question, and the synthetic task is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent_r1.recipes.tables.answers import SEPARATOR
from agent_r1.recipes.tables.sql import Database, QueryError
from agent_r1.recipes.tables.table import ROW, Cell, Table, show

MAX_ITEMS = 10  # items of an answer; more are hardly ever meant


class Kind(StrEnum):
    """The operation on the rows that meet the conditions."""

    VALUES = "values"  # the target of each
    COUNT = "count"
    DISTINCT = "distinct"  # how many different targets
    SUM = "sum"  # sum of the target; the next three also aggregate the target
    AVERAGE = "average"
    MAX = "max"
    MIN = "min"
    FIRST = "first"  # the target of the row with the smallest `by`
    LAST = "last"  # the target of the row with the largest `by`
    COMMON = "common"  # the most frequent target
    RARE = "rare"  # the least frequent target
    NEXT = "next"  # the target of the row below the first that fits
    PREVIOUS = "previous"
    DIFFERENCE = "difference"  # difference of `by` between the rows of two conditions
    SAME = "same"  # other targets of rows that have the same `by` as the row that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A text that a cell contains, or a comparison of its number."""

    column: str
    operator: str  # contains, or one of < <= = >= >
    value: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    kind: Kind
    target: str = ROW
    by: str = ROW
    conditions: tuple[Condition, ...] = ()
    either: bool = False  # rows that meet any of the conditions, instead of all


def execute(program: Program, table: Table, database: Database) -> list[str]:
    """The items of the answer: the cells of the result, each once. Empty if there is none, or too many."""
    try:
        found = database.select(as_sql(program, table), max_rows=MAX_ITEMS)
    except QueryError:
        return []
    cells = [show(cell) for row in found.rows for cell in row if cell is not None]
    usable = not found.is_cut and not any(SEPARATOR in cell for cell in cells)
    return list(dict.fromkeys(cells)) if usable else []


# SQL

SQL = {
    Kind.VALUES: "SELECT {target} FROM t{where}",
    Kind.COUNT: "SELECT count(*) FROM t{where}",
    Kind.DISTINCT: "SELECT count(DISTINCT {target}) FROM t{where}",
    Kind.SUM: "SELECT sum({number}) FROM t{where}",
    Kind.AVERAGE: "SELECT avg({number}) FROM t{where}",
    Kind.MAX: "SELECT max({number}) FROM t{where}",
    Kind.MIN: "SELECT min({number}) FROM t{where}",
    Kind.FIRST: "SELECT {target} FROM t{where} ORDER BY {order}{nulls} LIMIT 1",
    Kind.LAST: "SELECT {target} FROM t{where} ORDER BY {order} DESC LIMIT 1",
    Kind.COMMON: "SELECT {target} FROM t{where} GROUP BY {target} ORDER BY count(*) DESC LIMIT 1",
    Kind.RARE: "SELECT {target} FROM t{where} GROUP BY {target} ORDER BY count(*) LIMIT 1",
    Kind.NEXT: "SELECT {target} FROM t WHERE row = (SELECT row FROM t{where}) + 1",
    Kind.PREVIOUS: "SELECT {target} FROM t WHERE row = (SELECT row FROM t{where}) - 1",
    Kind.DIFFERENCE: "SELECT abs((SELECT {measure} FROM t WHERE {first}) - (SELECT {measure} FROM t WHERE {last}))",
    Kind.SAME: "SELECT {target} FROM t WHERE {by} = (SELECT {by} FROM t{where}) AND NOT ({any})",
}


def as_sql(program: Program, table: Table) -> str:
    tests = [_test(condition, table) for condition in program.conditions]
    order = _orderable(program.by, table)
    has_nulls = order != program.by or None in table.values(program.by)
    return SQL[program.kind].format(
        target=program.target,
        number=_number(program.target, table),
        by=program.by,
        measure=_number(program.by, table),
        order=order,
        nulls=" NULLS LAST" if has_nulls else "",
        where=f" WHERE {(' OR ' if program.either else ' AND ').join(tests)}" if tests else "",
        any=" OR ".join(tests),
        first=tests[0] if tests else "",
        last=tests[-1] if tests else "",
    )


def _test(condition: Condition, table: Table) -> str:
    column, operator, value = condition.column, condition.operator, condition.value
    if operator == "contains":
        return f"{column} LIKE {_quoted(f'%{value}%')}"
    if isinstance(value, str):
        return f"{_orderable(column, table)} {operator} {_quoted(value)}"
    return f"{_number(column, table)} {operator} {show(value)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _number(column: str, table: Table) -> str:
    return column if column in table.number_columns else f"num({column})"


def _orderable(column: str, table: Table) -> str:
    return f"iso({column})" if orders_dates(table, column) else _number(column, table)


def orders_dates(table: Table, column: str) -> bool:
    return column in table.dated_columns - table.number_columns


# Python, for the sandbox: `rows` is a list of dicts, and `num` reads a number as in SQL

PYTHON = {
    Kind.VALUES: "for r in {found}:\n    print(r[{target!r}])",
    Kind.COUNT: "print(len({found}))",
    Kind.DISTINCT: "print(len({{r[{target!r}] for r in {found}}} - {{None}}))",
    Kind.SUM: "print(sum({numbers}))",
    Kind.AVERAGE: "found = {numbers}\nprint(sum(found) / len(found))",
    Kind.MAX: "print(max({numbers}))",
    Kind.MIN: "print(min({numbers}))",
    Kind.FIRST: "print(min({measured}, key=lambda r: num(r[{by!r}]))[{target!r}])",
    Kind.LAST: "print(max({measured}, key=lambda r: num(r[{by!r}]))[{target!r}])",
    Kind.COMMON: "found = [r[{target!r}] for r in {found}]\nprint(max(sorted(set(found), key=str), key=found.count))",
    Kind.RARE: "found = [r[{target!r}] for r in {found}]\nprint(min(sorted(set(found), key=str), key=found.count))",
    Kind.NEXT: "place = rows.index({found}[0])\nprint(rows[place + 1][{target!r}])",
    Kind.PREVIOUS: "place = rows.index({found}[0])\nprint(rows[place - 1][{target!r}])",
    Kind.DIFFERENCE: "one = [r for r in rows if {first}][0]\nother = [r for r in rows if {last}][0]\n"
    "print(abs(num(one[{by!r}]) - num(other[{by!r}])))",
    Kind.SAME: "found = {found}[0]\nfor r in rows:\n"
    "    if r[{by!r}] == found[{by!r}] and not ({any}):\n        print(r[{target!r}])",
}


def as_python(program: Program, table: Table) -> str | None:
    """The program in Python; None if it orders dates, for which the sandbox has no function."""
    ordered = [each.column for each in program.conditions if each.operator != "contains"]
    ordered += [program.by] if program.kind in (Kind.FIRST, Kind.LAST) else []
    if any(orders_dates(table, column) for column in ordered):
        return None
    tests = [_python_test(condition) for condition in program.conditions]
    among = f" if {(' or ' if program.either else ' and ').join(tests)}" if tests else ""
    and_measured = f" if num(r[{program.by!r}]) is not None" if program.by != ROW else ""
    return PYTHON[program.kind].format(
        target=program.target,
        by=program.by,
        found=f"[r for r in rows{among}]",
        measured=f"[r for r in rows{among}{and_measured}]",
        numbers=f"[num(r[{program.target!r}]) for r in rows{among} if num(r[{program.target!r}]) is not None]",
        any=" or ".join(tests),
        first=tests[0] if tests else "",
        last=tests[-1] if tests else "",
    )


def _python_test(condition: Condition) -> str:
    cell, value = f"r[{condition.column!r}]", condition.value
    if condition.operator == "contains":
        return f"{str(value).lower()!r} in str({cell}).lower()"
    if condition.operator == "=":
        return f"num({cell}) == {show(value)}"
    return f"(num({cell}) or 0) {condition.operator} {show(value)}"


def answer_text(items: Sequence[str]) -> str:
    return f"<answer>{f' {SEPARATOR} '.join(items)}</answer>"
