"""Sandboxes for the tests, at every level that this machine supports."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from agent_r1.tools.python.process import Limits, Outcome
from agent_r1.tools.python.sandbox import LEVELS, Sandbox, what_is_missing

LIMITS = Limits(seconds=1.5, cpu_seconds=2, memory_mb=128, output_chars=1000, processes=6)
ROOMY = Limits(seconds=60, cpu_seconds=60, memory_mb=256, processes=10)  # enough time on a busy machine
SECRET = "SECRET-5d21"


def require(level: str) -> None:
    if (missing := what_is_missing(level)) is not None:
        pytest.skip(f"level {level}: {missing}")


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[tuple[str, Limits], Sandbox]]:
    opened: dict[tuple[str, Limits], Sandbox] = {}
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    yield opened
    del os.environ["SANDBOX_TEST_SECRET"]
    for box in opened.values():
        asyncio.run(box.close())


def open_box(
    boxes: dict[tuple[str, Limits], Sandbox], level: str, limits: Limits, libraries: Sequence[str] = ()
) -> Sandbox:
    require(level)
    if (level, limits) not in boxes:
        boxes[level, limits] = Sandbox(level=level, limits=limits, libraries=libraries, slots=4)
    return boxes[level, limits]


@pytest.fixture(params=LEVELS)
def box(request: pytest.FixtureRequest, boxes: dict[tuple[str, Limits], Sandbox]) -> Sandbox:
    return open_box(boxes, request.param, LIMITS)


@pytest.fixture
def isolated(boxes: dict[tuple[str, Limits], Sandbox]) -> Sandbox:
    return open_box(boxes, "namespaces", LIMITS)


@pytest.fixture(params=LEVELS)
def roomy(request: pytest.FixtureRequest, boxes: dict[tuple[str, Limits], Sandbox]) -> Sandbox:
    """A sandbox with libraries and generous limits."""
    return open_box(boxes, request.param, ROOMY, [name for name in ("numpy", "sympy") if find_spec(name)])


@contextmanager
def fresh_box(level: str, limits: Limits, slots: int = 1) -> Iterator[Sandbox]:
    """A sandbox for one test; skips the test if this machine does not support the level."""
    require(level)
    box = Sandbox(level=level, limits=limits, libraries=(), slots=slots)
    try:
        yield box
    finally:
        asyncio.run(box.close())


def run(box: Sandbox, code: str, session: str | None = None) -> Outcome:
    return asyncio.run(box.run(textwrap.dedent(code), session=session))


def together(*calls: Coroutine[Any, Any, Outcome]) -> list[Outcome]:
    async def gathered() -> list[Outcome]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(gathered())


def works(box: Sandbox) -> bool:
    return run(box, "print(40 + 2)").stdout == "42\n"
