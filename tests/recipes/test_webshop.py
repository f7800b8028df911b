"""The recipe `webshop`: products, goals, search and the published score. The shop itself: `test_webshop_shop.py`.

Nothing here needs the real data. Where $AGENT_R1_WEBSHOP names a folder that has them, they are checked too, with what
is on record of the original engine.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1.errors import DataError
from agent_r1.recipes.webshop import data, made, task
from agent_r1.recipes.webshop.buyers import knowing_buyer, reading_buyer
from agent_r1.recipes.webshop.data import open_catalogue
from agent_r1.recipes.webshop.goals import NO_BOUND, Goal, draw_prices, human_goals, synthetic_goals
from agent_r1.recipes.webshop.pages import Look
from agent_r1.recipes.webshop.products import HumanInstruction, Product, read_products
from agent_r1.recipes.webshop.score import alike, has_attribute, judge, plain_color, shared_nouns, type_factor
from agent_r1.recipes.webshop.search import ProductSearch, split_words
from agent_r1.recipes.webshop.shop import Place, Shop, open_shop
from agent_r1.tasks.files import json_lines
from agent_r1.tasks.panel import panel_hash

SCARF = Product(
    asin="B000000001",
    title="Northwind Women Wool Scarf Winter Shawl",
    description="A scarf that can be washed by hand.",
    features=("machine washable", "made of wool"),
    prices=(24.0,),
    options={"size": ("small", "large"), "color": ("dark red", "navy blue")},
    attributes=("soft touch", "long lasting"),
    categories="Clothing › Women › Scarves",  # noqa: RUF001
    query="scarves",
    instruction="Find me soft touch scarves",
    instruction_attributes=("soft touch", "machine washable"),
)
GOAL = Goal(
    asin=SCARF.asin,
    text="Find me soft touch scarves with color: dark red, and size: large, and price lower than 30.00 dollars",
    attributes=("soft touch", "machine washable"),
    options=(("color", "dark red"), ("size", "large")),
    price_bound=30.0,
)

# Products


def scraped(**changes: Any) -> dict[str, Any]:
    return {
        "asin": "B000000002",
        "name": "Oak Chair",
        "full_description": "A chair.",
        "small_description": ["four legs", "no arms"],
        "pricing": "$1,019.99 - $1,127.50",
        "customization_options": {
            "Color": [{"value": " Black/Red "}, {"value": "Oak"}],
            "Size": None,
        },
        "product_category": "Home › Chairs",  # noqa: RUF001
        "query": " Chairs ",
    } | changes


def read_one(record: Mapping[str, Any], mined: Mapping[str, Any] | None = None) -> Product:
    return read_products([record], {record["asin"]: mined or {}}, {}, "test")[0]


def test_a_scraped_record_is_read_as_the_original_reads_it() -> None:
    chair = read_one(scraped(), {"attributes": ["solid wood"]})
    assert chair.prices == (1019.99, 1127.5)
    assert chair.price_tag == "$1019.99 to $1127.5"
    assert chair.options == {"color": ("black | red", "oak")}
    assert chair.query == "chairs"
    assert chair.searchable == "oak chair a chair. four legs color: black | red, oak"
    assert (chair.attributes, chair.instruction) == (("solid wood",), None)


def test_a_record_without_price_features_and_options_has_the_original_defaults() -> None:
    chair = read_one(scraped(pricing="", small_description="plain", customization_options=""))
    assert (chair.prices, chair.price_tag) == ((100.0,), "$100.0")
    assert (chair.features, chair.options) == (("plain",), {})


def test_a_price_that_was_read_already_is_the_same_price() -> None:
    assert read_one(scraped(pricing=[19.99, 27.99])).prices == read_one(scraped(pricing="$19.99 - $27.99")).prices


def test_doubles_and_records_without_a_proper_asin_are_left_out() -> None:
    records = [scraped(), scraped(name="again"), scraped(asin="nan"), scraped(asin="B0000000021")]
    assert [product.title for product in read_products(records, {}, {}, "test")] == ["Oak Chair"]


def test_a_record_that_is_no_product_is_an_error_with_its_place() -> None:
    with pytest.raises(DataError, match=r"items\.json record 2 is not a product of WebShop: KeyError"):
        read_products([scraped(), {"asin": "B1"}], {}, {}, "items.json")


# Goals


def test_there_is_a_goal_for_every_combination_of_options() -> None:
    goals = synthetic_goals([SCARF], draw_prices([SCARF]))
    assert {goal.options for goal in goals} == {
        (("color", color), ("size", size)) for color in ("dark red", "navy blue") for size in ("small", "large")
    }
    [bound] = {goal.price_bound for goal in goals}
    assert bound in (40.0, 50.0, 60.0)  # the larger of two of 30, 40, 50, 60
    assert (
        f"Find me soft touch scarves with color: dark red, and size: large, and price lower than {bound:.2f} dollars"
        in {goal.text for goal in goals}
    )


def test_a_product_without_an_instruction_has_no_goals_and_one_without_options_has_one() -> None:
    plain = replace(SCARF, options={})
    goals = synthetic_goals([replace(SCARF, asin="B3", instruction=None), plain], draw_prices([plain, SCARF]))
    assert [(goal.asin, goal.options) for goal in goals] == [(SCARF.asin, ())]


def test_above_all_round_prices_no_bound_is_said() -> None:
    dear = replace(SCARF, options={}, prices=(985.0,))  # only 990 is above
    [goal] = synthetic_goals([dear], draw_prices([dear]))
    assert (goal.text, goal.price_bound) == ("Find me soft touch scarves", NO_BOUND)


def test_what_people_wrote_becomes_a_goal_if_it_can_be_judged() -> None:
    wishes = (
        HumanInstruction(text="i want a soft scarf.", attributes=("soft touch",), options=("large",)),
        HumanInstruction(text="a scarf", attributes=(), options=()),
    )
    wanted = replace(SCARF, human=wishes)
    [goal] = human_goals([wanted], draw_prices([wanted]))
    assert goal.text.startswith("i want a soft scarf, and price lower than ")
    assert goal.options == (("", "large"),)


def test_goals_are_the_same_in_every_process() -> None:
    assert [goal.asin for goal in made.shop().catalogue.goals[:6]] == ["M03", "M04", "M02", "M10", "M11", "M07"]
    assert panel_hash(made.rows("test")) == "eec69bbd93b5"


# Search


def test_words_are_cut_as_lucenes_analyser_cuts_them() -> None:
    assert split_words("The Women's 3.5mm dash-cam, U.S.A. 1,000 it's") == [
        "women", "3.5mm", "dash", "cam", "u.s.a", "1,000"
    ]  # fmt: skip


def test_search_ranks_by_bm25_and_finds_nothing_without_a_common_word() -> None:
    search = ProductSearch(["red chairs", "a blue lamp", "one red lamp with a long shade", "a lamp and a lamp"])
    assert search.rank("chair", 10) == (0,)  # a stem
    assert search.rank("lamps", 10) == (3, 1, 2)  # twice, then the shorter text
    assert search.rank("red lamp", 2) == (2, 0)
    assert search.rank("sofa", 10) == search.rank("the of", 10) == search.rank("", 10) == ()


def test_equal_texts_come_in_the_order_of_the_catalogue() -> None:
    assert ProductSearch(["oak lamp", "tin mug", "oak lamp"]).rank("lamp", 10) == (0, 2)


# The score


def score(goal: Goal = GOAL, bought: Product = SCARF, price: float = 24.0, **chosen: str) -> float:
    return judge(goal, SCARF, bought, price, chosen).total


def test_the_score_counts_attributes_options_and_price() -> None:
    # 2 attributes, 2 options and the price are wanted: fifths
    assert score(color="dark red", size="large") == 1.0
    assert score(color="dark red") == pytest.approx(4 / 5)
    assert score(color="dark red", size="large", price=30.01) == pytest.approx(4 / 5)
    assert score() == pytest.approx(3 / 5)
    assert score(bought=replace(SCARF, attributes=(), features=("",))) == pytest.approx(1 / 5)  # the price alone


def test_without_wanted_options_their_share_is_full() -> None:
    judged = judge(replace(GOAL, options=()), SCARF, SCARF, 24.0, {"size": "small"})
    assert (judged.total, judged.options) == (1.0, 1.0)


def test_an_attribute_is_known_reads_alike_or_stands_on_the_page() -> None:
    assert has_attribute(SCARF, "long lasting")
    assert has_attribute(SCARF, "soft touches")  # "soft" is common, and "soft touch" is nearly the same
    assert has_attribute(SCARF, "made of wool")  # a feature
    assert has_attribute(SCARF, "washed by hand")  # the description
    assert not has_attribute(SCARF, "water proof")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("essential oil", "essential oils", True),  # ratio of the two: 2 * 13 / 27 = 96
        ("xl", "('size', 'xl')", True),  # the words of one stand in the other: 100
        ("pack of 2", "pack of 3", True),  # "pack of" against "pack of 2": 2 * 7 / 16 = 87.5
        ("tea bag", "tea tree", False),  # "tea" against "tea bag": 2 * 3 / 10 = 60
        ("RED!", "red", True),  # neither case nor punctuation
        ("café", "caf", True),  # letters beyond ASCII are dropped
        ("", "red", False),
    ],
)
def test_alike_is_the_rounded_token_set_ratio_above_85(one: str, other: str, same: bool) -> None:
    assert alike(one, other) is same
    assert alike(other, one) is same


def test_colours_are_compared_by_their_plain_name_and_as_published_not_always_kindly() -> None:
    assert plain_color("navy blue") == "blue"  # the first of the list, not of the text
    assert plain_color("striped") == "striped"
    assert plain_color("rectangular") == "tan"
    red = replace(GOAL, options=(("color", "red"),))
    assert score(red, color="dark red") == pytest.approx(3 / 4)  # dark comes before red
    assert score(red, color="bright red") == 1.0
    tan = replace(GOAL, options=(("shape", "rectangular"),))
    assert score(tan, shape="rectangular") == pytest.approx(3 / 4)  # chosen as wanted, and never counted


def test_wishes_of_people_are_values_without_names() -> None:
    assert score(replace(GOAL, options=(("", "navy"),)), color="navy blue") == pytest.approx(3 / 4)  # blue is not navy
    assert score(replace(GOAL, options=(("", "blue"),)), color="navy blue") == 1.0


# Titles and shares from the tests of the original, which has its nouns from a tagger.
SHOE = "adidas Unisex-Adult D.o.n. Issue 2 {} Shoe"
CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
LEAD = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"


@pytest.mark.parametrize(
    ("wanted", "bought", "share"),
    [
        (SHOE.format("Basketball"), SHOE.format("Indoor Court"), 6 / 7),
        (f"{CORD} Home Theater System Subwoofer", LEAD, 5 / 16),
        (CORD, LEAD, 2 / 12),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob", "Stainless Steel Eyebrow Tweezers (Silver)", 0),
        ("2 + 4", "anything", 0.2),  # no nouns are wanted
    ],
)
def test_titles_share_as_many_nouns_as_in_the_original(wanted: str, bought: str, share: float) -> None:
    assert shared_nouns(wanted, bought) == pytest.approx(share)


def test_the_type_of_a_product_is_the_same_by_query_by_departments_or_by_title() -> None:
    other = replace(SCARF, query="gloves", categories="Toys", title="Wool Cap")  # 1 of 6 nouns: 0.17
    assert type_factor(SCARF, other) == 0.5
    assert type_factor(SCARF, replace(other, query="scarves")) == 1.0
    assert type_factor(SCARF, replace(other, categories="Women › Scarves › Silk")) == 1.0  # noqa: RUF001
    assert type_factor(SCARF, replace(other, categories="Clothing › Men")) == 0.5  # noqa: RUF001
    assert type_factor(SCARF, replace(other, title="Wool Winter Cap")) == 1.0  # 2 of 6
    long = replace(SCARF, title="Wool Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa")  # 1 of 11
    assert type_factor(long, SCARF) == 0.1
    assert type_factor(SCARF, replace(SCARF, title="Gloves")) == 0.0  # whatever query and departments say


# The real data

REAL = os.environ.get("AGENT_R1_WEBSHOP")
real = pytest.mark.skipif(REAL is None, reason="AGENT_R1_WEBSHOP does not name a folder with the data")

# Goals 0 to 19 of the original engine: what was bought, without options, and what it paid, as logs of it have it.
PURCHASES = {
    0: ("B096MM7XM4", 0.0), 1: ("B09QCP4579", 5 / 7), 2: ("B099WH1RTM", 4 / 6), 3: ("B09LSKQF8C", 1.0),
    4: ("B08G8DXR5N", 0.2 / 9), 5: ("B09ND8P2QR", 2 / 7), 6: ("B09Q5ZHRVM", 4 / 7), 7: ("B09KP78G37", 0.2 / 6),
    8: ("B09M63B87V", 0.5 / 11), 9: ("B01HQTWL6S", 0.0), 10: ("B099231V35", 3 / 5), 11: ("B09QQP3356", 3 / 5),
    12: ("B07WMMYB6G", 1 / 6), 14: ("B08W568RSB", 2 / 6), 15: ("B09ND8P2QR", 0.0), 16: ("B09NNMV9LN", 5 / 9),
    17: ("B09M63B87V", 0.0), 18: ("B09ND8P2QR", 0.0), 19: ("B09PJ5ZXGH", 0.1 / 5),
}  # fmt: skip


@pytest.fixture
def shop() -> Shop:
    assert REAL is not None
    return open_shop(Path(REAL).resolve())


@real
def test_there_are_1000_products_and_6910_goals_in_two_fixed_panels(shop: Shop) -> None:
    catalogue = shop.catalogue
    assert (len(catalogue.products), len(catalogue.goals), len(catalogue.human)) == (1000, 6910, 13)
    assert data.goals_hash(catalogue.goals) == data.GOALS_SHA256
    assert panel_hash(task.rows("test", path=REAL)) == "75cb9472838a"
    assert panel_hash(task.rows("train", path=REAL)) == "beddfba5cfa2"


@real
def test_goals_come_in_the_order_of_the_original(shop: Shop) -> None:
    first = [goal.text.partition(", and price")[0] for goal in shop.catalogue.goals[:4]]
    assert first == [
        'Find me double sided, machine washable decorative pillows with printing technology with size: 28" x 28"',
        "Find me butt lifting, light weight women's shorts with high waist, tummy control with color: black, and size: "
        "3x-large",
        "Find me ready hang wall art with solid wood for living room with color: turtles and african american couple, "
        "and size: 8x10 inch",
        "Find me dual band streaming media players with quad core",
    ]


@real
@pytest.mark.parametrize("number", PURCHASES)
def test_purchases_are_paid_as_the_original_paid_them(shop: Shop, number: int) -> None:
    asin, paid = PURCHASES[number]
    assert task.score_of(shop.catalogue.goals[number], asin, {}, shop.catalogue).total == pytest.approx(paid)


@real
def test_options_are_paid_as_the_original_paid_them(shop: Shop) -> None:
    goal, color = shop.catalogue.goals[4], {"color": "xnj-tshirt334-gray"}
    for chosen, paid in (({}, 7 / 9), ({"size": "x-large"}, 8 / 9), (color | {"size": "x-large"}, 1.0)):
        assert task.score_of(goal, goal.asin, chosen, shop.catalogue).total == pytest.approx(paid)


@real
def test_a_search_finds_what_the_original_found_in_its_order(shop: Shop) -> None:
    found = [product.asin for product in shop.shown(Place(page="results", query="women jumpsuits"))]
    assert found[:7] == [
        "B09NDS8F4V", "B09PVNLVRW", "B09RV4TXKJ", "B099WX3CV5", "B09Q37JQZ6", "B09QPX97VW", "B09NSC5VDG"
    ]  # fmt: skip


@real
def test_the_documents_of_the_index_are_the_scraped_records_after_loading(shop: Shop, tmp_path: Path) -> None:
    """Scraped records, put together again from the index, make the same catalogue; derived fields are the same too."""
    assert REAL is not None
    file = Path(REAL) / f"{data.DOCUMENTS}.gz"
    if not file.is_file():
        pytest.skip(f"there is no {file.name}")
    documents = list(json_lines(file))
    for document, product in zip(documents, shop.catalogue.products.values(), strict=True):
        loaded = document["product"]
        assert product.searchable == document["contents"]
        assert {name: list(values) for name, values in product.options.items()} == loaded["options"]
        assert (product.price_tag, list(product.features)) == (loaded["Price"], loaded["BulletPoints"])
        assert list(product.attributes) == loaded["Attributes"]
    records = [d["product"] | {"pricing": " - ".join(f"${p:,}" for p in d["product"]["pricing"])} for d in documents]
    (tmp_path / data.ITEMS).write_text(json.dumps(records))
    (tmp_path / f"{data.ATTRIBUTES}.gz").write_bytes((Path(REAL) / f"{data.ATTRIBUTES}.gz").read_bytes())
    assert open_catalogue(tmp_path).goals == shop.catalogue.goals
    said: list[str] = []
    data.prepare(tmp_path, said.append)  # nothing is fetched, all is checked
    assert said == [f"{tmp_path}: 1,000 products, 6,910 goals"]


@real
def test_both_buyers_do_on_the_real_goals_what_they_are_said_to_do(shop: Shop) -> None:
    goals = random.Random(0).sample(shop.catalogue.goals, 200)
    knows = [task.score_of_visit(shop, goal, knowing_buyer(shop, goal) or []).total for goal in goals]
    reads = [task.score_of_visit(shop, goal, reading_buyer(shop, goal.text, Look())).total for goal in goals]
    assert sum(knows) / 200 > 0.95
    assert 0.7 < sum(reads) / 200 < sum(knows) / 200
    assert len(task.demos(50, seed=0, path=REAL)) == len(task.reader_demos(50, seed=0, path=REAL)) == 50
