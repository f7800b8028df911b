"""Synthetic tables and questions, for a run that needs no data: players with their town, points and year.

Questions are made from programs, so every one has an answer and a demonstration.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.tables.data import Asked
from agent_r1.recipes.tables.programs import Condition, Kind, Program, execute
from agent_r1.recipes.tables.sql import Database
from agent_r1.recipes.tables.synthesis import SECONDS
from agent_r1.recipes.tables.table import Table, make_table
from agent_r1.recipes.tables.task import as_row, as_texts
from agent_r1.types import TaskRow

PLAYERS = ("Ada", "Bo", "Cleo", "Dov", "Elin", "Faro", "Gita", "Hugo", "Ines", "Jon", "Kira", "Lev")
TOWNS = ("Alby", "Brendale", "Corford", "Dunham", "Elmere")
HEADER = ("Player", "Town", "Points", "Year")
NUM_ROWS = (5, 8)
TEST_SHARE = 0.25
SPLITS = ("train", "test")

Task = tuple[Asked, Table, Program, list[str]]  # a question, its table, the program that it means, and the answer


def rows(split: str, count: int = 64) -> list[TaskRow]:
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    tasks = draw(split, random.Random(f"rows:{split}"))
    return [
        as_row(asked, table, source="synthetic", row_id=f"{split}-{index}")
        for index, (asked, table, _, _) in zip(range(count), tasks, strict=False)
    ]


def demos(count: int, seed: int) -> list[Demo]:
    return _demos(count, seed, python=False)


def python_demos(count: int, seed: int) -> list[Demo]:
    return _demos(count, seed, python=True)


def _demos(count: int, seed: int, *, python: bool) -> list[Demo]:
    tasks = draw("train", random.Random(f"demos:{seed}"))
    shown: list[Demo] = []
    for index, (asked, table, program, items) in zip(range(count), tasks, strict=False):
        texts = as_texts(program, items, table, python=python)
        assert texts is not None  # synthetic programs order no dates
        shown.append((as_row(asked, table, source="demo", row_id=f"demo-{index}"), texts))
    return shown


def draw(split: str, rng: random.Random) -> Iterator[Task]:
    """Yield questions of a split without end. A hash of table and question decides which split they are in."""
    while True:
        table = draw_table(rng)
        database = Database(table, seconds=SECONDS)
        text, program = draw_question(table, rng)
        items = execute(program, table, database)
        database.close()
        for_test = sha256(f"{table.plain}{text}".encode()).digest()[0] < 256 * TEST_SHARE
        if items and for_test == (split == "test"):
            yield Asked(key=text, text=text, table="synthetic", answers=tuple(items)), table, program, items


def draw_table(rng: random.Random) -> Table:
    players = rng.sample(PLAYERS, rng.randint(*NUM_ROWS))
    points = rng.sample(range(10, 100), len(players))  # all different, so that the largest is one
    cells = [
        (player, rng.choice(TOWNS), str(points[place]), str(rng.randint(1990, 2020)))
        for place, player in enumerate(players)
    ]
    return make_table(HEADER, cells)


def draw_question(table: Table, rng: random.Random) -> tuple[str, Program]:
    player, town = (rng.choice(table.rows)[table.columns.index(name)] for name in ("player", "town"))
    is_player = (Condition(column="player", operator="contains", value=player),)
    in_town = (Condition(column="town", operator="contains", value=town),)
    asked = (
        ("which player has the most points?", Program(kind=Kind.LAST, target="player", by="points")),
        ("which player has the fewest points?", Program(kind=Kind.FIRST, target="player", by="points")),
        (f"how many players are from {town}?", Program(kind=Kind.COUNT, conditions=in_town)),
        (f"how many points does {player} have?", Program(kind=Kind.VALUES, target="points", conditions=is_player)),
        (f"what is the total of points of {town}?", Program(kind=Kind.SUM, target="points", conditions=in_town)),
        (f"who is listed after {player}?", Program(kind=Kind.NEXT, target="player", conditions=is_player)),
        ("how many different towns are there?", Program(kind=Kind.DISTINCT, target="town")),
    )
    return rng.choice(asked)
