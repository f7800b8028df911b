"""The quickstart's task for an agent that thinks before it acts: demonstrations with `<think>` blocks.

Every response begins with a thought, which says what comes next. `context.reasoning` decides whether later prompts
show it: the preset keeps it, and `context.reasoning=strip` drops it. The agent can do without, because what it found
out is in the results of its calls.
"""

from __future__ import annotations

from pathlib import Path

from agent_r1.data.rows import Demo
from agent_r1.recipes.quickstart import task
from agent_r1.recipes.quickstart.tiny import TEXT_ROWS, make_tiny_model
from agent_r1.tokens.formats.base import ParsedCall
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import TaskRow, Trajectory


def demos(count: int, seed: int) -> list[Demo]:
    """The quickstart's imperfect demonstrations, with a thought before each response."""
    return [
        (row, [f"<think>{thought(text)}</think>{text}" for text in texts]) for row, texts in task.demos(count, seed)
    ]


def thought(text: str) -> str:
    """What a thinking agent would say before this response."""
    _, events = FORMATS["hermes"].parse(text)
    if events and isinstance(events[0], ParsedCall):
        [value] = events[0].arguments.values()
        return f"I need the coins of {value}." if events[0].name == "lookup" else f"Now I compute {value}."
    return "I am done."


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """Pay 1 if what follows the thought is exactly the right number, else 0."""
    found = task.ANSWER.fullmatch(trajectory.final_text.rpartition("</think>")[2].strip())
    return float(found is not None and found[1] == row.ground_truth)


def make_model(directory: str | Path, seed: int) -> None:
    make_tiny_model(directory, seed, demos=demos(TEXT_ROWS, seed=0))
