"""GSM8K in a single step: think, then write `#### ANSWER`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from decimal import Decimal

from agent_r1.recipes.gsm8k.data import Problem, problems
from agent_r1.types import StopReason, TaskRow, Trajectory

SYSTEM = "Solve the problem step by step. End with #### and the answer, a number."
CALCULATION = re.compile(r"<<[^<>]*>>")
NUMBER = re.compile(r"-?(?:(?:(?<![\d,])\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)")
# A number followed by this is part of an expression: 1/2, 3 - 5, 2*(3+4), 3:30, 2**3, 1e3, 7,2, 1.2.3 or 3 1/2.
# So is one before a superscript digit, a one-character fraction, or a dash (\u2013) or dot (\u00b7) and a number.
GOES_ON = (
    r"\d|[.,]\d|[\u00b2\u00b3\u00b9]|[ \t]*[-+*/^:x\u00d7\u00f7\u00b7\u2013eE]{1,2}[ \t]*\(?\d"
    r"|[ \t]*[\u00bc-\u00be]|[ \t]+\d+/\d"
)
FINAL = re.compile(rf"[\s:*_`$€£]*({NUMBER.pattern})(?!{GOES_ON})")  # markup and currency may precede it
CURRENCY = re.compile(r"(?<!\d)\\?[$€£](?=[\d.])")  # also between a sign and its number: -$72


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    return [as_row(problem, SYSTEM) for problem in problems(split, path)[:count]]


def demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """Return up to `count` training problems with their human-written solutions."""
    chosen = sample(problems("train", path), count, seed)
    return [(as_row(problem, SYSTEM), [written_solution(problem)]) for problem in chosen]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for the right number after the last ####. Also report whether there is one, and whether the last number
    anywhere in the answer is right, the more lenient rule of other implementations. A truncated episode has no answer:
    #### 12 may be the beginning of #### 125."""
    return parts_of(row, trajectory)


def parts_of(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    return judged(trajectory.final_text if trajectory.stop is StopReason.ANSWERED else "", row.ground_truth)


def judged(text: str, answer: str) -> dict[str, float]:
    text = CURRENCY.sub("", text.replace("\u2212", "-"))  # the typographic minus sign
    _, mark, after = text.rpartition("####")
    final = FINAL.match(after)
    numbers = NUMBER.findall(text)
    return {
        "reward": float(bool(mark) and final is not None and equal(final[1], answer)),
        "format": float(bool(mark) and final is not None),
        "last_number": float(bool(numbers) and equal(numbers[-1], answer)),
    }


def equal(one: str, other: str) -> bool:
    """Return whether two numbers are equal: 1,000.00 equals 1000."""
    return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))  # exact for any number of digits


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
