"""The published reward of WebShop: how well a purchase matches the goal. Pure functions.

    score = type * (attributes + options + price) / (wanted attributes + wanted options + 1)

`type` is 1 for a product of the same kind and falls to 0 the fewer nouns the two titles share. An attribute counts if
the product has a similar one, or its page mentions it. An option counts if a similar value was chosen; for colours, the
plain colour is enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent_r1.recipes.webshop.goals import Goal
from agent_r1.recipes.webshop.products import Product

ALIKE = 85  # texts whose ratio (0 to 100, rounded) is larger count as alike
SAME_KIND, HARDLY = 0.2, 0.1  # thresholds for the share of the wanted title's nouns
_COLOR_WORDS = (  # in matching order
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow"
)
_COLORS = _COLOR_WORDS.split()
_LATIN = dict.fromkeys(range(128, 256))  # letters dropped by the original's comparison
_WORD = re.compile(r"(?<!\w)[^\W\d_](?:[\w.]*\w)?")
_FUNCTION_WORDS = (
    "a an the this that these those i me my we us our you your he him his she her it its they them their and or nor "
    "but plus if as at by for from in into of on onto off over out to up with without within under through per than "
    "via is are be was can will not no all any both each every more most other some such only very just too so s"
)
_NOT_NOUNS = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    total: float
    kind: float  # the factor for the type of product
    attributes: float  # share of the requirements met; 1 if there are none
    options: float
    price: float


def judge(goal: Goal, wanted: Product, bought: Product, price: float, chosen: Mapping[str, str]) -> Score:
    """`wanted` is the goal's product; `price` and `chosen` are the price and options (by name) of the bought one."""
    attributes = sum(has_attribute(bought, attribute) for attribute in goal.attributes)
    options = sum(_is_chosen(name, value, chosen) for name, value in goal.options)
    affordable = price <= goal.price_bound
    kind = type_factor(wanted, bought)
    return Score(
        total=kind * (attributes + options + affordable) / (len(goal.attributes) + len(goal.options) + 1),
        kind=kind,
        attributes=_share(attributes, len(goal.attributes)),
        options=_share(options, len(goal.options)),
        price=float(affordable),
    )


def type_factor(wanted: Product, bought: Product) -> float:
    shared = shared_nouns(wanted.title, bought.title)
    if shared == 0:
        return 0.0  # even within the same category: as published
    if shared < HARDLY:
        return 0.1
    same = wanted.query == bought.query or len(_departments(wanted) & _departments(bought)) >= 2
    return 1.0 if same or shared > SAME_KIND else 0.5


def shared_nouns(wanted: str, bought: str) -> float:
    """Return the share of the wanted title's nouns that the other title has. As published, a repeated noun counts once
    in the numerator and twice in the denominator."""
    nouns = title_nouns(wanted)
    return len(set(nouns) & set(title_nouns(bought))) / len(nouns) if nouns else SAME_KIND


def title_nouns(title: str) -> list[str]:
    """Approximate a tagger's nouns and names, which titles consist of: all words except function words, participles and
    words that begin with a digit."""
    words = (word.lower() for word in _WORD.findall(title))
    return [word for word in words if word not in _NOT_NOUNS and not _is_participle(word)]


def has_attribute(product: Product, attribute: str) -> bool:
    if any(alike(known, attribute) for known in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)


def alike(one: str, other: str) -> bool:
    """Return whether one text (nearly) contains the words of the other: the token set ratio of the `thefuzz`
    package."""
    from rapidfuzz.fuzz import token_set_ratio
    from rapidfuzz.utils import default_process

    plain = [default_process(text.translate(_LATIN)) for text in (one, other)]
    return round(token_set_ratio(*plain)) > ALIKE


def plain_color(value: str) -> str:
    """Return the first colour of the list that occurs in the text, or else the text."""
    return next((color for color in _COLORS if color in value), value)


def _is_chosen(name: str, value: str, chosen: Mapping[str, str]) -> bool:
    # As published, a wanted option is compared as a printed (name, value) pair, and is reduced to a colour only if it
    # contains nothing else.
    if name:
        wanted = next((color for color in _COLORS if color in (name, value)), str((name, value)))
    else:
        wanted = plain_color(value)
    return any(alike(plain_color(taken), wanted) for taken in chosen.values())


def _share(found: int, wanted: int) -> float:
    return found / wanted if wanted else 1.0


def _departments(product: Product) -> set[str]:
    return {part.strip() for part in product.categories.split("›")}  # noqa: RUF001 (as the pages have it)


def _is_participle(word: str) -> bool:
    return len(word) > 4 and word.endswith("ed") and not word.endswith("eed")
