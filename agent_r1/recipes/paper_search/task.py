"""Find the papers that answer a question: rows, rewards and demonstrations. See README.md; `data.py` has the data.

Each call earns a process reward (`pool.py`). At the end, `reward_recall` and `reward_f1` pay for the list as a whole,
and `reward_process` nothing, as published. All three report:
recall               the share of the gold papers that were found
precision, recall_selected, f1   of the papers whose selector score is at least `SELECTED`
found, calls         papers found, and calls made
earned               the sum of the process rewards
repeated, bad_expands    queries asked before, and expansions of unknown or expanded papers
failed               calls that the source could not answer
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from agent_r1.data.rows import Demo
from agent_r1.errors import DataError
from agent_r1.recipes.paper_search.agents import demonstrate
from agent_r1.recipes.paper_search.corpus import LocalPapers, open_library
from agent_r1.recipes.paper_search.data import library_folder, queries
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.types import TaskRow, Trajectory

SELECTED = 0.25  # half of the question's words, by weight: see `selector.LexicalSelector`


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` questions of a split: train, valid, autoscholar, spar."""
    return [as_row(query, split) for query in queries(split, path)[:count]]


def as_row(query: Query, split: str) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "user", "content": query.text}],
        row_id=f"{split}-{query.digest}",
        reward_model={"style": "rule", "ground_truth": list(query.gold)},
        data_source=f"paper_search/{split}",
        extra_info={"kind": query.kind},
    )


async def reward_recall(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    return {"reward": (parts := parts_of(row, trajectory))["recall"], **parts}


async def reward_f1(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    return {"reward": (parts := parts_of(row, trajectory))["f1"], **parts}


async def reward_process(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    return {"reward": 0.0, **parts_of(row, trajectory)}


def parts_of(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    gold = set(row.ground_truth)
    calls = [call for step in trajectory.steps for call in step.calls]
    scores = {key: score for call in calls for key, score in call.info.get("found", ())}
    selected = {key for key, score in scores.items() if score >= SELECTED}
    right = len(gold & selected)
    problems = Counter(call.info.get("problem") for call in calls)
    return {
        "recall": len(gold & scores.keys()) / len(gold),
        "precision": right / len(selected) if selected else 0.0,
        "recall_selected": right / len(gold),
        "f1": 2 * right / (len(gold) + len(selected)),
        "found": float(len(scores)),
        "calls": float(len(calls)),
        "earned": sum(call.reward for call in calls),
        "repeated": float(problems["repeated_query"]),
        "bad_expands": float(problems["unknown_paper"] + problems["expanded_before"]),
        "failed": float(sum(call.fault == "failed" for call in calls)),
    }


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return up to `count` training questions with the expert's responses, for those it can answer in full."""
    return expert_demos(open_library(library_folder(path)), queries("train", path), count, seed)


def expert_demos(library: LocalPapers, asked: Sequence[Query], count: int, seed: int) -> list[Demo]:
    order = list(asked)
    random.Random(f"paper_search:{seed}").shuffle(order)
    shown: list[Demo] = []
    for query in order:
        if len(shown) == count:
            break
        said = demonstrate(query, library)
        if said is not None:
            shown.append((as_row(query, "train"), said))
    if not shown:
        raise DataError(f"the expert can answer none of {len(order)} questions; do they belong to these papers?")
    return shown
