"""GSM8K in a single step: think, then write `#### ANSWER`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from decimal import Decimal

from agent_r1.recipes.gsm8k.data import Problem, problems
from agent_r1.types import TaskRow, Trajectory

SYSTEM = "Solve the problem step by step. End with #### and the answer, a number."
CALCULATION = re.compile(r"<<[^<>]*>>")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    return [as_row(problem, SYSTEM) for problem in problems(split, path)[:count]]


def demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """Training problems with the solutions people wrote; at most as many as there are."""
    chosen = sample(problems("train", path), count, seed)
    return [(as_row(problem, SYSTEM), [written_solution(problem)]) for problem in chosen]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """1 for the right number after the last ####. Beside it: whether there is one, and whether the last number of the
    answer is right wherever it stands, the more generous rule of other implementations."""
    return judged(trajectory.final_text, row.ground_truth)


def judged(text: str, answer: str) -> dict[str, float]:
    _, mark, after = text.rpartition("####")
    final = NUMBER.match(after.strip().lstrip("$"))
    numbers = NUMBER.findall(text)
    return {
        "reward": float(bool(mark) and final is not None and equal(final[0], answer)),
        "format": float(bool(mark) and final is not None),
        "last_number": float(bool(numbers) and equal(numbers[-1], answer)),
    }


def equal(one: str, other: str) -> bool:
    """Whether two numbers are the same: 1,000.00 is 1000."""
    return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))  # exact, however many digits are said


def as_row(problem: Problem, system: str) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "system", "content": system}, {"role": "user", "content": problem.question}],
        row_id=problem.name,
        reward_model={"style": "rule", "ground_truth": problem.answer},
        data_source="gsm8k",
    )


def written_solution(problem: Problem) -> str:
    return f"{CALCULATION.sub('', problem.solution)}\n#### {problem.answer}"


def sample(items: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    return random.Random(f"gsm8k:{seed}").sample(items, min(count, len(items)))
