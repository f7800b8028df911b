"""WebShop: find and buy what an instruction describes. Rows, reward and demonstrations. See README.md."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.webshop.buyers import knowing_buyer, reading_buyer
from agent_r1.recipes.webshop.data import FOLDER_KEY, Catalogue, catalogue_folder, folder_of, open_catalogue
from agent_r1.recipes.webshop.goals import Goal
from agent_r1.recipes.webshop.pages import Look
from agent_r1.recipes.webshop.score import Score, judge
from agent_r1.recipes.webshop.shop import NEXT, Place, Shop, open_shop
from agent_r1.types import TaskRow, Trajectory

NUM_TEST = 200  # the first goals in the original order
MAX_SAID, MAX_TURNS = 8, 1  # limits of a demonstration, in actions and pages turned: more would fill the context
NOTHING = Score(total=0.0, kind=0.0, attributes=0.0, options=0.0, price=0.0)  # for an episode without a purchase

Buyer = Callable[[Shop, Goal], list[str] | None]


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Splits: train and test are synthetic goals; human are the few written by people for these products."""
    folder = catalogue_folder(path)
    return [as_row(goal, name, str(folder)) for name, goal in named_goals(split, open_catalogue(folder))[:count]]


def named_goals(split: str, catalogue: Catalogue, num_test: int = NUM_TEST) -> list[tuple[str, Goal]]:
    """Return (name, goal) pairs. A goal is named by its position in the original order.

    A product that lists a value twice has the same goal twice: goals of the test split are left out of train.
    """
    goals = [(f"goal-{index}", goal) for index, goal in enumerate(catalogue.goals)]
    test = goals[:num_test]
    held_out = {goal.text for _, goal in test}
    train = [(name, goal) for name, goal in goals[num_test:] if goal.text not in held_out]
    human = [(f"human-{index}", goal) for index, goal in enumerate(catalogue.human)]
    splits = {"train": train, "test": test, "human": human}
    if split not in splits:
        raise ConfigError(f"WebShop has no split {split!r}.{did_you_mean(split, splits)}")
    return splits[split]


def as_row(goal: Goal, name: str, folder: str) -> TaskRow:
    truth = {
        "asin": goal.asin,
        "attributes": list(goal.attributes),
        "options": [list(option) for option in goal.options],
        "price_bound": goal.price_bound,
    }
    return TaskRow(
        prompt=[{"role": "user", "content": goal.text}],
        row_id=name,
        reward_model={"style": "rule", "ground_truth": truth},
        data_source="webshop",
        extra_info={FOLDER_KEY: folder},  # location of the products; not part of the panel hash
    )


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay the published score and report its components. An episode without a purchase earns 0."""
    return judged(row, trajectory, open_catalogue(folder_of(row)))


def judged(row: TaskRow, trajectory: Trajectory, catalogue: Catalogue) -> dict[str, float]:
    bought = next((step.info["bought"] for step in trajectory.steps if "bought" in step.info), None)
    score = NOTHING if bought is None else score_of(_goal(row), bought["asin"], bought["options"], catalogue)
    return {
        "reward": score.total,
        "success": float(score.total == 1.0),
        "bought": float(bought is not None),
        "type": score.kind,
        "attributes": score.attributes,
        "options": score.options,
        "price": score.price,
        "refused": float(sum(bool(step.info.get("refused")) for step in trajectory.steps)),
    }


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return training goals with the actions of the knowing buyer."""
    return folder_demos(count, seed, path, knowing_buyer)


def reader_demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return training goals with the actions of the reading buyer, if it bought the right product."""
    return folder_demos(count, seed, path, lambda shop, goal: reading_buyer(shop, goal.text, Look()))


def folder_demos(count: int, seed: int, path: str | None, buyer: Buyer) -> list[Demo]:
    folder = catalogue_folder(path)
    shop = open_shop(folder)
    asked = [(as_row(goal, name, str(folder)), goal) for name, goal in named_goals("train", shop.catalogue)]
    return buyer_demos(shop, asked, count, seed, buyer)


def buyer_demos(shop: Shop, asked: Sequence[tuple[TaskRow, Goal]], count: int, seed: int, buyer: Buyer) -> list[Demo]:
    """Keep short demonstrations that earn the full score, in a random order."""
    order = list(asked)
    random.Random(f"webshop:{seed}").shuffle(order)
    shown: list[Demo] = []
    for row, goal in order:
        if len(shown) == count:
            break
        said = buyer(shop, goal)
        if said is not None and _is_short(said) and score_of_visit(shop, goal, said).total == 1.0:
            shown.append((row, said))
    if not shown:
        raise DataError(f"none of {len(order)} goals can be demonstrated; do they belong to these products?")
    return shown


def _is_short(said: Sequence[str]) -> bool:
    return len(said) <= MAX_SAID and sum(NEXT in action for action in said) <= MAX_TURNS


def score_of_visit(shop: Shop, goal: Goal, said: Iterable[str]) -> Score:
    place = Place()
    for action in said:
        place = shop.go(place, action)
    if place.page != "bought":
        return NOTHING
    return score_of(goal, place.asin, dict(place.chosen), shop.catalogue)


def score_of(goal: Goal, asin: str, options: dict[str, str], catalogue: Catalogue) -> Score:
    products = catalogue.products
    return judge(goal, products[goal.asin], products[asin], catalogue.prices[asin], options)


def _goal(row: TaskRow) -> Goal:
    truth = row.ground_truth
    return Goal(
        asin=truth["asin"],
        text=row.prompt[-1]["content"],
        attributes=tuple(truth["attributes"]),
        options=tuple((name, value) for name, value in truth["options"]),
        price_bound=truth["price_bound"],
    )
