"""The tools of the recipe `tables`: what a query may do, what the model reads, and how tables become columns."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.envs.check import check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.flows.replay import replay
from agent_r1.recipes.tables import sql
from agent_r1.recipes.tables.sandbox import setup
from agent_r1.recipes.tables.sql import Database, QueryError, SqlTool, iso_date
from agent_r1.recipes.tables.table import (
    MAX_DESCRIPTION_CHARS,
    MAX_NAME_CHARS,
    Table,
    column_names,
    first_number,
    make_table,
    read_cell,
)
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import StopReason, TaskRow, Trajectory

TABLE = make_table(
    ["Year", "Team", "Avg. Attendance"],
    [["2001", "Reds", "7,169"], ["2002", "Blues", "6,260"], ["2003", "Reds", "5,871"]],
)
LARGE = make_table(["N", "Text"], [[str(n), "word " * 10] for n in range(1000)])

# Tables


def test_headers_become_names_that_need_no_quotation_marks() -> None:
    header = [
        "Year",
        "Year",
        "",
        "Order",
        "Avg. Attendance",
        "#",
        "2nd\nleg",
        "Row",
        "rowid",
        "%",
        "Driver's car",
        "Año",
    ]
    assert column_names(header) == [
        *("row", "year", "year_2", "column_3", "c_order", "avg_attendance", "number", "c_2nd_leg", "row_2", "c_rowid"),
        *("percent", "drivers_car", "ano"),
    ]


@given(st.lists(st.text(max_size=50), min_size=1, max_size=12))
def test_any_header_gives_columns_that_sqlite_reads_as_they_are(header: list[str]) -> None:
    names = column_names(header)
    assert len(set(names)) == len(header) + 1
    assert max(map(len, names)) <= MAX_NAME_CHARS + 5
    table = make_table(header, [[f"v{place}" for place in range(len(header))]])
    database = Database(table, seconds=5)
    found = database.select(f"SELECT {', '.join(names)} FROM t", max_rows=2)
    database.close()
    assert found.rows == [(1, *(f"v{place}" for place in range(len(header))))]


def test_a_column_is_of_numbers_only_if_all_its_cells_are() -> None:
    rows = [["7,169", "1", "007", "5"], ["-", "x", "1", ""], ["1.50", "3", "2", "\u22124"]]
    table = make_table(["a", "b", "c", "d"], rows)
    assert table.rows == ((1, 7169, "1", "007", 5), (2, None, "x", "1", None), (3, 1.5, "3", "2", -4))
    assert table.number_columns == {"row", "a", "d"}


@pytest.mark.parametrize(
    ("text", "cell"),
    [("0", 0), ("0.5", 0.5), (".5", 0.5), ("12,34", "12,34"), ("1e5", "1e5"), ("N/A", None), ("$5", "$5"), ("-3", -3)],
)
def test_a_cell_is_a_number_only_if_it_is_nothing_else(text: str, cell: object) -> None:
    assert read_cell(text) == cell


def test_a_description_shows_columns_and_first_rows_within_its_limit() -> None:
    assert TABLE.describe().splitlines() == [
        "Table t has 3 rows. Its columns, and its first rows:",
        "row | year | team | avg_attendance",
        "1 | 2001 | Reds | 7169",
        "2 | 2002 | Blues | 6260",
        "3 | 2003 | Reds | 5871",
    ]
    wide = make_table([f"column number {n}" for n in range(100)], [["x" * 500] * 100] * 5)
    assert len(wide.describe()) <= MAX_DESCRIPTION_CHARS
    long = make_table(["a", "b"], [["x" * 500, "line\nbreak"]])
    assert long.describe().splitlines()[-1] == f"1 | {'x' * 36} ... | line break"


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="row 2 of a table has 1 cells, its header has 2"):
        make_table(["a", "b"], [["1", "2"], ["3"]])


def test_a_table_survives_as_json() -> None:
    assert Table.read(TABLE.plain) == TABLE


# Queries


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    opened = Database(TABLE, seconds=5)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("SELECT sum(avg_attendance) FROM t WHERE team LIKE '%reds%'", [(13040,)]),
        ("SELECT team, count(*) FROM t GROUP BY team ORDER BY 2 DESC", [("Reds", 2), ("Blues", 1)]),
        ("WITH best AS (SELECT max(year) y FROM t) SELECT team FROM t, best WHERE year = y", [("Reds",)]),
        ("SELECT team FROM t WHERE row = (SELECT row FROM t WHERE team = 'Blues') + 1", [("Reds",)]),
        ("SELECT lag(year) OVER (ORDER BY row) FROM t LIMIT 2", [(None,), (2001,)]),
        ("SELECT num('$1,200 (est.)'), iso('June 20, 1990'), num(NULL)", [(1200, "1990-06-20", None)]),
        ("SELECT name FROM sqlite_master", [("t",)]),
    ],
)
def test_queries_read_the_table(database: Database, query: str, rows: list[Any]) -> None:
    assert database.select(query, max_rows=10).rows == rows


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO t VALUES (4, 2004, 'x', 1)",
        "UPDATE t SET year = 1",
        "DELETE FROM t",
        "DROP TABLE t",
        "CREATE TABLE u (a)",
        "CREATE TEMP VIEW v AS SELECT 1",
        "ALTER TABLE t RENAME TO u",
        "ATTACH ':memory:' AS other",
        "VACUUM",
        "BEGIN",
        "SAVEPOINT a",
        "PRAGMA table_info(t)",
        "PRAGMA query_only = off",
        "SELECT * FROM pragma_table_info('t')",
        "SELECT load_extension('x')",
        "SELECT randomblob(100)",
        "SELECT printf('%.*c', 100000000, 'x')",
        "SELECT * FROM json_each('[1]')",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT 1; DROP TABLE t",
        "SELECT nothing FROM t",
        "SELECT * FROM other",
        "SELECT",
        "",
        "-- a comment",
        "SELECT '\x00'",
        "SELECT '\ud800'",
        "SELECT CAST(x'ff' AS TEXT)",
        f"SELECT {'(' * 500}1{')' * 500}",
        f"SELECT '{'x' * 5000}'",
        "SELECT replace(hex(replace(hex('abcdefgh'), '6', 'zzzzzzzz')), 'A', '" + "y" * 3000 + "')",
    ],
)
def test_everything_else_is_an_error_for_the_model_and_changes_nothing(database: Database, query: str) -> None:
    with pytest.raises(QueryError, match=r"\w"):
        database.select(query, max_rows=10)
    assert len(database.select("SELECT * FROM t", max_rows=10).rows) == 3


def test_nothing_is_written_to_files(tmp_path: Path, database: Database) -> None:
    for query in (f"ATTACH '{tmp_path / 'a.db'}' AS a", f"VACUUM INTO '{tmp_path / 'b.db'}'"):
        with pytest.raises(QueryError, match="only SELECT"):
            database.select(query, max_rows=1)
    assert list(tmp_path.iterdir()) == []


def test_errors_say_what_to_do(database: Database) -> None:
    for query, advice in (
        ("SELECT yeer FROM t", "Columns: row, year, team, avg_attendance"),
        ("SELECT * FROM games", "the only table is t"),
        ("DELETE FROM t", "only SELECT over the table t is possible"),
        ("SELECT 1; SELECT 2", "send one SELECT at a time"),
        ("SELECT random()", "this function is not available"),
    ):
        with pytest.raises(QueryError, match=advice):
            database.select(query, max_rows=1)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM t a, t b, t c, t d",
        "SELECT a.text FROM t a, t b, t c ORDER BY a.text || b.text || c.n",
        "SELECT count(DISTINCT a.n || b.n || c.n) FROM t a, t b, t c",
    ],
)
def test_a_query_that_takes_too_long_is_stopped_and_the_next_one_runs(query: str) -> None:
    large = Database(LARGE, seconds=0.05)
    with pytest.raises(QueryError, match=r"longer than 0.05 s and was stopped"):
        large.select(query, max_rows=10)
    assert large.select("SELECT count(*) FROM t", max_rows=1).rows == [(1000,)]
    large.close()


def test_of_a_million_rows_only_the_first_are_read() -> None:
    large = Database(LARGE, seconds=5)
    found = large.select("SELECT a.n, b.n FROM t a, t b", max_rows=3)  # a million rows
    assert found.is_cut
    assert found.rows == [(0, 0), (0, 1), (0, 2)]
    large.close()


def test_a_result_of_many_long_texts_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    monkeypatch.setattr(sql, "first_number", lambda value: read.append(value))
    large = Database(LARGE, seconds=60)
    long = f"SELECT replace(hex('{'a' * 100}'), '6', '{'a' * 400}') s"
    with pytest.raises(QueryError, match="more than 1,000,000 characters"):
        large.select(f"WITH long AS ({long}) SELECT num(n), {', '.join('s' * 100)} FROM long, t", max_rows=20)
    assert len(read) <= 2  # rows; each has four million characters
    large.close()


def test_slow_functions_cannot_delay_the_end_of_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    monkeypatch.setattr(sql, "first_number", lambda value: calls.append(value))
    large = Database(LARGE, seconds=1e-9)
    with pytest.raises(QueryError, match="was stopped"):
        large.select("SELECT sum(num(n)) FROM t", max_rows=1)
    assert len(calls) <= 20
    large.close()


def test_nested_expressions_that_double_at_every_level_run_out_of_memory() -> None:
    levels = ", ".join(f"a{n} AS (SELECT x FROM a{n - 1} UNION ALL SELECT x FROM a{n - 1})" for n in range(1, 40))
    bounded = Database(TABLE, seconds=5)
    with pytest.raises(QueryError, match="too much memory"):
        bounded.select(f"WITH a0 AS (SELECT 1 x), {levels} SELECT count(*) FROM a39", max_rows=1)
    assert bounded.select("SELECT count(*) FROM t", max_rows=1).rows == [(3,)]
    bounded.close()


def test_a_database_that_is_closed_stops_its_query() -> None:
    large = Database(LARGE, seconds=600)
    failures: list[str] = []

    def work() -> None:
        try:
            large.select("SELECT count(*) FROM t a, t b, t c, t d", max_rows=1)
        except QueryError as error:
            failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not large._lock.locked():
        pass
    while thread.is_alive():
        large._connection.interrupt()  # once is too early if the query has not begun
        thread.join(0.01)
    large.close()
    assert len(failures) == 1
    with pytest.raises(sqlite3.ProgrammingError):
        large._connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("$1,200 (est.)", 1200),
        ("20 games", 20),
        ("3.5%", 3.5),
        ("2-1", 2),
        ("\u22125", -5),
        ("1,2,3", 1),
        (".5 km", 0.5),
        ("none", None),
        ("", None),
        (None, None),
        (7, 7),
        ("9" * 400, None),
    ],
)
def test_num_reads_the_first_number(cell: Any, number: float | None) -> None:
    assert first_number(cell) == number
    namespace: dict[str, Any] = {}
    exec(setup(TABLE), namespace)  # our own code
    assert namespace["num"](cell) == number  # Python's is the same


def test_iso_orders_dates() -> None:
    days = ["June 20, 1990", "1990", "May 1991", "March 3"]
    assert [iso_date(day) for day in days] == ["1990-06-20", "1990-00-00", "1991-05-00", "0000-03-03"]
    assert [iso_date(cell) for cell in (1990, "soon", None)] == ["1990-00-00", None, None]


# The tool


def played(*queries: str, table: Table = TABLE, **settings: Any) -> Trajectory:
    row = TaskRow(prompt=[{"role": "user", "content": "q"}], env_kwargs={"tools_kwargs": {"table": table.plain}})
    texts = [FORMATS["hermes"].write_call("sql", {"query": query}) for query in queries]
    return asyncio.run(replay(ToolEnv, row, [*texts, "done"], tools=[SqlTool(**settings)]))


def test_the_tool_keeps_the_contract_of_tools() -> None:
    asyncio.run(check_tool(SqlTool(), {"query": "SELECT 1"}, {"table": TABLE.plain}, deterministic=True))


def test_the_model_reads_names_rows_and_what_was_cut() -> None:
    steps = played("SELECT year, team FROM t", "SELECT * FROM t WHERE 0", "SELECT 1.0/3, NULL, x'00'").steps
    assert [step.feedback for step in steps[:-1]] == [
        "sql: year | team\n2001 | Reds\n2002 | Blues\n2003 | Reds",
        "sql: row | year | team | avg_attendance\n[no rows]",
        "sql: 1.0/3 | NULL | x'00'\n0.333333333333 | NULL | x'00'",
    ]
    (cut,) = played("SELECT n FROM t", table=LARGE, max_rows=2).steps[0].calls
    assert cut.result == "n\n0\n1\n[only the first 2 rows are shown]"
    assert cut.info == {"rows": 2, "is_cut": True}
    (short,) = played("SELECT team FROM t", max_chars=12).steps[0].calls
    assert short.result == "team\nReds\n[only the first 1 rows are shown]"
    (narrow,) = played("SELECT 'abcdef' AS a", max_cell_chars=3).steps[0].calls
    assert narrow.result == "a\nabc ..."


def test_a_refused_query_is_a_failed_call_and_the_episode_goes_on() -> None:
    trajectory = played("DELETE FROM t", "SELECT count(*) FROM t")
    first, second = (step.calls[0] for step in trajectory.steps[:2])
    assert (first.fault, second.result) == ("failed", "count(*)\n3")
    assert trajectory.stop is StopReason.ANSWERED


def test_episodes_do_not_share_a_database() -> None:
    tool = SqlTool()
    one, other = tool.for_episode("a"), tool.for_episode("b")

    async def play() -> list[str]:
        small = make_table(["Town"], [["Alby"]])
        answers = [
            (await one.execute({"query": "SELECT count(*) FROM t"}, table=TABLE.plain)).text,
            (await other.execute({"query": "SELECT town FROM t"}, table=small.plain)).text,
        ]
        for each in (one, other, one):
            await each.end_episode()
        return answers

    assert asyncio.run(play()) == ["count(*)\n3", "town\nAlby"]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows of the tool sql must be a positive number, got 0"):
        SqlTool(max_rows=0)
