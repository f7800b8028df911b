"""The recipe tables: scores of scripted agents, and how many training questions the demonstrations cover.

    python -m benchmarks.tables --data DIR        # DIR: as the recipe's data.path; without it, where runs look

Agents, over all questions of the test split and of the dev split:
gold       says the known answer after one query
one query  runs the likeliest program of the synthesiser, which does not know the answer
cell       says the content of a random cell
empty      says nothing

Everything is played through the tool and scored by the recipe's reward. Writes `benchmarks/results/tables.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.data.downloads import data_folder
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.flows.replay import replay
from agent_r1.recipes.tables import task
from agent_r1.recipes.tables.data import FOLDER, SPLITS, Asked, Read, opened, questions
from agent_r1.recipes.tables.programs import answer_text, as_python
from agent_r1.recipes.tables.sql import Database
from agent_r1.recipes.tables.synthesis import SECONDS, guess
from agent_r1.recipes.tables.table import Table, show
from agent_r1.tokens.formats.table import FORMATS
from benchmarks.machine import RESULTS, machine

FILE = RESULTS / "tables.json"
PARTS = ("reward", "accuracy", "format", "tool")

Agent = Callable[[Asked, Table], list[str]]  # what it says, step by step


def gold(asked: Asked, table: Table) -> list[str]:
    query = FORMATS["hermes"].write_call("sql", {"query": "SELECT * FROM t"})
    return [query, answer_text(asked.answers)]


def one_query(asked: Asked, table: Table) -> list[str]:
    database = Database(table, seconds=SECONDS)
    found = guess(asked.text, table, database)
    database.close()
    texts = None if found is None else task.as_texts(*found, table)
    return texts or [answer_text([])]


def cell(asked: Asked, table: Table) -> list[str]:
    rng = random.Random(asked.key)
    return [answer_text([show(rng.choice(rng.choice(table.rows)[1:]))])]


def empty(asked: Asked, table: Table) -> list[str]:
    return [""]


AGENTS: dict[str, Agent] = {"gold": gold, "one query": one_query, "cell": cell, "empty": empty}


async def scores(agent: Agent, asked: Sequence[Asked], tables: dict[str, Table], read: Read) -> dict[str, float]:
    played: list[dict[str, float]] = []
    for each in asked:
        table = task.table_of(each, tables, read)
        row = task.as_row(each, table)
        trajectory = await replay(ToolEnv, row, agent(each, table), tools=[task.SqlTool()])
        played.append(await task.reward(row, trajectory))
    return {part: round(fmean(parts[part] for parts in played), 4) for part in PARTS}


def coverage(asked: Sequence[Asked], tables: dict[str, Table], read: Read) -> dict[str, Any]:
    """How many questions a program answers, in SQL and in Python, and with which kinds of programs."""
    began = time.process_time()
    found = [(program, as_python(program, tables[each.table])) for each, program, _ in task.solved(asked, tables, read)]
    return {
        "questions": len(asked),
        "sql": len(found),
        "python": sum(code is not None for _, code in found),
        "kinds": dict(Counter(program.kind.value for program, _ in found).most_common()),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with the data; without it, where runs look")
    parser.add_argument("--count", type=int, help="only the first questions of each split")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    read = opened(data_folder(FOLDER, options.data))
    tables: dict[str, Table] = {}
    asked = {split: questions(split, read)[: options.count] for split in SPLITS}
    results: dict[str, Any] = {
        "command": "python -m benchmarks.tables --data DIR",
        "machine": machine(),
        "scores": {
            split: {name: asyncio.run(scores(agent, asked[split], tables, read)) for name, agent in AGENTS.items()}
            for split in ("test", "dev")
        },
        "demonstrations": coverage(asked["train"], tables, read),
    }
    text = json.dumps(results, indent=2)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
