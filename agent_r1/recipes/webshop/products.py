"""Parse WebShop's products into the fields that the shop uses.

Two kinds of record are read: scraped ones (`items_shuffle_1000.json`), and the same after WebShop's own loading
(`documents_1k.jsonl`). They differ in how the price is written; everything else comes from the scraped fields, by the
rules of the original loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.errors import DataError

UNKNOWN_PRICE = 100.0  # charged by the original if no price was scraped; here also if none can be parsed
ASIN_CHARS = 10
_NOT_A_NUMBER, _NUMBER = re.compile(r"[^\d.]"), re.compile(r"\d+\.?\d*|\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanInstruction:
    """An instruction for this product written by a person."""

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
    attributes: tuple[str, ...]  # mined from the page's text: machine washable
    categories: str  # departments from the broadest to the narrowest, joined by an angle bracket
    query: str  # the search it was scraped with
    instruction: str | None = None  # first sentence of synthetic goals; None: no goals for this product
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
    """Parse all records in order, without duplicates. `attributes` and `human` map asins to the records of items_ins_v2
    and items_human_ins."""
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
    """Parse "$19.99 - $27.99", or a list of such prices."""
    if isinstance(pricing, str):
        parts = [_NOT_A_NUMBER.sub("", part) for part in pricing.split("$")[1:]]
        pricing = [float(part) for part in parts if _NUMBER.fullmatch(part)]
    return tuple(float(price) for price in pricing[:2]) if pricing else (UNKNOWN_PRICE,)


def _options(customization: Mapping[str, list[Mapping[str, Any]] | None] | str | None) -> dict[str, tuple[str, ...]]:
    """Parse options, which are "" if there are none. Options without values are dropped, or the product had no
    goals."""
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
