"""Results of benchmarks: rows in a JSON file per command and accelerator, read back to be compared and shown.

A row is one line of a table. It carries the settings it was measured with, and compares only with a stored row of the
same name, settings and accelerator. Running part of a benchmark replaces the rows it measured and keeps the others, so
every row also says which commit it is from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from agent_r1.bench.arithmetic import medians
from agent_r1.data.files import read_json
from agent_r1.errors import DataError

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str  # group/setting, such as decode/256
    settings: Mapping[str, Any]
    headline: str  # the figure to compare by
    repeats: Sequence[Figures]
    once: Figures = field(default_factory=dict)  # figures with no repeats: start-up times, yardsticks
    commit: str = "unknown"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def figures(self) -> Figures:
        """Medians, and what was measured once."""
        return (medians(self.repeats) if self.repeats else {}) | self.once

    @property
    def value(self) -> float:
        return self.figures[self.headline]

    def speed_against(self, other: Row) -> float | None:
        """How many times as good as another measurement of the same; None when the two do not compare."""
        if (self.name, dict(self.settings), self.headline) != (other.name, dict(other.settings), other.headline):
            return None
        if not self.value or not other.value:
            return None
        return other.value / self.value if "seconds" in self.headline else self.value / other.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One file."""

    command: str
    machine: Mapping[str, Any]
    accelerator: str
    rows: Sequence[Row]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) | {"settings": dict(row.settings), "figures": row.figures} for row in self.rows]
        tree = {"command": self.command, "accelerator": self.accelerator, **self.machine, "rows": rows}
        path.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results | None:
        """None where nothing is stored."""
        if not path.exists():
            return None
        try:
            tree = read_json(path.read_text(encoding="utf-8"))
            rows = [Row(**{key: value for key, value in row.items() if key != "figures"}) for row in tree.pop("rows")]
            command, accelerator = tree.pop("command"), tree.pop("accelerator")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} does not hold results of agent-r1 bench: {error!r}. Move it away") from error
        return cls(command=command, accelerator=accelerator, machine=tree, rows=rows)

    def merged_over(self, stored: Results | None) -> Results:
        """These rows, and the stored ones of groups that were not measured now, in the order they were stored."""
        if stored is None:
            return self
        groups = {row.group for row in self.rows}
        kept = {row.group: None for row in stored.rows}
        order = [*kept, *(group for group in dict.fromkeys(row.group for row in self.rows) if group not in kept)]
        rows = [row for group in order for row in (self if group in groups else stored).rows if row.group == group]
        return Results(command=self.command, machine=self.machine, accelerator=self.accelerator, rows=rows)


def comparison(rows: Iterable[Row], stored: Results | None) -> dict[str, float]:
    """By row name: how many times as good as the stored one, for rows that have one."""
    before = {row.name: row for row in stored.rows} if stored is not None else {}
    found = {row.name: row.speed_against(before[row.name]) for row in rows if row.name in before}
    return {name: speed for name, speed in found.items() if speed is not None}


def as_tables(rows: Sequence[Row], against: Mapping[str, float]) -> list[Table]:
    """For the terminal: one table per group."""
    tables = []
    for group in dict.fromkeys(row.group for row in rows):
        head, *lines = _grid(rows, group, against)
        table = Table(title=group, title_justify="left")
        for column, name in enumerate(head):
            table.add_column(name, justify="right" if column else "left")
        for line in lines:
            table.add_row(*line)
        tables.append(table)
    return tables


def as_markdown(rows: Sequence[Row], group: str) -> str:
    """For a page: the table of one group."""
    head, *lines = _grid(rows, group, {})
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] + ["---:"] * (len(head) - 1), *lines))


def setting(results: Results) -> str:
    """For a page: where the rows are from."""
    machine = results.machine
    commits = ", ".join(dict.fromkeys(row.commit for row in results.rows))
    return (
        f"{results.accelerator}, torch {machine['torch']}, transformers {machine['transformers']}, Python "
        f"{machine['python']}; commit {commits}; medians of {max(len(row.repeats) for row in results.rows)}."
    )


MARKED = re.compile(r"(<!-- (bench_\S+\.json) (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill_in(page: str, folder: Path) -> str:
    """The page with stored results between its markers: a line `<!-- FILE GROUP -->`, and after it `<!-- end -->`.

    GROUP is a group of rows, or `setting` for where they are from.
    """

    def filled(match: re.Match[str]) -> str:
        before, file, group, _, after = match.groups()
        results = Results.read(folder / file)
        if results is None:
            raise DataError(f"the page wants rows of {file}, which is not in {folder}")
        part = setting(results) if group == "setting" else as_markdown(results.rows, group)
        return f"{before}{part}\n{after}"

    return MARKED.sub(filled, page)


def _grid(rows: Sequence[Row], group: str, against: Mapping[str, float]) -> list[list[str]]:
    """The cells of a table, head first. The longer of rows and figures runs downwards: a table grows in length."""
    members = [row for row in rows if row.group == group]
    if not members:
        raise DataError(f"no row of group {group!r}; there are {sorted({row.group for row in rows})}")
    names = list(dict.fromkeys(name for row in members for name in row.figures))
    lines = [["", *(row.name.partition("/")[2] for row in members)]]
    lines += [[name.replace("_", " "), *(_shown(name, row.figures.get(name)) for row in members)] for name in names]
    if against:
        compared = [against.get(row.name) for row in members]
        lines.append(["vs stored", *("" if speed is None else f"{speed:.2f}x" for speed in compared)])
    return lines if len(names) > len(members) else [list(column) for column in zip(*lines, strict=True)]


def _shown(name: str, value: float | None) -> str:
    """By what the name ends with: shares in percent, ratios with an x, large numbers without decimals."""
    if value is None:
        return ""
    if name.endswith("share") or name.endswith("mfu"):
        return f"{value:.1%}"
    if name.endswith("ratio"):
        return f"{value:.2f}x"
    if name.endswith("difference"):
        return f"{value:.1e}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
