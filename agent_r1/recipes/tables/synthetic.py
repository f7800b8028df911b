"""Generated tables and questions, for runs that need no data: `tables/cpu` learns on them, `tables/tiny` only runs.

A question is made from the program that answers it. No person and no header of a test table occurs in a training table.
`demos` answers each question with the right program. `loose_demos` often runs a program that the synthesiser finds less
likely: it writes valid queries about the right columns, but most of its answers are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice

from agent_r1.data.rows import Demo
from agent_r1.recipes.quickstart.task import FIRST_NAMES, LAST_NAMES, people
from agent_r1.recipes.tables.data import Asked
from agent_r1.recipes.tables.programs import Condition, Kind, Program, execute
from agent_r1.recipes.tables.sql import Database
from agent_r1.recipes.tables.synthesis import candidates
from agent_r1.recipes.tables.table import Table, make_table
from agent_r1.recipes.tables.task import as_row, as_texts
from agent_r1.types import TaskRow

# First and last names of people: few, so that a tiny model learns to copy them.
NAMES = frozenset([*FIRST_NAMES.split()[:16], *LAST_NAMES.split()[:16]])
SUBJECTS = ("player", "rider", "driver", "singer", "author", "skater", "pilot", "cook")
PLACES = {
    "town": ("Alby", "Brendale", "Corford", "Dunham", "Elmere"),
    "club": ("Rovers", "United", "Albion", "Rangers", "Wanderers"),
    "nation": ("Chile", "Norway", "Kenya", "Japan", "Spain"),
}
AMOUNTS = ("points", "wins", "games", "goals", "medals", "prizes", "votes", "laps")
NUM_ROWS = (5, 9)
TEST_SHARE = 0.25  # share of the headers
SECONDS = 10.0  # time limit of a program: so long that a busy machine gives the same rows
RANKS = (0.3, 0.3, 0.4)  # how often a loose demonstration runs the likeliest program, the second and the third

Task = tuple[Asked, Table, Program, list[str]]  # a question, its table, the program that it means, and the answer


def rows(split: str, count: int = 64) -> list[TaskRow]:
    tasks = draw(split, random.Random(f"rows:{split}"))
    return [
        as_row(asked, table, source=f"tables/{program.kind}", row_id=f"{split}-{index}")
        for index, (asked, table, program, _) in zip(range(count), tasks, strict=False)
    ]


def demos(count: int, seed: int) -> list[Demo]:
    return _demos(count, seed, python=False)


def python_demos(count: int, seed: int) -> list[Demo]:
    return _demos(count, seed, python=True)


def loose_demos(count: int, seed: int) -> list[Demo]:
    return _demos(count, seed, python=False, ranks=RANKS)


def _demos(count: int, seed: int, *, python: bool, ranks: Sequence[float] = ()) -> list[Demo]:
    rng = random.Random(f"demos:{seed}")
    shown: list[Demo] = []
    for index, (asked, table, program, items) in zip(range(count), draw("train", rng), strict=False):
        played, said = _likely(asked.text, table, ranks, rng) if ranks else (program, items)
        texts = as_texts(played, said, table, python=python)
        assert texts is not None  # these programs order no dates
        shown.append((as_row(asked, table, source="demo", row_id=f"demo-{index}"), texts))
    return shown


def _likely(text: str, table: Table, ranks: Sequence[float], rng: random.Random) -> tuple[Program, list[str]]:
    """One of the likeliest programs that return something, drawn by its rank."""
    database = Database(table, seconds=SECONDS)
    tried = ((program, execute(program, table, database)) for program in candidates(text, table))
    found = list(islice((each for each in tried if each[1]), len(ranks)))
    database.close()
    return rng.choices(found, weights=ranks[: len(found)])[0]


def draw(split: str, rng: random.Random) -> Iterator[Task]:
    """Yield questions of a split without end."""
    names = [name for name in people(split) if set(name.split()) <= NAMES]
    while True:
        header = draw_header(rng)
        if _is_for_test(header) != (split == "test"):
            continue
        table = draw_table(header, names, rng)
        database = Database(table, seconds=SECONDS)
        text, program = draw_question(table, rng)
        items = execute(program, table, database)
        database.close()
        if items:
            yield Asked(key=text, text=text, table="synthetic", answers=tuple(items)), table, program, items


def _is_for_test(header: Sequence[str]) -> bool:
    return sha256(" ".join(sorted(header)).encode()).digest()[0] < 256 * TEST_SHARE


def draw_header(rng: random.Random) -> list[str]:
    """Who the table is about, then a place and two amounts in any order."""
    rest = [rng.choice(list(PLACES)), *rng.sample(AMOUNTS, 2)]
    return [rng.choice(SUBJECTS), *rng.sample(rest, len(rest))]


def draw_table(header: Sequence[str], names: Sequence[str], rng: random.Random) -> Table:
    count = rng.randint(*NUM_ROWS)
    columns: list[Sequence[str]] = [rng.sample(names, count)]
    for column in header[1:]:
        if column in PLACES:
            few = rng.sample(PLACES[column], 3)  # so that places repeat
            columns.append(rng.choices(few, k=count))
        else:  # all different, so that the largest is one
            columns.append([str(number) for number in rng.sample(range(10, 40), count)])
    return make_table(header, list(zip(*columns, strict=True)))


def draw_question(table: Table, rng: random.Random) -> tuple[str, Program]:
    subject = table.columns[1]
    place = rng.choice([column for column in table.columns if column in PLACES])
    amount = rng.choice([column for column in table.columns if column in AMOUNTS])
    where, number = (rng.choice(table.values(column)) for column in (place, amount))
    one, other = rng.sample(table.values(subject), 2)
    most = rng.random() < 0.5
    in_place = (Condition(column=place, operator="contains", value=where),)
    is_one, is_other = (Condition(column=subject, operator="contains", value=name) for name in (one, other))
    largest = Kind.LAST if most else Kind.FIRST
    compared = (Condition(column=amount, operator=">" if most else "<", value=number),)
    more, extreme = ("more", "most") if most else ("fewer", "fewest")
    asked = (
        (f"which {subject} has the {extreme} {amount}?", Program(kind=largest, target=subject, by=amount)),
        (
            f"which {subject} from {where} has the {extreme} {amount}?",
            Program(kind=largest, target=subject, by=amount, conditions=in_place),
        ),
        (f"how many {subject}s are from {where}?", Program(kind=Kind.COUNT, conditions=in_place)),
        (f"how many {subject}s have {more} than {number} {amount}?", Program(kind=Kind.COUNT, conditions=compared)),
        (f"how many {amount} does {one} have?", Program(kind=Kind.VALUES, target=amount, conditions=(is_one,))),
        (f"what is the {place} of {one}?", Program(kind=Kind.VALUES, target=place, conditions=(is_one,))),
        (
            f"how many {amount} do the {subject}s from {where} have in total?",
            Program(kind=Kind.SUM, target=amount, conditions=in_place),
        ),
        (
            f"which {subject} is listed {'after' if most else 'before'} {one}?",
            Program(kind=Kind.NEXT if most else Kind.PREVIOUS, target=subject, conditions=(is_one,)),
        ),
        (
            f"who has {more} {amount}, {one} or {other}?",
            Program(kind=largest, target=subject, by=amount, conditions=(is_one, is_other), either=True),
        ),
        (f"how many different {place}s are there?", Program(kind=Kind.DISTINCT, target=place)),
    )
    return rng.choice(asked)
