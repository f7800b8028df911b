"""The shop: pages, buttons and their targets. WebShop's text mode without a browser, as functions of a place.

A `Place` is the complete state of a customer; the `Shop` knows the buttons of a place and where an action leads. A shop
is immutable: all episodes of a process share it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Literal

from agent_r1.recipes.webshop.data import Catalogue, open_catalogue
from agent_r1.recipes.webshop.products import Product
from agent_r1.recipes.webshop.search import ProductSearch

MAX_RESULTS, PER_PAGE = 50, 10
BACK, NEXT, PREV, BUY = "back to search", "next >", "< prev", "buy now"
DETAILS = ("description", "features", "reviews")
ATTRIBUTES = "attributes"  # a fourth page of details, if the shop shows it
MAX_QUERY_CHARS = 1000  # characters of a query, which the trajectory and the search keep
MAX_QUOTED = 60  # characters of a quoted action in an answer

_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE)
_VERB = re.compile(r"\b(?:search|click)\s*\[", re.IGNORECASE)
_OPENING = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The page a customer is on, how they got there, and what they have chosen."""

    page: Literal["start", "results", "item", "detail", "bought"] = "start"
    query: str = ""
    number: int = 1  # number of the page of results
    asin: str = ""
    detail: str = ""
    chosen: tuple[tuple[str, str], ...] = ()  # option and value, in the order of choosing

    @property
    def anchor(self) -> str:
        """Return a key that is equal for equal states, however they were reached."""
        if self.page == "results":
            return f"results {self.number} {self.query}"
        options = ", ".join(f"{name}: {value}" for name, value in sorted(self.chosen))
        return " ".join(part for part in (self.page, self.asin, self.detail, options) if part)


class CannotDo(Exception):
    """An action without effect; the text says why."""


class Shop:
    def __init__(self, catalogue: Catalogue, *, show_attributes: bool = False) -> None:
        self.catalogue = catalogue
        self.details = (*DETAILS, ATTRIBUTES) if show_attributes else DETAILS
        self._asins = tuple(catalogue.products)
        self._search = ProductSearch([product.searchable for product in catalogue.products.values()])

    def go(self, place: Place, said: str) -> Place:
        """Return the place an action leads to. Raises `CannotDo` if it is invalid or there is no such button."""
        verb, what = read_action(said)
        if verb == "search":
            return Place(page="results", query=what)  # allowed from any page, as in the original
        return self._click(place, what)

    def found(self, place: Place) -> tuple[Product, ...]:
        """Return all results of this place's search."""
        return self._results(place, slice(None))

    def shown(self, place: Place) -> tuple[Product, ...]:
        """Return the products on this results page."""
        return self._results(place, slice((place.number - 1) * PER_PAGE, place.number * PER_PAGE))

    def count(self, place: Place) -> int:
        """Return the number of results of this place's search."""
        return len(self._search.rank(place.query, MAX_RESULTS))

    def _results(self, place: Place, part: slice) -> tuple[Product, ...]:
        ranked = self._search.rank(place.query, MAX_RESULTS)[part]
        return tuple([self.catalogue.products[self._asins[at]] for at in ranked])

    def product(self, place: Place) -> Product:
        return self.catalogue.products[place.asin]

    def buttons(self, place: Place) -> list[str]:
        """Return all buttons, in the order of the page."""
        if place.page == "results":
            return [*(product.asin for product in self.shown(place)), *self.result_buttons(place)]
        if place.page == "item":
            return [*self._values(place), *self.item_buttons]
        return [PREV, BACK] if place.page == "detail" else []

    def result_buttons(self, place: Place) -> list[str]:
        more = place.number * PER_PAGE < self.count(place)
        return [*([PREV] if place.number > 1 else []), *([NEXT] if more else []), BACK]

    @property
    def item_buttons(self) -> list[str]:
        return [*self.details, BUY, PREV, BACK]

    def _values(self, place: Place) -> dict[str, str]:
        """Map option values to names. As in the original, a value of two options belongs to the later one."""
        return {value: name for name, values in self.product(place).options.items() for value in values}

    def _click(self, place: Place, what: str) -> Place:
        wanted = _same(what)
        button = next((known for known in self.buttons(place) if _same(known) == wanted), None)
        if button is None:
            raise CannotDo(f"There is no [{what[:MAX_QUOTED]}] here.")
        if button == BACK:
            return Place()
        if button == BUY:
            return replace(place, page="bought")
        if place.page == "results":
            if button in (NEXT, PREV):
                return replace(place, number=place.number + (1 if button == NEXT else -1))
            return replace(place, page="item", asin=button)
        if button == PREV:
            return self._step_back(place)
        if button in self.details:
            return replace(place, page="detail", detail=button)
        name = self._values(place)[button]
        return replace(place, chosen=tuple((dict(place.chosen) | {name: button}).items()))

    def _step_back(self, place: Place) -> Place:
        if place.page == "detail":
            return replace(place, page="item", detail="")
        return replace(place, page="results", asin="", chosen=())


def read_action(said: str) -> tuple[str, str]:
    """Return the action in the last line: `search` or `click`, and its argument, of which at most `MAX_QUERY_CHARS`
    characters are kept. Earlier lines are ignored."""
    last = said.strip().rpartition("\n")[2].strip()
    action = _ACTION.fullmatch(last)
    if action is None or not action[2].strip():
        raise CannotDo("Say search[words] or click[button].")
    if _VERB.search(last, last.index("]")):
        raise CannotDo("One action at a time.")
    return action[1].lower(), " ".join(action[2].lower().split())[:MAX_QUERY_CHARS].rstrip()


def open_shop(folder: Path, *, show_attributes: bool = False) -> Shop:
    """Build the shop on first use, once per process."""
    with _OPENING:
        return _built(folder, show_attributes)


@lru_cache(maxsize=8)
def _built(folder: Path, show_attributes: bool) -> Shop:
    return Shop(open_catalogue(folder), show_attributes=show_attributes)


@lru_cache(maxsize=8192)
def _same(button: str) -> str:
    """Ignore case and runs of spaces."""
    return " ".join(button.lower().split())
