"""Products of WebShop as its own files write them, and the fields of theirs that the shop uses.

Two kinds of record are read: one of `items_shuffle_1000.json`, as it was scraped, and one of `documents_1k.jsonl`, the
same after WebShop's own loading. They differ in how the price is written; everything else is taken from the scraped
fields, by the rules of the original loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.errors import DataError

UNKNOWN_PRICE = 100.0  # what the original charges where no price was scraped; here also where none can be read
ASIN_CHARS = 10
_NOT_A_NUMBER, _NUMBER = re.compile(r"[^\d.]"), re.compile(r"\d+\.?\d*|\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanInstruction:
    """What a person wrote who wanted this product."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # values, without the names


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    asin: str
    title: str
    description: str
    features: tuple[str, ...]  # the bullet points of the page; at least one, perhaps empty
    prices: tuple[float, ...]  # one, or the lowest and the highest
    options: Mapping[str, tuple[str, ...]]  # color -> (black, red), in lower case
    attributes: tuple[str, ...]  # what the page says of it, mined from its text: machine washable
    categories: str  # the path of the shop's departments, joined by an angle
    query: str  # the search it was scraped with
    instruction: str | None = None  # the sentence synthetic goals begin with; None: there are no goals for it
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[HumanInstruction, ...] = ()

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def searchable(self) -> str:
        """The text the original indexes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.features[0], options]).lower()


def read_products(
    records: Iterable[Mapping[str, Any]],
    attributes: Mapping[str, Mapping[str, Any]],
    human: Mapping[str, list[Mapping[str, Any]]],
    where: str,
) -> list[Product]:
    """In their order, each once. `attributes` and `human` are by asin: items_ins_v2 and items_human_ins."""
    found: dict[str, Product] = {}
    for index, record in enumerate(records):
        try:
            asin = record["asin"]
            if asin == "nan" or len(asin) > ASIN_CHARS or asin in found:
                continue
            found[asin] = _product(record, attributes.get(asin, {}), human.get(asin) or record.get("instructions", []))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{where} record {index + 1} is not a product of WebShop: {error!r}") from error
    return list(found.values())


def _product(record: Mapping[str, Any], mined: Mapping[str, Any], instructions: Iterable[Mapping[str, Any]]) -> Product:
    features = record["small_description"]
    listed = features if isinstance(features, list) else [features]
    return Product(
        asin=record["asin"],
        title=_text(record["name"], "name"),
        description=_text(record["full_description"], "full_description"),
        features=tuple(_text(feature, "small_description") for feature in listed) or ("",),
        prices=_prices(record.get("pricing")),
        options=_options(record["customization_options"]),
        attributes=tuple(mined.get("attributes", ("DUMMY_ATTR",))),  # the original's name for having none
        categories=_text(record["product_category"], "product_category"),
        query=record["query"].lower().strip(),
        instruction=mined.get("instruction"),
        instruction_attributes=tuple(mined.get("instruction_attributes") or ()),
        human=tuple(
            HumanInstruction(
                text=_text(one["instruction"], "instruction"),
                attributes=tuple(one["instruction_attributes"]),
                options=tuple(one["instruction_options"]),
            )
            for one in instructions
        ),
    )


def _prices(pricing: str | list[float] | None) -> tuple[float, ...]:
    """Of "$19.99 - $27.99", or of a list that was read from it."""
    if isinstance(pricing, str):
        parts = [_NOT_A_NUMBER.sub("", part) for part in pricing.split("$")[1:]]
        pricing = [float(part) for part in parts if _NUMBER.fullmatch(part)]
    return tuple(float(price) for price in pricing[:2]) if pricing else (UNKNOWN_PRICE,)


def _options(customization: Mapping[str, list[Mapping[str, Any]] | None] | str | None) -> dict[str, tuple[str, ...]]:
    """Scraped as "" where there are none. An option without values would leave its product without a goal."""
    if not customization or isinstance(customization, str):
        return {}
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in customization.items()
        if contents
    }


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is {value!r:.80}, not text")
    return value
