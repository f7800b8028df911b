"""Two scripted buyers, for demonstrations and as reference scores.

The knowing buyer is given the wanted product; it searches, turns pages and clicks until it is bought. The reading buyer
has only the instruction and the pages, like an agent: it opens the products whose titles match the instruction best and
buys the first one with all wanted options, or else the one with most of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agent_r1.recipes.webshop.goals import Goal
from agent_r1.recipes.webshop.pages import Look, page
from agent_r1.recipes.webshop.search import split_words
from agent_r1.recipes.webshop.shop import BUY, NEXT, PER_PAGE, PREV, Place, Shop

MAX_LOOKS = 4  # products that the reading buyer opens

_START, _PRICE = re.compile(r"^find me ", re.IGNORECASE), re.compile(r", and price lower than ([\d.]+) dollars$")
_RESULT = re.compile(r"^\[(\w+)\] (.*) \$([\d.]+)(?: to \$[\d.]+)?$", re.MULTILINE)
_OPTION = re.compile(r"^([^\[\n]+): (\[.*\])", re.MULTILINE)
_WISH = re.compile(r"(?: with|, and) ([a-z ]+): ")  # the name of a wanted option, before its value


def query_of(instruction: str) -> str:
    """Return the query of both buyers: the instruction without courtesies and price."""
    return _PRICE.sub("", _START.sub("", instruction))


def knowing_buyer(shop: Shop, goal: Goal) -> list[str] | None:
    """Return the buyer's actions, or None if the search does not find the product."""
    query = query_of(goal.text)
    found = [product.asin for product in shop.found(Place(page="results", query=query.lower()))]
    if goal.asin not in found:
        return None
    turns = [_click(NEXT)] * (found.index(goal.asin) // PER_PAGE)
    wanted = dict(goal.options)
    values = [wanted[name] for name in shop.catalogue.products[goal.asin].options if name in wanted]  # in page order
    return [f"search[{query}]", *turns, _click(goal.asin), *map(_click, values), _click(BUY)]


def reading_buyer(shop: Shop, instruction: str, look: Look) -> list[str]:
    visit = _Visit(shop, look)
    text = visit.say(f"search[{query_of(instruction)}]")
    wishes, best = _wishes(instruction), _Offer()
    for number, asin in enumerate(_by_title(text, instruction)):
        if number == MAX_LOOKS:
            break
        if number:
            visit.say(_click(PREV))
        offer = _Offer(asin=asin, values=tuple(_fitting(visit.say(_click(asin)), instruction)))
        best = max(best, offer, key=lambda one: len(one.values) + bool(one.asin) / 2)  # the first on ties
        if len(offer.values) >= len(wishes):
            break
    if not best.asin:
        return visit.said  # nothing was found
    if visit.place.asin != best.asin:
        visit.say(_click(PREV))
        visit.say(_click(best.asin))
    for action in (*map(_click, best.values), _click(BUY)):
        visit.say(action)
    return visit.said


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    asin: str = ""
    values: tuple[str, ...] = ()  # number of wanted options that it has


class _Visit:
    """A customer in the shop: sees pages, gives actions."""

    def __init__(self, shop: Shop, look: Look) -> None:
        self._shop, self._look = shop, look
        self.place, self.said = Place(), list[str]()

    def say(self, action: str) -> str:
        self.place = self._shop.go(self.place, action)
        self.said.append(action)
        return page(self._shop, self.place, self._look)


def _by_title(text: str, instruction: str) -> Iterator[str]:
    """Return the products on a results page, best title match first; those above the price limit last."""
    wanted, bound = set(split_words(query_of(instruction))), _PRICE.search(instruction)

    def place(result: tuple[str, str, str]) -> tuple[bool, int]:
        too_dear = bound is not None and float(result[2]) > float(bound[1])
        return too_dear, -len(wanted & set(split_words(result[1])))

    for asin, _, _ in sorted(_RESULT.findall(text), key=place):  # ties in search order
        yield asin


def _wishes(instruction: str) -> list[str]:
    return _WISH.findall(_PRICE.sub("", instruction))


def _fitting(text: str, instruction: str) -> Iterator[str]:
    """For each option of an item page, return the value that the instruction names (the longest if several)."""
    wanted = f"{_PRICE.sub('', instruction).lower()}, and "
    for name, values in _OPTION.findall(text):
        named = [value for value in re.findall(r"\[([^\]]+)\]", values) if f" {name}: {value}, and " in wanted]
        if named:
            yield max(named, key=len)


def _click(button: str) -> str:
    return f"click[{button}]"
