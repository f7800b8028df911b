"""Questions about tables, answered with SQL or Python: rows, rewards and demonstrations. See README.md.

`reward` pays as published for TableMind; `reward_accuracy` pays for right answers alone. Both report the components:
accuracy     1 if the answer is right (`answers.py`); 0 if the episode was cut off before it answered
format       1 if the episode ended with one `<answer>...</answer>` and nothing else
tool         exp(-0.05 * s) * (0.5 if a call succeeded else 0, minus 0.01 * turns^2); s is the training step
turns        responses of the agent
good_calls   calls that succeeded
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence

from agent_r1.data.downloads import data_folder
from agent_r1.data.rows import Demo
from agent_r1.errors import DataError
from agent_r1.recipes.tables.answers import same_answers, split_items
from agent_r1.recipes.tables.data import FOLDER, Asked, Read, opened, questions, read_table
from agent_r1.recipes.tables.programs import Program, answer_text, as_python, as_sql
from agent_r1.recipes.tables.sandbox import TablePython as TablePython
from agent_r1.recipes.tables.sql import Database
from agent_r1.recipes.tables.sql import SqlTool as SqlTool
from agent_r1.recipes.tables.synthesis import SECONDS, synthesize
from agent_r1.recipes.tables.table import Table
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import StopReason, TaskRow, Trajectory

INSTRUCTION = "Query the table, then write the answer as <answer>...</answer>, with | between several items."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

DECAY = 0.05  # of the term for tools, per training step
SUCCESS = 0.5  # reward for a call that succeeds
TURN_COST = 0.01  # multiplied by the square of the number of turns


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` questions of a split: train, test, dev_train, dev."""
    read = opened(data_folder(FOLDER, path))
    tables: dict[str, Table] = {}
    return [as_row(asked, table_of(asked, tables, read)) for asked in questions(split, read)[:count]]


def table_of(asked: Asked, tables: dict[str, Table], read: Read) -> Table:
    """The table of a question; each is read once."""
    if asked.table not in tables:
        tables[asked.table] = read_table(asked.table, read)
    return tables[asked.table]


def as_row(asked: Asked, table: Table, *, source: str = "wikitablequestions", row_id: str | None = None) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "user", "content": f"{table.describe()}\n\n{asked.text}\n{INSTRUCTION}"}],
        row_id=row_id or asked.key,
        reward_model={"style": "rule", "ground_truth": list(asked.answers)},
        env_kwargs={"tools_kwargs": {"table": table.plain}},  # read by the tool that the preset names
        data_source=source,
        extra_info={"question": asked.text, "table": asked.table},
    )


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay format + accuracy + tool, as published: the term for tools only with a right answer."""
    parts = parts_of(row, trajectory)
    return {"reward": parts["format"] + parts["accuracy"] * (1 + parts["tool"]), **parts}


async def reward_accuracy(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for a right answer."""
    parts = parts_of(row, trajectory)
    return {"reward": parts["accuracy"], **parts}


def parts_of(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    answered = trajectory.stop is StopReason.ANSWERED
    found = ANSWER.findall(trajectory.final_text) if answered else []
    items = split_items(found[-1]) if found else []
    alone = len(found) == 1 and ANSWER.fullmatch(trajectory.final_text.strip()) is not None
    acted = [step for step in trajectory.steps if not step.is_summary]
    good_calls = sum(call.error is None for step in acted for call in step.calls)
    trained = max((step.policy_version for step in acted), default=0)
    return {
        "accuracy": float(same_answers(items, row.ground_truth)),
        "format": float(alone and bool(items)),
        "tool": tool_term(trained, turns=len(acted), good_calls=good_calls),
        "turns": float(len(acted)),
        "good_calls": float(good_calls),
    }


def tool_term(step: int, *, turns: int, good_calls: int) -> float:
    """Reward successful calls and few turns; the reward shrinks as training goes on."""
    return math.exp(-DECAY * step) * (SUCCESS * (good_calls > 0) - TURN_COST * turns**2)


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return up to `count` training questions that a small program answers, each with its query and the answer."""
    return _demos(count, seed, path, python=False)


def dev_demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return demonstrations without questions of the split `dev`, for runs that are evaluated on it."""
    return _demos(count, seed, path, python=False, split="dev_train")


def python_demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return demonstrations for the sandbox, except for programs that order dates."""
    return _demos(count, seed, path, python=True)


def _demos(count: int, seed: int, path: str | None, *, python: bool, split: str = "train") -> list[Demo]:
    read = opened(data_folder(FOLDER, path))
    asked = questions(split, read)
    random.Random(f"demos:{seed}").shuffle(asked)
    tables: dict[str, Table] = {}
    shown: list[Demo] = []
    for each, program, items in solved(asked, tables, read):
        table = tables[each.table]
        texts = as_texts(program, items, table, python=python)
        if texts is not None:
            shown.append((as_row(each, table, source="demo", row_id=f"demo-{each.key}"), texts))
        if len(shown) == count:
            break
    if not shown:
        raise DataError(f"no program answers any of {len(asked)} questions; are their tables the right ones?")
    return shown


def solved(asked: Sequence[Asked], tables: dict[str, Table], read: Read) -> Iterator[tuple[Asked, Program, list[str]]]:
    """Yield the questions that a small program answers, with that program and its answer."""
    for each in asked:
        table = table_of(each, tables, read)
        database = Database(table, seconds=SECONDS)
        found = synthesize(each.text, table, each.answers, database)
        database.close()
        if found is not None:
            yield each, *found


def as_texts(program: Program, items: Sequence[str], table: Table, *, python: bool = False) -> list[str] | None:
    """The responses of a demonstration: one call, then the answer. None if the program cannot be written in Python."""
    code = as_python(program, table) if python else as_sql(program, table)
    if code is None:
        return None
    name, argument = ("python", "code") if python else ("sql", "query")
    return [FORMATS["hermes"].write_call(name, {argument: code}), answer_text(items)]
