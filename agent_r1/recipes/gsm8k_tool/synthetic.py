"""The word problems of `gsm8k/synthetic.py`, with the calculator, for the tiny preset."""

from __future__ import annotations

from agent_r1.data.rows import Demo
from agent_r1.recipes.gsm8k.synthetic import problems, synthetic_row
from agent_r1.recipes.gsm8k_tool.task import SYSTEM, demonstration
from agent_r1.types import TaskRow


def rows(split: str, count: int = 200) -> list[TaskRow]:
    return [synthetic_row(problem, SYSTEM) for problem in problems(split, count, seed=0)]


def demos(count: int, seed: int) -> list[Demo]:
    return [(synthetic_row(problem, SYSTEM), demonstration(problem)) for problem in problems("train", count, seed)]
