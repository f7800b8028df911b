"""Stored results as markdown, printed or written into a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from agent_r1.bench.results import Results, Row, grid
from agent_r1.errors import DataError

MARKED = re.compile(r"(<!-- (bench_\S+\.json) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def as_markdown(rows: Sequence[Row], group: str) -> str:
    """The table of one group."""
    header, *lines = grid(rows, group, {})
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def describe_setting(results: Results) -> str:
    """Hardware, versions and commits of the rows."""
    machine = results.machine
    commits = ", ".join(dict.fromkeys(row.commit for row in results.rows))
    return (
        f"{results.accelerator}, torch {machine['torch']}, transformers {machine['transformers']}, Python "
        f"{machine['python']}; commit {commits}; medians of {max(len(row.repeats) for row in results.rows)}."
    )


def fill_page(page: str, folder: Path) -> str:
    """Put stored results between a page's markers: a line `<!-- FILE GROUP -->`, and after it `<!-- end -->`.

    GROUP is a group of rows, or `setting` for where they were measured.
    """

    def fill(match: re.Match[str]) -> str:
        before, file, group, _, after = match.groups()
        results = Results.read(folder / file)
        if results is None:
            raise DataError(f"the page shows rows of {file}, which is not in {folder}")
        part = describe_setting(results) if group == "setting" else as_markdown(results.rows, group)
        return f"{before}{part}\n{after}"

    return MARKED.sub(fill, page)
