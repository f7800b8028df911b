"""Every algorithm has a page, and the page says what the code does: paper, functions, settings and their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in ("README.md", "parity.md"))
NAMED = re.compile(r"`(\w+)`\s+in\s+`learn/([\w/]+)\.py`")


def page_of(name: str) -> Path:
    """Both forms of REINFORCE++ share a page."""
    return FOLDER / f"{name.replace('++', '_plus_plus').removesuffix('_baseline')}.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def settings_on(page: Path) -> dict[str, dict[str, Any]]:
    """Algorithm -> setting -> value, from the table whose columns are named after algorithms. Values are YAML."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| setting |"))
    names = [name.strip("`") for name in cells(lines[start])[1:-1]]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        setting, *values, meaning = cells(line)
        assert meaning, line
        for name, value in zip(names, values, strict=True):
            if value:
                found[name][setting.strip("`")] = yaml.safe_load(value.strip("`"))
    return found


def own_lines(page: Path) -> str:
    found = re.search(r"^\*\*Our lines\*\*(.*?)\n\n", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page.name} has no paragraph 'Our lines'"
    return found[1]


def function_name(function: Callable[..., object]) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(function.__name__)


def test_pages_and_algorithms_correspond() -> None:
    assert {page_of(name) for name in ALGORITHMS} == set(PAGES)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_shows_every_setting_of_its_row_with_its_value(name: str) -> None:
    shown = settings_on(page_of(name))[name]
    assert shown == get_algorithm(name).settings
    # 1 == 1.0 == True, but a recipe that says one of them where another is meant is refused.
    assert {key: type(value) for key, value in shown.items()} == {
        key: type(value) for key, value in get_algorithm(name).settings.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_functions_named_under_our_lines_exist(page: Path) -> None:
    text = own_lines(page)
    named = NAMED.findall(text)
    for function, module in named:
        assert hasattr(import_module(f"agent_r1.learn.{module.replace('/', '.')}"), function), (
            f"learn/{module}.py has no {function}"
        )
    outside = re.findall(r"`[^`]+`", NAMED.sub("", text))
    # What is left in backticks is a setting such as `aggregation: constant`, not a function without its file.
    assert [word for word in outside if ":" not in word] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_names_its_paper_and_the_functions_that_its_row_runs(name: str) -> None:
    row, page = ALGORITHMS[name], page_of(name)
    named = {function for function, _ in NAMED.findall(own_lines(page))}
    assert {function_name(row.credit), function_name(row.loss)} <= named
    assert row.paper in page.read_text(encoding="utf-8")


def test_the_index_lists_the_algorithms_in_the_order_of_the_table() -> None:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [cells(line) for line in lines if line.startswith("| [`")]
    found = [re.match(r"\[`([^`]+)`\]\(([^)]+)\)", row[0]) for row in rows]
    assert [(match[1], match[2]) for match in found if match] == [(name, page_of(name).name) for name in ALGORITHMS]
    for row, algorithm in zip(rows, ALGORITHMS.values(), strict=True):
        _, _, level, _, critic, group, _ = row
        assert level in ("trajectory", "step", "token")
        assert critic == ("yes" if algorithm.needs_critic else "no")
        assert group.startswith("2 or more") == (algorithm.min_group_size == 2)
        assert ("greedy" in group) == algorithm.needs_greedy
