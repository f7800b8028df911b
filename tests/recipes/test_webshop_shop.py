"""The shop of the recipe `webshop`: actions, places, pages and the env. Rows, rewards, buyers, files:
`test_webshop_task.py`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.envs.check import check_env
from agent_r1.errors import ConfigError
from agent_r1.recipes.webshop import synthetic
from agent_r1.recipes.webshop.data import Catalogue
from agent_r1.recipes.webshop.env import WebShop
from agent_r1.recipes.webshop.pages import Look, cut, page
from agent_r1.recipes.webshop.shop import MAX_QUERY_CHARS, CannotDo, Place, Shop, read_action
from agent_r1.types import TaskRow
from tests.recipes.test_webshop import SCARF

# Actions and places


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("search[oak lamp]", ("search", "oak lamp")),
        ("  Click[Buy  Now]\n", ("click", "buy now")),
        ("I need a lamp.\nsearch [lamp]", ("search", "lamp")),
        ("click[< Prev]", ("click", "< prev")),
        ("search[size [us] 7]", ("search", "size [us] 7")),
        ("search[click [pens]", ("search", "click [pens")),
        ("search[a [new] research [kit]]", ("search", "a [new] research [kit]")),
    ],
)
def test_the_last_line_is_the_action(said: str, action: tuple[str, str]) -> None:
    assert read_action(said) == action


@pytest.mark.parametrize("said", ["", "buy it", "search[]", "click[ ]", "search lamp", "search[a]\nplease", "find[a]"])
def test_text_without_an_action_is_refused(said: str) -> None:
    with pytest.raises(CannotDo, match=r"Say search\[words\] or click\[button\]\."):
        read_action(said)


def test_two_actions_are_refused() -> None:
    for said in ("search[lamp] click[buy now]", "search[lamp], then Click [buy now]", "click[red]click[buy now]"):
        with pytest.raises(CannotDo, match="One action at a time"):
            read_action(said)


def test_long_queries_are_cut() -> None:
    env = synthetic.SyntheticShop()
    env.begin(synthetic.rows("test")[0])
    env.reply(f"search[lamp {'x' * 200_000}]")
    assert env.reply("click[next >]").info["anchor"] == f"results 1 lamp {'x' * (MAX_QUERY_CHARS - 5)}"
    assert read_action(f"search[{'x' * (MAX_QUERY_CHARS - 1)} y]") == ("search", "x" * (MAX_QUERY_CHARS - 1))


def walk(shop: Shop, *actions: str) -> Place:
    place = Place()
    for action in actions:
        place = shop.go(place, action)
    return place


def test_a_purchase_goes_through_search_results_and_item() -> None:
    shop = synthetic.shop()
    results = walk(shop, "search[Oak Lamp]")
    assert (results.page, results.query, results.number) == ("results", "oak lamp", 1)
    item = shop.go(results, "click[m00]")
    assert (item.page, item.asin) == ("item", "M00")
    chosen = walk(shop, "search[oak lamp]", "click[m00]", "click[red]", "click[Blue]")
    assert chosen.chosen == (("color", "blue"),)  # the later choice
    assert shop.go(chosen, "click[buy now]") == replace(chosen, page="bought")


def test_result_pages_turn_and_are_remembered() -> None:
    shop = synthetic.shop()  # all 12 products are easy to clean
    second = walk(shop, "search[easy clean]", "click[next >]")
    assert len(shop.shown(second)) == 2
    assert shop.buttons(second)[-2:] == ["< prev", "back to search"]  # no next
    assert shop.go(second, "click[< prev]").number == 1
    item = shop.go(second, f"click[{shop.shown(second)[0].asin}]")
    assert shop.go(item, "click[< prev]") == second
    assert shop.go(item, "click[back to search]") == Place()


def scarves(count: int) -> Shop:
    """Equal but for their names, so that a search has them in this order."""
    return Shop(Catalogue.of([replace(SCARF, asin=f"B{number:02}") for number in range(count)]))


def test_a_search_finds_fifty_at_most() -> None:
    shop = scarves(51)
    last = walk(shop, "search[scarf]", *["click[next >]"] * 4)
    assert (len(shop.found(last)), shop.shown(last)[-1].asin) == (50, "B49")
    assert "next >" not in shop.buttons(last)


def test_details_lead_back_to_the_item_and_its_choices() -> None:
    shop = synthetic.shop()
    item = walk(shop, "search[oak lamp]", "click[M00]", "click[red]")
    for detail in ("description", "features", "reviews"):
        there = shop.go(item, f"click[{detail}]")
        assert (there.page, there.detail) == ("detail", detail)
        assert shop.go(there, "click[< prev]") == item
        with pytest.raises(CannotDo):
            shop.go(there, "click[buy now]")
    with pytest.raises(CannotDo, match=r"There is no \[attributes\] here\."):
        shop.go(item, "click[attributes]")
    open_shelf = Shop(synthetic.shop().catalogue, show_attributes=True)
    assert page(open_shelf, open_shelf.go(item, "click[attributes]"), Look()).startswith("easy clean\n")


def test_a_search_may_start_anywhere_and_forgets_the_item() -> None:
    shop = synthetic.shop()
    assert walk(shop, "search[oak lamp]", "click[M00]", "click[red]", "search[mug]") == Place(
        page="results", query="mug"
    )


def test_a_value_of_two_options_selects_the_later_one() -> None:
    odd = replace(SCARF, options={"color": ("one", "two"), "size": ("two",)})
    shop = Shop(Catalogue.of([odd]))
    assert walk(shop, "search[scarf]", f"click[{odd.asin}]", "click[two]").chosen == (("size", "two"),)


def test_anchors_are_equal_exactly_for_equal_states() -> None:
    shop = synthetic.shop()
    one = walk(shop, "search[oak lamp]", "click[M00]", "click[red]")
    other = walk(shop, "search[lamp]", "click[M00]", "click[blue]", "click[red]")
    assert one.anchor == other.anchor == "item M00 color: red"
    assert walk(shop, "search[oak lamp]").anchor != walk(shop, "search[lamp]").anchor
    assert Place().anchor == "start"


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 11))
def test_every_button_leads_somewhere_and_every_page_shows_its_buttons(choices: list[int], start: int) -> None:
    shop = synthetic.shop()
    place = walk(shop, f"search[{synthetic.products()[start].title}]")
    for number in choices:
        buttons = shop.buttons(place)
        if not buttons:
            break
        shown = page(shop, place, Look())
        assert all(f"[{button}]" in shown for button in buttons)
        place = shop.go(place, f"click[{buttons[number % len(buttons)]}]")


# Pages


def test_pages_are_short_and_list_their_buttons() -> None:
    shop = Shop(Catalogue.of([SCARF]))
    results = walk(shop, "search[scarf]")
    assert page(shop, results, Look(title=20)) == (
        "Page 1 of 1\n[B000000001] Northwind Women W... $24.0\n[back to search]"
    )
    assert page(shop, walk(shop, "search[nothing here]"), Look()) == "Nothing was found.\n[back to search]"
    item = shop.go(results, "click[B000000001]")
    assert page(shop, item, Look(item_title=14, values=22)) == (
        "Northwind W...\n$24.0\nsize: [small] [large]\ncolor: [dark red] and 1 more\n"
        "[description] [features] [reviews] [buy now] [< prev] [back to search]"
    )
    assert (
        page(shop, shop.go(item, "click[features]"), Look(text=19)) == "machine washable...\n[< prev] [back to search]"
    )
    assert page(shop, shop.go(item, "click[description]"), Look()) == (
        "A scarf that can be washed by hand.\n[< prev] [back to search]"
    )
    assert page(shop, shop.go(item, "click[reviews]"), Look()).startswith("There is nothing under reviews.")
    assert shop.go(item, "click[navy blue]").chosen == (("color", "navy blue"),)  # not shown, and still there


def test_page_limits_have_a_minimum() -> None:
    shop = Shop(Catalogue.of([SCARF]))
    item = walk(shop, "search[scarf]", "click[B000000001]")
    assert "\nsize: 2 values\ncolor: 2 values\n" in page(shop, item, Look(values=4))
    for setting in ("title", "item_title", "values", "text"):
        with pytest.raises(ConfigError, match=f"{setting}_chars=3 "):
            Look(**{setting: 3})
    with pytest.raises(ConfigError, match="text_chars=0"):
        WebShop(text_chars=0)


@given(st.text(), st.integers(4, 50))
def test_cut_text_respects_its_limit(text: str, limit: int) -> None:
    assert len(cut(text, limit)) <= limit


# The env


def play(env: WebShop, row: TaskRow, *actions: str) -> list[str]:
    shown = [env.begin(row)]
    for action in actions:
        shown.append(env.reply(action).text)
    return shown


def test_pages_already_in_the_conversation_are_not_repeated() -> None:
    [row, *_] = synthetic.rows("test")
    shown = play(
        synthetic.SyntheticShop(),
        row,
        "search[oak lamp]",
        "click[M00]",
        "click[red]",
        "click[description]",
        "click[< prev]",
        "click[< prev]",
        "click[M00]",
    )
    assert shown[0] == row.prompt[0]["content"]
    assert shown[1].startswith("Page 1 of 1\n[M00] oak lamp $5.0\n")
    assert shown[3] == "Chosen: color: red."
    assert shown[5] == "M00 again. Chosen: color: red."
    assert shown[6] == "Page 1 of the results again."
    assert shown[7] == "M00 again. Not yet: color."


def test_a_product_is_recognised_across_searches() -> None:
    [row, *_] = synthetic.rows("test")
    shown = play(
        synthetic.SyntheticShop(), row, "search[oak lamp]", "click[M00]", "search[oak]", "click[M00]", "click[< prev]"
    )
    assert shown[3].startswith("Page 1 of 1")
    assert shown[4:] == ["M00 again. Not yet: color.", "Page 1 of the results again."]


def test_episodes_share_no_state() -> None:
    [row, *_] = synthetic.rows("test")
    env, said = synthetic.SyntheticShop(), ("search[oak lamp]", "click[M00]", "click[red]")
    assert play(env, row, *said) == play(env, row, *said)


def test_full_pages_are_shown_every_time_on_request() -> None:
    [row, *_] = synthetic.rows("test")
    shown = play(
        synthetic.SyntheticShop(full_pages=True), row, "search[oak lamp]", "click[M00]", "click[red]", "nonsense"
    )
    assert "color (chosen: red): [red] [blue] [green]" in shown[3]
    assert shown[4] == f"Say search[words] or click[button].\n{shown[3]}"


def test_refusals_are_one_line_and_do_not_accumulate() -> None:
    [row, *_] = synthetic.rows("test")
    shown = play(
        synthetic.SyntheticShop(), row, "hm", "hm", "click[buy now]", "search[lamp]", "click[x" + "y" * 500 + "]"
    )
    assert shown[1] == shown[2] == "Say search[words] or click[button]."
    assert shown[3] == "There is no [buy now] here."
    assert len(shown[5]) < 100


def test_the_env_keeps_the_contract() -> None:
    row = synthetic.rows("test")[0]
    said = ["search[oak lamp]", "hm", "click[M00]", "click[red]", "click[features]", "click[< prev]", "click[buy now]"]
    asyncio.run(check_env(synthetic.SyntheticShop, row, said))


def test_transitions_record_their_anchor_and_the_last_the_purchase() -> None:
    [row, *_] = synthetic.rows("test")
    env = synthetic.SyntheticShop()
    env.begin(row)
    replies = [env.reply(action) for action in ("search[oak lamp]", "click[M00]", "hm", "click[red]", "click[buy now]")]
    assert [reply.info["anchor"] for reply in replies] == [
        "start", "results 1 oak lamp", "item M00", "item M00", "item M00 color: red"
    ]  # fmt: skip
    assert [bool(reply.info.get("refused")) for reply in replies] == [False, False, True, False, False]
    assert [reply.done for reply in replies] == [False] * 4 + [True]
    assert replies[-1].info["bought"] == {"asin": "M00", "options": {"color": "red"}}
    assert json.loads(json.dumps(replies[-1].info)) == replies[-1].info
    assert all(reply.reward == 0 for reply in replies)
