"""Sandboxes for the tests, one per level that this machine has; the fixtures go through the levels."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Coroutine, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from agent_r1.tools.python.levels import LEVELS, what_is_missing
from agent_r1.tools.python.limits import Limits, Outcome
from agent_r1.tools.python.sandbox import Sandbox

LIMITS = Limits(seconds=1.5, cpu_seconds=2, memory_mb=128, output_chars=1000, processes=6, idle_seconds=600)
CPYTHON = [name for name, level in LEVELS.items() if level.libraries]
ISOLATING = [name for name in CPYTHON if LEVELS[name].isolates]
SECRET = "SECRET-5d21"


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[str, Sandbox]]:
    made: dict[str, Sandbox] = {}
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    yield made
    del os.environ["SANDBOX_TEST_SECRET"]
    for box in made.values():
        asyncio.run(box.close())


def open_box(boxes: dict[str, Sandbox], level: str) -> Sandbox:
    missing = what_is_missing(level)
    if missing is not None:
        pytest.skip(f"level {level}: {missing}")
    if level not in boxes:
        boxes[level] = Sandbox(level=level, limits=LIMITS, libraries=(), slots=4)
    return boxes[level]


@pytest.fixture(params=LEVELS)
def any_box(request: pytest.FixtureRequest, boxes: dict[str, Sandbox]) -> Sandbox:
    return open_box(boxes, request.param)


@pytest.fixture(params=CPYTHON)
def cpython(request: pytest.FixtureRequest, boxes: dict[str, Sandbox]) -> Sandbox:
    return open_box(boxes, request.param)


@pytest.fixture(params=ISOLATING)
def isolated(request: pytest.FixtureRequest, boxes: dict[str, Sandbox]) -> Sandbox:
    return open_box(boxes, request.param)


@pytest.fixture(scope="module")
def roomy_boxes() -> Iterator[dict[str, Sandbox]]:
    made: dict[str, Sandbox] = {}
    yield made
    for box in made.values():
        asyncio.run(box.close())


@pytest.fixture(params=CPYTHON)
def roomy(request: pytest.FixtureRequest, roomy_boxes: dict[str, Sandbox]) -> Sandbox:
    """A sandbox with libraries, and time enough for a busy machine."""
    level = request.param
    if (missing := what_is_missing(level)) is not None:
        pytest.skip(f"level {level}: {missing}")
    if level not in roomy_boxes:
        libraries = [name for name in ("numpy", "sympy") if find_spec(name)]
        limits = Limits(seconds=60, cpu_seconds=60, memory_mb=256, processes=10)
        roomy_boxes[level] = Sandbox(level=level, limits=limits, libraries=libraries, slots=2)
    return roomy_boxes[level]


def run(box: Sandbox, code: str, session: str | None = None) -> Outcome:
    return asyncio.run(box.run(textwrap.dedent(code), session=session))


def together(*calls: Coroutine[Any, Any, Outcome]) -> list[Outcome]:
    async def gathered() -> list[Outcome]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(gathered())


def works(box: Sandbox) -> bool:
    return run(box, "print(40 + 2)").stdout == "42\n"
