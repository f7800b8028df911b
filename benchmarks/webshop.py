"""The shop of the recipe webshop: the speed of building and playing it, and scores of scripted buyers.

    python -m benchmarks.webshop speed --data DIR        # DIR: as the recipe's data.path; without it, where runs look
    python -m benchmarks.webshop buyers --data DIR       # mean score and full scores over all test and training goals,
                                                         # and how often the score pays for a wrong value

Everything runs on one thread, in CPU seconds. Speed is that of the environment: actions are recorded beforehand.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.recipes.webshop.buyers import knowing_buyer, query_of, reading_buyer
from agent_r1.recipes.webshop.data import Catalogue, catalogue_folder, open_catalogue
from agent_r1.recipes.webshop.env import WebShop
from agent_r1.recipes.webshop.goals import NO_BOUND, Goal
from agent_r1.recipes.webshop.pages import Look
from agent_r1.recipes.webshop.score import judge
from agent_r1.recipes.webshop.shop import BUY, Place, Shop, open_shop
from agent_r1.recipes.webshop.task import MAX_SAID, named_goals, rows, score_of, score_of_visit
from agent_r1.types import TaskRow
from benchmarks.machine import machine

EPISODES = 2000  # where there are so many goals
NO_WISH = Goal(asin="", text="", attributes=(), options=(), price_bound=NO_BOUND)


class _FreshShop(WebShop):
    def __init__(self, shop: Shop) -> None:
        super().__init__()
        self._fresh = shop

    def open(self, row: TaskRow) -> Shop:
        return self._fresh


def speed(folder: Path) -> dict[str, Any]:
    began = time.process_time()
    open_catalogue(folder)
    read = time.process_time()
    shop = open_shop(folder)
    built = time.process_time()
    known = rows("train", path=str(folder))
    asked = random.Random(0).sample(known, min(EPISODES, len(known)))
    goals = dict(named_goals("train", shop.catalogue))
    visits = [(row, reading_buyer(shop, goals[row.row_id].text, Look())) for row in asked]
    fresh = Shop(shop.catalogue)  # a fresh one that has not cached these queries
    found = time.process_time()
    for row in asked:
        fresh.found(Place(page="results", query=goals[row.row_id].text.lower()))  # different from the buyer's
    searched = time.process_time()
    envs = [(_FreshShop(fresh), row, said) for row, said in visits]
    started = time.process_time()
    for env, row, _ in envs:
        env.begin(row)
    reset = time.process_time()
    steps = 0
    for env, _, said in envs:
        for action in said:
            env.reply(action)
            steps += 1
    played = time.process_time()
    for row, _ in visits:
        goal = goals[row.row_id]
        score_of(goal, goal.asin, dict(goal.options), shop.catalogue)
    scored = time.process_time()
    return {
        "read_seconds": round(read - began, 2),
        "index_seconds": round(built - read, 2),
        "searches_per_second": round(len(asked) / (searched - found)),
        "resets_per_second": round(len(asked) / (reset - started)),
        "steps_per_second": round(steps / (played - reset)),
        "scores_per_second": round(len(asked) / (scored - played)),
        "steps_per_episode": round(steps / len(asked), 2),
    }


def buyers(folder: Path) -> dict[str, Any]:
    shop = open_shop(folder)
    result: dict[str, Any] = {}
    for split in ("test", "train"):
        goals = [goal for _, goal in named_goals(split, shop.catalogue)]
        bought = {
            "exactly what is wanted": lambda goal: dict(goal.options),
            "that product without options": lambda goal: {},
        }
        for name, options in bought.items():
            scores = [score_of(goal, goal.asin, options(goal), shop.catalogue).total for goal in goals]
            result[f"{split}, {name}"] = _earned(scores)
        visits = {
            "knows the product": [knowing_buyer(shop, goal) or [] for goal in goals],
            "only reads": [reading_buyer(shop, goal.text, Look()) for goal in goals],
            "first result, no option": [_hasty_buyer(shop, goal) for goal in goals],
        }
        for name, said in visits.items():
            scores = [score_of_visit(shop, goal, one).total for goal, one in zip(goals, said, strict=True)]
            result[f"{split}, {name}"] = _earned(scores) | {
                "actions": fmean(len(one) for one in said),
                f"at most {MAX_SAID} actions": fmean(len(one) <= MAX_SAID for one in said),
            }
    return result | {"wrong values that are paid": _wrong_values_paid(shop.catalogue)}


def _earned(scores: list[float]) -> dict[str, float]:
    return {"score": fmean(scores), "full": fmean(one == 1.0 for one in scores)}


def _hasty_buyer(shop: Shop, goal: Goal) -> list[str]:
    query = query_of(goal.text)
    found = shop.found(Place(page="results", query=query.lower()))
    return [f"search[{query}]", *([f"click[{found[0].asin}]", f"click[{BUY}]"] if found else [])]


def _wrong_values_paid(catalogue: Catalogue) -> dict[str, int]:
    """For each option that a goal asks for: how often a wrong value is rewarded."""
    paid = [
        judge(replace(NO_WISH, asin=product.asin, options=((name, wanted),)), product, product, 0.0, {name: chosen})
        for product in catalogue.products.values()
        if product.instruction is not None
        for name, values in product.options.items()
        for wanted, chosen in permutations(dict.fromkeys(values), 2)
    ]
    return {"paid": sum(score.options == 1.0 for score in paid), "of": len(paid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "buyers"])
    parser.add_argument("--data", help="a folder with the data; without it, where runs look")
    chosen = parser.parse_args()
    measured = {"speed": speed, "buyers": buyers}[chosen.what](catalogue_folder(chosen.data))
    for name, value in (measured | {"machine": machine()}).items():
        print(f"{name:34}", value if not isinstance(value, dict) else {k: _short(v) for k, v in value.items()})


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
