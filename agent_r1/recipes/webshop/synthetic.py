"""A synthetic shop for runs without data: kinds of products in several materials, each in three colours."""

from __future__ import annotations

from functools import lru_cache
from itertools import product as combinations

from agent_r1.data.rows import Demo
from agent_r1.recipes.webshop.buyers import knowing_buyer
from agent_r1.recipes.webshop.data import Catalogue
from agent_r1.recipes.webshop.env import WebShop
from agent_r1.recipes.webshop.products import Product
from agent_r1.recipes.webshop.shop import Shop
from agent_r1.recipes.webshop.task import as_row, buyer_demos, judged, named_goals
from agent_r1.types import TaskRow, Trajectory

KINDS, MATERIALS, COLORS = ("lamp", "mug", "box", "tray"), ("oak", "tin", "clay"), ("red", "blue", "green")
NUM_TEST = 8  # number of test goals; there are 36 in all


def products() -> list[Product]:
    return [
        Product(
            asin=f"M{index:02}",
            title=f"{material} {kind}",
            description=f"a {kind} of {material}",
            features=("easy clean",),
            prices=(5.0 + 7 * index,),
            options={"color": COLORS},
            attributes=("easy clean",),
            categories=f"home › {kind}",  # noqa: RUF001 (as the pages have it)
            query=kind,
            instruction=f"Find me easy clean {material} {kind}",
            instruction_attributes=("easy clean",),
        )
        for index, (kind, material) in enumerate(combinations(KINDS, MATERIALS))
    ]


@lru_cache(maxsize=1)
def shop() -> Shop:
    return Shop(Catalogue.of(products()))


class SyntheticShop(WebShop):
    def open(self, row: TaskRow) -> Shop:
        return shop()


def rows(split: str, count: int | None = None) -> list[TaskRow]:
    return [as_row(goal, name, "") for name, goal in named_goals(split, shop().catalogue, NUM_TEST)[:count]]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    return judged(row, trajectory, shop().catalogue)


def demos(count: int, seed: int) -> list[Demo]:
    asked = [(as_row(goal, name, ""), goal) for name, goal in named_goals("train", shop().catalogue, NUM_TEST)]
    return buyer_demos(shop(), asked, count, seed, knowing_buyer)
