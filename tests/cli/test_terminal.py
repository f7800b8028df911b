"""What reaches the terminal, and what happens when there is none."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent_r1.cli.terminal import Terminal
from agent_r1.text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [brackets] :smile: é 🙂\tand\nlines", "plain [brackets] :smile: é 🙂\tand\nlines"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
        ("over\rwritten\r\nnext", "over\\rwritten\nnext"),
        ("user\u202etxt.exe\u2066", r"user\u202etxt.exe\u2066"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_whatever_a_tool_says_is_utf_8_without_control_characters(text: str) -> None:
    shown = visible(text)
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert not {chr(number) for number in (*range(32), *range(127, 160))} - {"\n", "\t"} & set(shown)
    assert visible(shown) == shown


def test_a_terminal_sanitises_whatever_it_renders_and_keeps_its_own_styles() -> None:
    table = Table.grid()
    table.add_row("\x1b[5mcell", Text("\x1b[5mtext"))
    written = io.StringIO()
    Terminal(file=written, force_terminal=True, color_system="standard").print(
        Group(Panel(table, title="\x1b[5mtitle"), Text("green", style="green")), "\x1b[5mplain", highlight=False
    )
    assert "\x1b[5m" not in written.getvalue()
    assert written.getvalue().count(r"\x1b[5m") == 4
    assert "\x1b[32mgreen" in written.getvalue()


STREAMS = """
import os, sys
from agent_r1.cli.terminal import steady_streams
steady_streams()
{}
print("after", flush=True)
os.write(3, b"alive")
"""


@pytest.mark.parametrize(
    ("attack", "printed"),
    [
        ("sys.stdout.close()", "after\n"),
        ("os.close(1)", "after\n"),
        ("os.close(1); stolen = open(os.devnull); assert stolen.fileno() == 1", "after\n"),
        ("sys.stdout.buffer.close()", ""),
        ("sys.stdout.write('\\ud800')", "\\ud800after\n"),
    ],
)
def test_standard_streams_survive_what_a_tool_does_to_them(attack: str, printed: str) -> None:
    alive, other = os.pipe()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", f"import os; os.dup2({other}, 3)\n{STREAMS.format(attack)}"],
            pass_fds=[other],
            capture_output=True,
            text=True,
            check=False,
        )
        os.close(other)
        assert os.read(alive, 10) == b"alive"
    finally:
        os.close(alive)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


def test_a_stream_that_is_full_drops_what_it_is_given() -> None:
    code = STREAMS.format("print('x' * 100_000)").replace("3, b", "2, b")
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"alive")
