"""Sandboxes for the tests, one per level that this machine has; the three fixtures go through the levels."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Coroutine, Iterator
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


def run(box: Sandbox, code: str, session: str | None = None) -> Outcome:
    return asyncio.run(box.run(textwrap.dedent(code), session=session))


def together(*calls: Coroutine[Any, Any, Outcome]) -> list[Outcome]:
    async def gathered() -> list[Outcome]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(gathered())


def works(box: Sandbox) -> bool:
    return run(box, "print(40 + 2)").stdout == "42\n"
