"""The level monty: the value of a last line is written out in the worker, where limits hold, never in this process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from agent_r1.tools.python.levels import what_is_missing
from agent_r1.tools.python.limits import KilledBy, Limits
from agent_r1.tools.python.sandbox import Sandbox
from tests.tools.python_boxes import run, works

pytestmark = pytest.mark.skipif(what_is_missing("monty") is not None, reason=f"monty: {what_is_missing('monty')}")
EXPLODING = "x = [0] * 10\nfor _ in range(12):\n    x = [x] * 10\nx"  # 10**13 zeros, once written out


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    made = Sandbox(level="monty", limits=Limits(seconds=2, output_chars=3000), libraries=(), slots=2)
    yield made
    asyncio.run(made.close())


def test_a_last_value_that_cannot_be_written_out_is_the_codes_error(box: Sandbox) -> None:
    assert (run(box, "10**6000").error or "").startswith("ValueError: Exceeds the limit (4300 digits)")
    assert run(box, EXPLODING).killed_by is KilledBy.TIME
    nested = run(box, "x = []\nfor _ in range(100_000):\n    x = [x]\nx")
    assert nested.error is None
    assert nested.stdout.startswith("[[[[")
    assert run(box, "x = []\nx.append(x)\nx").stdout == "[[...]]\n"
    assert works(box)


MEASURED = """
import asyncio, json, resource, sys
from agent_r1.tools.python.limits import Limits
from agent_r1.tools.python.sandbox import Sandbox
async def play():
    box = Sandbox(level="monty", limits=Limits(seconds=3), libraries=(), slots=1)
    await box.run("1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = [(await box.run(code)).killed_by for code in json.loads(sys.argv[1])]
    await box.close()
    print(json.dumps([ended, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024]))
asyncio.run(play())
"""


def test_a_large_last_value_takes_no_memory_here() -> None:
    programs = ["'x' * 100_000_000", "[0] * 3_000_000", "b'x' * 100_000_000", "{i: str(i) for i in range(200_000)}"]
    said = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps(programs)], capture_output=True, text=True, check=True
    )
    ended, megabytes = json.loads(said.stdout)
    assert ended == ["output"] * len(programs)
    assert megabytes < 40  # each takes more than 60, brought here


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("x = 20; x + 1  # a comment", "21\n"),
        ("5;", "5\n"),
        ("(1 +\n 2)", "3\n"),
        ("größe = 'ü'; größe * 2", "'üü'\n"),
        ("x = 3\r\nx\r\n\r\n", "3\n"),
        ("*[1], 2", "(1, 2)\n"),
        ("x = '''a\nb'''\nx", "'a\\nb'\n"),
        ("print(1)", "1\n"),
        ("x = 1", ""),
        ("if True:\n    5", ""),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("def f():\n    return 1\nf()\n\n# the end", "1\n"),
    ],
)
def test_the_last_line_is_shown_if_it_is_an_expression(box: Sandbox, code: str, printed: str) -> None:
    outcome = run(box, code)
    assert (outcome.stdout, outcome.error) == (printed, None)


def test_an_error_shows_the_code_as_it_was_sent(box: Sandbox) -> None:
    outcome = run(box, "def f(n):\n    return 1 / n\nf(0)  # fails")
    expected = """\
    Traceback (most recent call last):
      File "<python-input-0>", line 3, in <module>
        f(0)
      File "<python-input-0>", line 2, in f
        return 1 / n
    ZeroDivisionError: division by zero"""
    assert outcome.error == textwrap.dedent(expected)
    assert "SyntaxError" in (run(box, "x = (1 +").error or "")
    assert "SyntaxError" in (run(box, "[1] or \\").error or ""), "nothing is joined to its last line"


@pytest.mark.parametrize("code", ["-" * 50_000 + "1", "1" + "+1" * 40_000, "a" + ".b" * 40_000, "(" * 50_000])
def test_code_that_is_nested_too_deeply_is_refused(box: Sandbox, code: str) -> None:
    assert "deeply" in (run(box, code).error or "")
    assert works(box)
