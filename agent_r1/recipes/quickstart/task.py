"""The quickstart's task: questions about coins that take two tools and several steps to answer.

A row asks for a total, a difference or a multiple. Each row has its own table of coins, which only `lookup` can read;
`calculate` does the arithmetic. Neither guessing nor a single call gives the answer, because it never appears in the
table. People in test questions never occur in training.

The demonstrations are deliberately imperfect. Every call is well formed, so a policy that imitates them learns to call
tools and to copy names and numbers. But most demonstrations take a shortcut (`SLOPPINESS`), and a greedy imitator
adopts it. The policy has to discover by itself that doing all the work pays: that is the reinforcement learning.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import FromRow, ToolError, tool
from agent_r1.types import TaskRow, Trajectory

FIRST_NAMES = (
    "Abel Ada Bek Beth Cleo Cora Dina Dov Elin Emil Faro Fern Gale Gita Hana Hugo Ines Iris Joel Jon Karl Kira Lena "
    "Lev Milo Mira Nico Nora Oona Otto Pavo Pia Quin Rolf Rosa Sami Suri Tara Tess Ugo Ulla Vera Vito Wim Wren Xena "
    "Yara Zeno"
)
LAST_NAMES = (
    "Abbot Ash Birch Brook Cliff Crane Dale Dean Eddy Elm Finch Fox Glen Grove Heath Hill Irwin Isley Jarvis Jay Kerr "
    "Knoll Lake Lark Marsh Moss Nash North Oakes Oldham Park Pike Quill Reed Rush Snow Stone Tate Thorn Underwood "
    "Usher Vale Vance Wells West Yates York Zorn"
)
SPLITS = ("train", "test")
TEST_SHARE = 0.25  # share of the people who appear in test questions only
PEOPLE_PER_ROW = 4  # people in the table; the question is about one or two

ANSWER = re.compile(r"#### (-?\d+)")
EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", re.ASCII)


class Kind(StrEnum):
    """The quantity a row asks for."""

    TOTAL = "total"
    DIFFERENCE = "difference"
    MULTIPLE = "multiple"


KIND_WEIGHTS = {Kind.TOTAL: 3, Kind.DIFFERENCE: 1, Kind.MULTIPLE: 1}


class Shortcut(StrEnum):
    """Shortcuts of the imperfect demonstrations. None of them gives the right answer."""

    STOP_EARLY = "stop_early"  # answers with the first lookup's result
    GUESS = "guess"  # looks everyone up, then guesses the result
    WRONG_OPERATION = "wrong_operation"  # adds instead of subtracting or multiplying, or subtracts


# Frequency of each shortcut; the remaining demonstrations are right. For totals (three fifths of the rows), most
# demonstrations stop after one lookup, so a greedy imitator solves at most the other two fifths. A sampling one still
# finds the right way in one attempt of five, enough for a group of attempts.
SLOPPINESS: dict[Kind, dict[Shortcut, float]] = {
    Kind.TOTAL: {Shortcut.STOP_EARLY: 0.76, Shortcut.GUESS: 0.03},
    Kind.DIFFERENCE: {Shortcut.STOP_EARLY: 0.05, Shortcut.GUESS: 0.05, Shortcut.WRONG_OPERATION: 0.50},
    Kind.MULTIPLE: {Shortcut.GUESS: 0.25, Shortcut.WRONG_OPERATION: 0.05},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """One question with its table."""

    kind: Kind
    table: Mapping[str, int]  # coins by full name
    people: tuple[str, ...]  # people asked about, in the order of the question
    factor: int  # used by multiples

    @property
    def question(self) -> str:
        if self.kind is Kind.TOTAL:
            return f"How many coins do {self.people[0]} and {self.people[1]} have together?"
        if self.kind is Kind.DIFFERENCE:
            return f"How many more coins does {self.people[0]} have than {self.people[1]}?"
        return f"How many coins are {self.factor} times those of {self.people[0]}?"

    @property
    def expression(self) -> str:
        coins = [self.table[name] for name in self.people]
        if self.kind is Kind.TOTAL:
            return f"{coins[0]} + {coins[1]}"
        if self.kind is Kind.DIFFERENCE:
            return f"{coins[0]} - {coins[1]}"
        return f"{self.factor} * {coins[0]}"

    @property
    def answer(self) -> int:
        return evaluate(self.expression)


def evaluate(expression: str) -> int:
    """Evaluate `a + b`, `a - b` or `a * b`. Raises ValueError for anything else."""
    found = EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError(f"{expression!r} is not of the form a + b, a - b or a * b with integers a and b")
    left, operation, right = int(found[1]), found[2], int(found[3])
    if operation == "+":
        return left + right
    return left - right if operation == "-" else left * right


# The policy's tools. Async, because neither blocks: a sync tool would run in a thread per call.


@tool
async def lookup(name: str, table: FromRow[dict[str, int]]) -> str:
    """How many coins a person has, by full name."""
    if name not in table:
        raise ToolError(f"nobody is called {name!r}")
    return str(table[name])


@tool
async def calculate(expression: str) -> str:
    """The value of a + b, a - b or a * b for two integers."""
    try:
        return str(evaluate(expression))
    except ValueError as error:
        raise ToolError(str(error)) from error


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """Pay 1 if the answer is exactly the right number, else 0."""
    found = ANSWER.fullmatch(trajectory.final_text.strip())
    return float(found is not None and found[1] == row.ground_truth)


def rows(split: str, count: int = 2000, seed: int = 0) -> list[TaskRow]:
    """Return `count` rows of a split; a smaller count gives the first of the same rows."""
    rng = random.Random(f"rows:{split}:{seed}")
    return [as_row(draw_puzzle(split, rng), f"{split}-{seed}-{index}") for index in range(count)]


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    """Return rows of the training split, each with the responses of an imperfect demonstration."""
    rng = random.Random(f"demos:{seed}")
    shown = []
    for index in range(count):
        puzzle = draw_puzzle("train", rng)
        texts = demonstrate(puzzle, _draw_shortcut(puzzle.kind, rng), rng)
        shown.append((as_row(puzzle, f"demo-{seed}-{index}"), texts))
    return shown


def demonstrate(puzzle: Puzzle, shortcut: Shortcut | None, rng: random.Random) -> list[str]:
    """Return the responses of one demonstration, step by step; without a shortcut, the right ones."""
    first, *others = [_call("lookup", name=name) for name in puzzle.people]
    if shortcut is Shortcut.STOP_EARLY:
        return [first, f"#### {puzzle.table[puzzle.people[0]]}"]
    if shortcut is Shortcut.GUESS:
        guess = rng.choice([number for number in range(10, 100) if number != puzzle.answer])
        return [first, *others, f"#### {guess}"]
    expression = puzzle.expression
    if shortcut is Shortcut.WRONG_OPERATION:
        expression = expression.translate(str.maketrans("+-*", "-++"))
    return [first, *others, _call("calculate", expression=expression), f"#### {evaluate(expression)}"]


def _draw_shortcut(kind: Kind, rng: random.Random) -> Shortcut | None:
    sloppiness = SLOPPINESS[kind]
    [drawn] = rng.choices([*sloppiness, None], weights=[*sloppiness.values(), 1 - sum(sloppiness.values())])
    return drawn


def _call(tool_name: str, **arguments: str) -> str:
    return FORMATS["hermes"].write_call(tool_name, arguments)


def draw_puzzle(split: str, rng: random.Random) -> Puzzle:
    [kind] = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))
    names = rng.sample(people(split), PEOPLE_PER_ROW)
    asked = tuple(names[:1] if kind is Kind.MULTIPLE else names[:2])
    while True:
        coins = rng.sample(range(10, 90), PEOPLE_PER_ROW)
        puzzle = Puzzle(kind=kind, table=dict(zip(names, coins, strict=True)), people=asked, factor=rng.randint(2, 5))
        values = [
            puzzle.answer,
            sum(puzzle.table[name] for name in asked),
        ]  # the right answer, and the result of adding by mistake
        # Two-digit numbers only, no minus sign, and never an answer that a single lookup could show.
        if all(10 <= value < 100 for value in values) and puzzle.answer not in coins:
            return puzzle


def as_row(puzzle: Puzzle, row_id: str) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "user", "content": puzzle.question}],
        row_id=row_id,
        reward_model={"style": "rule", "ground_truth": str(puzzle.answer)},
        env_kwargs={"tools_kwargs": {"lookup": {"table": dict(puzzle.table)}}},
        data_source="quickstart",
        extra_info={"kind": puzzle.kind.value},
    )


@cache
def people(split: str) -> tuple[str, ...]:
    """Return the full names of a split. A hash of the name decides, so the splits cannot overlap."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    names = [f"{first} {last}" for first in FIRST_NAMES.split() for last in LAST_NAMES.split()]
    return tuple(name for name in names if _is_for_test(name) == (split == "test"))


def _is_for_test(name: str) -> bool:
    return sha256(name.encode()).digest()[0] < 256 * TEST_SHARE
