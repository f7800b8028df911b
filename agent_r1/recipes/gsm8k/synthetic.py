"""Synthetic word problems in the style of GSM8K, for the tiny preset and for trying the recipe without data.

Each has three numbers. Training and test problems never share the same three: in test problems their sum is a multiple
of `TEST_SHARE`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.gsm8k.data import Problem
from agent_r1.recipes.gsm8k.task import SYSTEM, as_row, written_solution
from agent_r1.types import TaskRow

Story = Callable[[int, int, int], tuple[str, str, int]]  # three numbers -> question, solution, answer

SPLITS = ("train", "test")
TEST_SHARE = 5  # one problem in TEST_SHARE is for testing
SMALLEST, LARGEST = 2, 20


def _bags(a: int, b: int, c: int) -> tuple[str, str, int]:
    return (
        f"Nora has {a} apples. She buys {b} bags of {c}. How many has she now?",
        f"The bags hold {b}*{c} = <<{b}*{c}={b * c}>>{b * c} apples.\n"
        f"She has {a}+{b * c} = <<{a}+{b * c}={a + b * c}>>{a + b * c} apples.",
        a + b * c,
    )


def _tickets(a: int, b: int, c: int) -> tuple[str, str, int]:
    paid = a * b + c
    return (
        f"{a} tickets cost ${b} each. Otto pays ${c} more for a map. How much does he pay?",
        f"The tickets cost {a}*{b} = $<<{a}*{b}={a * b}>>{a * b}.\n"
        f"He pays {a * b}+{c} = $<<{a * b}+{c}={paid}>>{paid}.",
        paid,
    )


def _shares(a: int, b: int, c: int) -> tuple[str, str, int]:
    return (
        f"{a} friends share {a * b} shells. Iris then gives {c} to each. How many has each?",
        f"Each gets {a * b}/{a} = <<{a * b}/{a}={b}>>{b} shells.\n"
        f"Each has {b}+{c} = <<{b}+{c}={b + c}>>{b + c} shells.",
        b + c,
    )


STORIES: tuple[Story, ...] = (_bags, _tickets, _shares)


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """Return `count` problems; a smaller count gives the first of the same problems."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    rng = random.Random(f"made:{split}:{seed}")
    return [_draw(rng, split, name=f"{split}-{seed}-{index}") for index in range(count)]


def rows(split: str, count: int = 200) -> list[TaskRow]:
    return [synthetic_row(problem, SYSTEM) for problem in problems(split, count, seed=0)]


def demos(count: int, seed: int) -> list[Demo]:
    return [(synthetic_row(problem, SYSTEM), [written_solution(problem)]) for problem in problems("train", count, seed)]


def synthetic_row(problem: Problem, system: str) -> TaskRow:
    return replace(as_row(problem, system), data_source="synthetic")


def _draw(rng: random.Random, split: str, name: str) -> Problem:
    while True:
        numbers = [rng.randint(SMALLEST, LARGEST) for _ in range(3)]
        if (sum(numbers) % TEST_SHARE == 0) == (split == "test"):
            question, solution, answer = rng.choice(STORIES)(*numbers)
            return Problem(name=name, question=question, solution=solution, answer=str(answer))
