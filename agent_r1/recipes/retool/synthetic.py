"""Synthetic problems with a program that solves each, for the tiny preset and for trying the recipe without data.

A demonstration says what to compute, calls python with the program, and answers with its output. A hash of the question
decides the split, so splits cannot overlap.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.retool.task import as_row
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import TaskRow

SPLITS = ("train", "test")
TEST_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    question: str
    thought: str
    program: str
    answer: int


def _product(rng: random.Random) -> Problem:
    a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(2, 99)
    return Problem(
        question=f"What is {a} * {b} + {c}?",
        thought="One line.",
        program=f"print({a} * {b} + {c})",
        answer=a * b + c,
    )


def _linear(rng: random.Random) -> Problem:
    a, x, b = rng.randint(2, 30), rng.randint(2, 90), rng.randint(1, 99)
    return Problem(
        question=f"Solve {a}x + {b} = {a * x + b} for x.",
        thought="Subtract, then divide.",
        program=f"print(({a * x + b} - {b}) // {a})",
        answer=x,
    )


def _series(rng: random.Random) -> Problem:
    first = rng.randint(1, 50)
    last = first + rng.randint(5, 200)
    return Problem(
        question=f"What is the sum of the integers from {first} to {last}?",
        thought="Add them up.",
        program=f"print(sum(range({first}, {last} + 1)))",
        answer=sum(range(first, last + 1)),
    )


def _remainder(rng: random.Random) -> Problem:
    base, power, modulus = rng.randint(2, 20), rng.randint(5, 60), rng.randint(7, 97)
    return Problem(
        question=f"What is the remainder when {base}^{power} is divided by {modulus}?",
        thought="A power modulo a number.",
        program=f"print(pow({base}, {power}, {modulus}))",
        answer=pow(base, power, modulus),
    )


KINDS: tuple[Callable[[random.Random], Problem], ...] = (_product, _linear, _series, _remainder)


def rows(split: str, count: int = 500, seed: int = 0) -> list[TaskRow]:
    """Return `count` rows; a smaller count gives the first of the same rows."""
    rng = random.Random(f"rows:{split}:{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(split, rng)
        found.setdefault(problem.question, problem)
    return [_row(problem, f"{split}-{seed}-{index}") for index, problem in enumerate(found.values())]


def demos(count: int, seed: int) -> list[Demo]:
    """Return rows of the training split, each with an expert's responses."""
    rng = random.Random(f"demos:{seed}")
    drawn = [draw("train", rng) for _ in range(count)]
    return [(_row(problem, f"demo-{seed}-{index}"), demonstrate(problem)) for index, problem in enumerate(drawn)]


def demonstrate(problem: Problem) -> list[str]:
    return demonstration(problem.thought, problem.program, str(problem.answer))


def demonstration(thought: str, program: str, answer: str) -> list[str]:
    """Return the responses of the two steps of an episode: a call of python, and the answer."""
    call = FORMATS["hermes"].write_call("python", {"code": program})
    return [f"{thought}\n{call}", f"The answer is \\boxed{{{answer}}}."]


def draw(split: str, rng: random.Random) -> Problem:
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    while True:
        problem = rng.choice(KINDS)(rng)
        for_test = sha256(problem.question.encode()).digest()[0] < 256 * TEST_SHARE
        if for_test == (split == "test"):
            return problem


def _row(problem: Problem, row_id: str) -> TaskRow:
    return as_row(problem.question, str(problem.answer), row_id, "synthetic")
