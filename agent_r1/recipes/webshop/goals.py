"""What customers want: WebShop's synthetic goals, made of products by the rules of the original, in a fixed order.

For a product with an instruction there is one goal for every combination of its options. How much it may cost is drawn:
one of the next few round prices above its own. The original draws it without a seed, differently in every process; here
all is drawn with the seed that the original shuffles its goals with, so that a goal is the same goal everywhere. The
order, which decides what is held out, is the original's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations

from agent_r1.recipes.webshop.products import Product

SEED = 233
ROUND_PRICES = tuple(10.0 * step for step in range(1, 100))
NEXT_PRICES = 4  # of these, two are drawn, and the larger is the bound
NO_BOUND = 1_000_000.0  # above all round prices nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    asin: str  # a product that has all of it
    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # name and value; people name no names: ""
    price_bound: float


def draw_prices(products: Sequence[Product]) -> dict[str, float]:
    """What each product costs at the till: where the page says from-to, something in between."""
    rng = random.Random(SEED)
    return {p.asin: p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in products}


def synthetic_goals(products: Sequence[Product], prices: Mapping[str, float]) -> list[Goal]:
    """All of them, in the order of the original."""
    rng, goals = random.Random(SEED), list[Goal]()
    for product in products:
        if product.instruction is None:
            continue
        bound = _draw_bound(prices[product.asin], rng)
        names = sorted(product.options)
        for values in combinations(*(product.options[name] for name in names)):
            options = tuple(zip(names, values, strict=True))
            wish = ", and ".join(f"{name}: {value}" for name, value in options)
            goals.append(
                Goal(
                    asin=product.asin,
                    text=f"{product.instruction}{f' with {wish}' if wish else ''}{_said(bound)}",
                    attributes=product.instruction_attributes,
                    options=options,
                    price_bound=bound,
                )
            )
    random.Random(SEED).shuffle(goals)
    return goals


def human_goals(products: Sequence[Product], prices: Mapping[str, float]) -> list[Goal]:
    """What people wrote, in the order of the original; without attributes there is nothing to judge by."""
    rng, goals = random.Random(SEED), list[Goal]()
    for product in products:
        for wish in product.human:
            if not wish.attributes:
                continue
            bound = _draw_bound(prices[product.asin], rng)
            goals.append(
                Goal(
                    asin=product.asin,
                    text=wish.text.strip(".") + _said(bound),
                    attributes=wish.attributes,
                    options=tuple(("", value) for value in wish.options),
                    price_bound=bound,
                )
            )
    random.Random(SEED).shuffle(goals)
    return goals


def _draw_bound(price: float, rng: random.Random) -> float:
    above = [bound for bound in ROUND_PRICES if bound > price][:NEXT_PRICES]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_BOUND


def _said(bound: float) -> str:
    return "" if bound == NO_BOUND else f", and price lower than {bound:.2f} dollars"
