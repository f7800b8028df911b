"""What scripted agents reach on the recipe paper_search, without a model, and whether its rewards rank them right.

    agent-r1 data recipe paper_search
    python -m benchmarks.paper_search                    # writes results/paper_search_agents.json

Every agent plays every question of a split in the recipe's environment, through its tool calls, and is scored by its
reward. `rank agreement` is measured within questions: among all pairs of agents with different recall on the same
question, the share in which the one with the higher recall earned more process reward (equal: half).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agent_r1.data.panels import panel_hash
from agent_r1.recipes.paper_search import agents
from agent_r1.recipes.paper_search.corpus import LocalPapers, open_library
from agent_r1.recipes.paper_search.data import library_folder, queries
from agent_r1.recipes.paper_search.env import PaperSearch
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.recipes.paper_search.task import as_row, parts_of
from agent_r1.recipes.paper_search.tools import Expand, Search
from agent_r1.tools.base import BaseTool
from agent_r1.types import Action, Step, StopReason, Trajectory
from benchmarks.machine import RESULTS, machine

SPLITS = {"autoscholar": None, "spar": None, "valid": 100}  # and how many questions, if not all
AGENTS: dict[str, Callable[[Query, LocalPapers], list[str]]] = {
    "expert": agents.expert,
    "reader": agents.reader,
    "one_search": agents.one_search,
    "random": agents.random_calls,
    "repeat": agents.repeat_search,
}
SHOWN = ("recall", "precision", "recall_selected", "f1", "earned", "found", "calls", "repeated", "bad_expands", "steps")


async def play(tools: list[BaseTool], query: Query, split: str, said: list[str]) -> dict[str, float]:
    """Return the parts of the reward, and the number of steps."""
    env, row, steps = PaperSearch(tools=tools), as_row(query, split), list[Step]()
    await env.reset(row.without_ground_truth())
    for text in said:
        transition = await env.step(Action(text=text, token_ids=[]))
        steps.append(
            Step(prompt_ids=[], response_ids=[], response_logprobs=[], action_text=text, calls=tuple(transition.calls))
        )
        if transition.terminated:
            break
    await env.close()
    played = Trajectory(row_id=row.row_id, trajectory_id="", steps=steps, stop=StopReason.ANSWERED)
    return parts_of(row, played) | {"steps": float(len(steps))}


async def play_all(folder: Path, split: str, asked: list[Query]) -> dict[str, list[dict[str, float]]]:
    library, search = open_library(folder), Search(library=folder)
    tools = [search, Expand()]
    await search.open()
    played: dict[str, list[dict[str, float]]] = {}
    for name, agent in AGENTS.items():
        played[name] = [await play(tools, query, split, agent(query, library)) for query in asked]
    await search.close()
    return played


def rank_agreement(played: dict[str, list[dict[str, float]]]) -> float:
    agreed = []
    for attempts in zip(*played.values(), strict=True):
        for one, other in combinations(attempts, 2):
            if one["recall"] != other["recall"]:
                better, worse = (one, other) if one["recall"] > other["recall"] else (other, one)
                agreed.append((better["earned"] > worse["earned"]) + 0.5 * (better["earned"] == worse["earned"]))
    return fmean(agreed)


def summary(parts: list[dict[str, float]]) -> dict[str, float]:
    recalls = [each["recall"] for each in parts]
    means = {name: round(fmean(each[name] for each in parts), 4) for name in SHOWN}
    return means | {"recall_stderr": round(stdev(recalls) / sqrt(len(recalls)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="as the recipe's data.path; without it, where runs look")
    parser.add_argument("--to", type=Path, default=RESULTS / "paper_search_agents.json")
    chosen = parser.parse_args()
    folder = library_folder(chosen.data)
    result: dict[str, Any] = {"command": "python -m benchmarks.paper_search", **machine()}
    result["papers"], result["splits"] = len(open_library(folder)), {}
    for split, count in SPLITS.items():
        asked, began = queries(split, chosen.data)[:count], time.process_time()
        played = asyncio.run(play_all(folder, split, asked))
        result["splits"][split] = {
            "questions": len(asked),
            "panel": panel_hash([as_row(query, split) for query in asked]),
            "gold_papers": round(fmean(len(query.gold) for query in asked), 2),
            "rank_agreement": round(rank_agreement(played), 4),
            "cpu_seconds": round(time.process_time() - began, 1),
            "agents": {name: summary(parts) for name, parts in played.items()},
        }
        print(split, json.dumps(result["splits"][split], indent=1))
    chosen.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
