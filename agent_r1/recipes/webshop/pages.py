"""Render a place of the shop as short text; everything in square brackets can be clicked.

A page has the content of the original's text mode, without repeating the instruction and the query, and with long texts
cut. Buttons that are cut off can still be clicked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from agent_r1.errors import ConfigError
from agent_r1.recipes.webshop.products import Product
from agent_r1.recipes.webshop.shop import ATTRIBUTES, PER_PAGE, Place, Shop

CUT = "..."
LEAST = len(CUT) + 1  # shortest limit that leaves room for the mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Maximum lengths, in characters."""

    title: int = 80  # title of a product among others
    item_title: int = 200
    values: int = 400  # values of one option
    text: int = 600  # a description and the like

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < LEAST:
                raise ConfigError(f"{name}_chars={limit} is too small: use at least {LEAST}")


def page(shop: Shop, place: Place, look: Look) -> str:
    if place.page == "start":
        return "Say search[words]."
    if place.page == "results":
        return _results(shop, place, look)
    if place.page == "item":
        return _item(shop, place, look)
    if place.page == "detail":
        text = _detail(shop.product(place), place.detail) or f"There is nothing under {place.detail}."
        return f"{cut(text, look.text)}\n{_buttons(shop.buttons(place))}"
    return f"You bought {place.asin}{f' with {_pairs(place)}' if place.chosen else ''}."


def choice(shop: Shop, place: Place) -> str:
    """Describe chosen and missing options; empty if there is nothing to choose."""
    not_yet = ", ".join(name for name in shop.product(place).options if name not in dict(place.chosen))
    return " ".join(
        [*([f"Chosen: {_pairs(place)}."] if place.chosen else []), *([f"Not yet: {not_yet}."] if not_yet else [])]
    )


def again(shop: Shop, place: Place) -> str:
    """Describe a page that was shown before."""
    if place.page == "results":
        return f"Page {place.number} of the results again."
    return f"{place.asin} again. {choice(shop, place)}".rstrip()


def cut(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - len(CUT)].rstrip() + CUT


def _results(shop: Shop, place: Place, look: Look) -> str:
    found = shop.count(place)
    if not found:
        return f"Nothing was found.\n{_buttons(shop.result_buttons(place))}"
    lines = [f"[{p.asin}] {cut(p.title, look.title)} {p.price_tag}" for p in shop.shown(place)]
    pages = -(-found // PER_PAGE)
    return "\n".join([f"Page {place.number} of {pages}", *lines, _buttons(shop.result_buttons(place))])


def _item(shop: Shop, place: Place, look: Look) -> str:
    product, chosen = shop.product(place), dict(place.chosen)
    lines = [cut(product.title, look.item_title), product.price_tag]
    for name, values in product.options.items():
        taken = f" (chosen: {chosen[name]})" if name in chosen else ""
        lines.append(f"{name}{taken}: {_values(values, look.values)}")
    return "\n".join([*lines, _buttons(shop.item_buttons)])


def _values(values: Iterable[str], limit: int) -> str:
    left, shown = limit, list[str]()
    distinct = list(dict.fromkeys(values))
    for value in distinct:
        left -= len(value) + 3
        if left < 0:
            return f"{' '.join(shown)} and {len(distinct) - len(shown)} more" if shown else f"{len(distinct)} values"
        shown.append(f"[{value}]")
    return " ".join(shown)


def _detail(product: Product, name: str) -> str:
    if name == "description":
        return product.description
    if name == "features":
        return " ".join(product.features)
    return ", ".join(product.attributes) if name == ATTRIBUTES else ""  # the data has no reviews


def _pairs(place: Place) -> str:
    return ", ".join(f"{name}: {value}" for name, value in place.chosen)


def _buttons(names: Iterable[str]) -> str:
    return " ".join(f"[{name}]" for name in names)
