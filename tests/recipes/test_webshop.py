"""The recipe `webshop`: products, goals, search and the published score. The shop itself: `test_webshop_shop.py`; the
real data: `test_webshop_real.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.data.panels import panel_hash
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.webshop import synthetic, task
from agent_r1.recipes.webshop.data import PACKAGES, Catalogue
from agent_r1.recipes.webshop.goals import NO_BOUND, Goal, draw_prices, human_goals, synthetic_goals
from agent_r1.recipes.webshop.products import HumanInstruction, Product, read_products
from agent_r1.recipes.webshop.score import alike, has_attribute, judge, plain_color, shared_nouns, type_factor
from agent_r1.recipes.webshop.search import ProductSearch, split_words

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


def test_parsed_and_raw_prices_agree() -> None:
    assert read_one(scraped(pricing=[19.99, 27.99])).prices == read_one(scraped(pricing="$19.99 - $27.99")).prices


def test_duplicates_and_records_without_a_valid_asin_are_skipped() -> None:
    records = [scraped(), scraped(name="again"), scraped(asin="nan"), scraped(asin="B0000000021")]
    assert [product.title for product in read_products(records, {}, {}, "test")] == ["Oak Chair"]


def test_a_record_that_is_not_a_product_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"items\.json record 2 .*KeyError"):
        read_products([scraped(), {"asin": "B1"}], {}, {}, "items.json")


@pytest.mark.parametrize(
    ("pricing", "prices"),
    [
        ("19.99", (100.0,)),  # of what has no dollar sign the original reads nothing
        ("$free", (100.0,)),
        ("$19.99 - $", (19.99,)),
        ("$.50", (0.5,)),
        ([], (100.0,)),
    ],
)
def test_a_price_that_cannot_be_read_is_unknown(pricing: Any, prices: tuple[float, ...]) -> None:
    assert read_one(scraped(pricing=pricing)).prices == prices


def test_empty_lists_count_as_missing() -> None:
    chair = read_one(scraped(small_description=[], customization_options={"Size": []}), {"instruction": "a chair"})
    assert (chair.features, chair.options) == (("",), {})
    assert len(synthetic_goals([chair], draw_prices([chair]))) == 1  # of no values there would be no combination


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("full_description", None),
        ("small_description", None),
        ("small_description", ["four legs", None]),
        ("product_category", 7),
        ("instructions", [{"instruction": None, "instruction_attributes": [], "instruction_options": []}]),
    ],
)
def test_a_field_that_is_not_text_is_an_error_that_names_it(field: str, value: Any) -> None:
    name = "instruction" if field == "instructions" else field
    with pytest.raises(DataError, match=rf"items\.json record 2 .*{name} is (None|7)"):
        read_products([scraped(asin="B1"), scraped(**{field: value})], {}, {}, "items.json")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_when_the_catalogue_is_built(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"{package}.*agent-r1\[webshop\]"):
        Catalogue.of([SCARF])


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


def test_no_bound_is_stated_above_all_round_prices() -> None:
    dear = replace(SCARF, options={}, prices=(985.0,))  # only 990 is above
    [goal] = synthetic_goals([dear], draw_prices([dear]))
    assert (goal.text, goal.price_bound) == ("Find me soft touch scarves", NO_BOUND)


def test_a_price_range_is_resolved_once_to_a_price_within_it() -> None:
    ranges = [replace(SCARF, asin=f"B{number}", prices=(20.0, 60.0)) for number in range(20)]
    prices = draw_prices([*ranges, SCARF])
    drawn = [prices[product.asin] for product in ranges]
    assert all(20 <= price <= 60 for price in drawn)
    assert len(set(drawn)) == 20
    assert prices[SCARF.asin] == 24.0
    assert draw_prices([*ranges, SCARF]) == prices


def test_train_and_test_goals_are_disjoint_even_with_duplicate_options() -> None:
    doubled = replace(SCARF, options={"color": ("red", "blue", "red"), "size": ("small", "large", "large")})
    catalogue = Catalogue.of([doubled])
    assert len(catalogue.goals) == 9  # of four different ones
    for num_test in range(1, 9):
        train, test = (task.named_goals(split, catalogue, num_test) for split in ("train", "test"))
        assert [goal for _, goal in test] == list(catalogue.goals[:num_test])
        assert not {goal.text for _, goal in train} & {goal.text for _, goal in test}
        assert len({goal.text for _, goal in [*train, *test]}) == 4
        assert all(catalogue.goals[int(name.removeprefix("goal-"))] == goal for name, goal in train)


def test_human_instructions_become_goals_if_they_can_be_scored() -> None:
    wishes = (
        HumanInstruction(text="i want a soft scarf.", attributes=("soft touch",), options=("large",)),
        HumanInstruction(text="a scarf", attributes=(), options=()),
    )
    wanted = replace(SCARF, human=wishes)
    [goal] = human_goals([wanted], draw_prices([wanted]))
    assert goal.text.startswith("i want a soft scarf, and price lower than ")
    assert goal.options == (("", "large"),)


def test_goals_are_the_same_in_every_process() -> None:
    assert [goal.asin for goal in synthetic.shop().catalogue.goals[:6]] == ["M03", "M04", "M02", "M10", "M11", "M07"]
    assert panel_hash(synthetic.rows("test")) == "eec69bbd93b5"


# Search


def test_words_are_split_as_by_lucenes_analyser() -> None:
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
    assert score(color="dark red", size="large", price=30.0) == 1.0  # the bound itself may be paid
    assert score() == pytest.approx(3 / 5)
    assert score(bought=replace(SCARF, attributes=(), features=("",))) == pytest.approx(1 / 5)  # the price alone


def test_goals_without_options_give_full_option_credit() -> None:
    judged = judge(replace(GOAL, options=()), SCARF, SCARF, 24.0, {"size": "small"})
    assert (judged.total, judged.options) == (1.0, 1.0)


def test_attributes_match_by_list_by_similarity_or_by_page_text() -> None:
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


def test_colours_are_compared_by_base_name_as_in_the_original() -> None:
    assert plain_color("navy blue") == "blue"  # the first of the list, not of the text
    assert plain_color("striped") == "striped"
    assert plain_color("rectangular") == "tan"
    red = replace(GOAL, options=(("color", "red"),))
    assert score(red, color="dark red") == pytest.approx(3 / 4)  # dark comes before red
    assert score(red, color="bright red") == 1.0
    tan = replace(GOAL, options=(("shape", "rectangular"),))
    assert score(tan, shape="rectangular") == pytest.approx(3 / 4)  # chosen as wanted, and never counted


def test_human_options_are_values_without_names() -> None:
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
    tenth = replace(SCARF, title=long.title.removesuffix(" Kappa"))
    assert type_factor(tenth, other) == 0.5  # 1 of 10 is not hardly
    fifth = replace(SCARF, title="Wool Alpha Beta Gamma Delta")
    assert type_factor(fifth, other) == 0.5  # 1 of 5 is not the same kind
    assert type_factor(SCARF, replace(SCARF, title="Gloves")) == 0.0  # whatever query and departments say
