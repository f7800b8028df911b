"""WebShop's synthetic goals, built from products by the rules of the original, in a fixed order.

A product with an instruction has one goal for every combination of its options. Its price limit is drawn from the next
few round prices above its own. The original draws it without a seed, differently in every process; here it is drawn
with the seed that the original uses to shuffle goals, so that goals are the same everywhere. The order, which decides
the split, is the original's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations

from agent_r1.recipes.webshop.products import Product

SEED = 233
ROUND_PRICES = tuple(10.0 * step for step in range(1, 100))
NEXT_PRICES = 4  # two of these are drawn; the larger is the limit
NO_BOUND = 1_000_000.0  # no limit for prices above the highest round price


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    asin: str  # a product that meets the goal
    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # name and value; "" in goals written by people
    price_bound: float


def draw_prices(products: Sequence[Product]) -> dict[str, float]:
    """Return the price charged for each product; for a price range, one within it."""
    rng = random.Random(SEED)
    return {p.asin: p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in products}


def synthetic_goals(products: Sequence[Product], prices: Mapping[str, float]) -> list[Goal]:
    """Return all synthetic goals, in the order of the original."""
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
    """Return the goals written by people, in the order of the original, if they have attributes to score."""
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
