"""What people are shown of long texts."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_r1.cli.display import shorten, transcript_panel
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory


@pytest.mark.parametrize("text", ["I add them.\n\n#### 5", "  one\n   \n\n two\n", "", "one"])
def test_a_text_that_is_shown_whole_is_not_called_cut(text: str) -> None:
    assert "..." not in shorten(text)


def test_what_is_cut_says_how_long_it_was() -> None:
    assert shorten("x" * 801) == "x" * 800 + " ... (801 characters)"
    lines = "".join(f"{i}\n" for i in range(21))  # 10 lines of 2 characters and 11 of 3
    assert shorten(lines) == "\n".join(map(str, range(20))) + " ... (53 characters)"


@given(st.lists(st.sampled_from(["word", " two words", "", "  "]), max_size=20), st.integers(1, 60))
def test_every_word_is_shown_or_it_says_that_it_is_not(lines: list[str], limit: int) -> None:
    text = "\n".join(lines)
    assert ("characters)" in shorten(text, limit)) is (shorten(text, limit).split() != text.split())


def test_a_transcript_shows_what_tools_and_models_say_and_keeps_its_frame() -> None:
    attack = "\x1b[2J\x1b]0;owned\x07[bold]\ud800"
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[-1.0], action_text=attack, feedback=attack)
    row = TaskRow(prompt=[{"role": "user", "content": attack}], row_id=attack)
    played = Trajectory(row_id=attack, trajectory_id="t", steps=[step], stop=StopReason.ANSWERED)
    written = io.StringIO()
    Console(file=written, width=60).print(transcript_panel(Group(row=row, trajectories=[played]), played))
    lines = written.getvalue().splitlines()
    assert {len(line) for line in lines} == {60}
    assert "\x1b" not in written.getvalue()
    assert written.getvalue().count(r"\x1b[2J\x1b]0;owned\x07[bold]\ud800") == 4
