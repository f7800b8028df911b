"""Benchmark results: rows in one JSON file per benchmark and accelerator, compared with later runs.

A row is one line of a table. It carries the settings it was measured with, and is compared only with a stored row of
the same name, settings and accelerator. Running some groups of a benchmark replaces their rows and keeps the others, so
every row also carries its commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from agent_r1.data.files import read_json
from agent_r1.errors import DataError

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str  # group/setting, such as decode/256
    settings: Mapping[str, Any]
    headline: str  # the figure to compare by
    repeats: Sequence[Figures]
    once: Figures = field(default_factory=dict)  # figures that are not repeated: start-up times, yardsticks
    commit: str = "unknown"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def figures(self) -> Figures:
        """The median of each figure over the repeats, and what was measured once.

        The median of a ratio is the median of the ratios within repeats.
        """
        names = self.repeats[0] if self.repeats else {}
        return {name: median(repeat[name] for repeat in self.repeats) for name in names} | self.once

    @property
    def value(self) -> float:
        return self.figures[self.headline]

    def speed_against(self, other: Row) -> float | None:
        """Return how many times as good this row is as another measurement of the same; None if they cannot be
        compared."""
        if (self.name, dict(self.settings), self.headline) != (other.name, dict(other.settings), other.headline):
            return None
        if not self.value or not other.value:
            return None
        return other.value / self.value if "seconds" in self.headline else self.value / other.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One result file."""

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
        """None if there is no such file."""
        if not path.exists():
            return None
        try:
            tree = read_json(path.read_text(encoding="utf-8"))
            rows = [Row(**{key: value for key, value in row.items() if key != "figures"}) for row in tree.pop("rows")]
            command, accelerator = tree.pop("command"), tree.pop("accelerator")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a file of benchmark results: {error!r}. Move it away") from error
        return cls(command=command, accelerator=accelerator, machine=tree, rows=rows)

    def merged_over(self, stored: Results | None, *, unfinished: str | None = None) -> Results:
        """These rows, and the stored rows of other groups, in the stored order. In the group `unfinished`, a stored row
        stays until it is measured again."""
        if stored is None:
            return self
        measured = {row.group for row in self.rows} - {unfinished}
        names = {row.name for row in self.rows}
        kept = [row for row in stored.rows if row.group not in measured and row.name not in names]
        groups = dict.fromkeys(row.group for row in (*stored.rows, *self.rows))
        rows = [row for group in groups for row in (*self.rows, *kept) if row.group == group]
        return Results(command=self.command, machine=self.machine, accelerator=self.accelerator, rows=rows)


def comparison(rows: Iterable[Row], stored: Results | None) -> dict[str, float]:
    """Compare rows with stored ones: how many times as good each is, by row name."""
    before = {row.name: row for row in stored.rows} if stored is not None else {}
    found = {row.name: row.speed_against(before[row.name]) for row in rows if row.name in before}
    return {name: speed for name, speed in found.items() if speed is not None}


def as_tables(rows: Sequence[Row], against: Mapping[str, float]) -> list[Table]:
    """One table per group, for the terminal."""
    tables = []
    for group in dict.fromkeys(row.group for row in rows):
        header, *lines = grid(rows, group, against)
        table = Table(title=group, title_justify="left")
        for column, name in enumerate(header):
            table.add_column(name, justify="right" if column else "left")
        for line in lines:
            table.add_row(*line)
        tables.append(table)
    return tables


def grid(rows: Sequence[Row], group: str, against: Mapping[str, float]) -> list[list[str]]:
    """The cells of a table, header first. The longer of rows and figures runs downwards."""
    members = [row for row in rows if row.group == group]
    if not members:
        raise DataError(f"there is no group {group!r} of rows; groups: {sorted({row.group for row in rows})}")
    names = list(dict.fromkeys(name for row in members for name in row.figures))
    lines = [["", *(row.name.partition("/")[2] for row in members)]]
    lines += [[name.replace("_", " "), *(_format(name, row.figures.get(name)) for row in members)] for name in names]
    if against:
        compared = [against.get(row.name) for row in members]
        lines.append(["vs stored", *("" if speed is None else f"{speed:.2f}x" for speed in compared)])
    return lines if len(names) > len(members) else [list(column) for column in zip(*lines, strict=True)]


def _format(name: str, value: float | None) -> str:
    """Format a figure by the end of its name: shares in percent, ratios with an x. Large numbers get no decimals."""
    if value is None:
        return ""
    if name.endswith(("share", "mfu")):
        return f"{value:.1%}"
    if name.endswith("ratio"):
        return f"{value:.2f}x"
    if name.endswith("difference"):
        return f"{value:.1e}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
