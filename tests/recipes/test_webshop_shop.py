"""The shop of the recipe `webshop`: actions, places, pages, the env, rewards of whole episodes, scripted
buyers, and the files a shop is made of."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.agent.check import check_env
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.webshop import data, made, task
from agent_r1.recipes.webshop.buyers import knowing_buyer, query_of, reading_buyer
from agent_r1.recipes.webshop.data import Catalogue
from agent_r1.recipes.webshop.env import WebShop
from agent_r1.recipes.webshop.pages import Look, cut, page
from agent_r1.recipes.webshop.shop import BUY, CannotDo, Place, Shop, read_action
from agent_r1.tasks.panel import panel_hash
from agent_r1.types import Step, StopReason, TaskRow, Trajectory
from tests.recipes.test_webshop import GOAL, SCARF, scraped

# Actions and places


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("search[oak lamp]", ("search", "oak lamp")),
        ("  Click[Buy  Now]\n", ("click", "buy now")),
        ("I need a lamp.\nsearch [lamp]", ("search", "lamp")),
        ("click[< Prev]", ("click", "< prev")),
        ("search[size [us] 7]", ("search", "size [us] 7")),
    ],
)
def test_the_last_line_is_the_action(said: str, action: tuple[str, str]) -> None:
    assert read_action(said) == action


@pytest.mark.parametrize("said", ["", "buy it", "search[]", "click[ ]", "search lamp", "search[a]\nplease", "find[a]"])
def test_what_is_no_action_is_refused(said: str) -> None:
    with pytest.raises(CannotDo, match=r"Say search\[words\] or click\[button\]\."):
        read_action(said)


def test_two_actions_are_refused() -> None:
    with pytest.raises(CannotDo, match="One action at a time"):
        read_action("search[lamp] click[buy now]")


def walk(shop: Shop, *actions: str) -> Place:
    place = Place()
    for action in actions:
        place = shop.go(place, action)
    return place


def test_a_purchase_goes_from_search_over_results_and_item_to_done() -> None:
    shop = made.shop()
    results = walk(shop, "search[Oak Lamp]")
    assert (results.page, results.query, results.number) == ("results", "oak lamp", 1)
    item = shop.go(results, "click[m00]")
    assert (item.page, item.asin) == ("item", "M00")
    chosen = walk(shop, "search[oak lamp]", "click[m00]", "click[red]", "click[Blue]")
    assert chosen.chosen == (("color", "blue"),)  # the later choice
    assert shop.go(chosen, "click[buy now]") == replace(chosen, page="bought")


def test_pages_of_results_turn_and_remember() -> None:
    shop = made.shop()  # all 12 products are easy to clean
    second = walk(shop, "search[easy clean]", "click[next >]")
    assert len(shop.shown(second)) == 2
    assert shop.buttons(second)[-2:] == ["< prev", "back to search"]  # no next
    assert shop.go(second, "click[< prev]").number == 1
    item = shop.go(second, f"click[{shop.shown(second)[0].asin}]")
    assert shop.go(item, "click[< prev]") == second
    assert shop.go(item, "click[back to search]") == Place()


def test_details_lead_back_to_the_item_and_its_choices() -> None:
    shop = made.shop()
    item = walk(shop, "search[oak lamp]", "click[M00]", "click[red]")
    for detail in ("description", "features", "reviews"):
        there = shop.go(item, f"click[{detail}]")
        assert (there.page, there.detail) == ("detail", detail)
        assert shop.go(there, "click[< prev]") == item
        with pytest.raises(CannotDo):
            shop.go(there, "click[buy now]")
    with pytest.raises(CannotDo, match=r"There is no \[attributes\] here\."):
        shop.go(item, "click[attributes]")
    open_shelf = Shop(made.shop().catalogue, show_attributes=True)
    assert page(open_shelf, open_shelf.go(item, "click[attributes]"), Look()).startswith("easy clean\n")


def test_a_search_may_start_anywhere_and_forgets_the_item() -> None:
    shop = made.shop()
    assert walk(shop, "search[oak lamp]", "click[M00]", "click[red]", "search[mug]") == Place(
        page="results", query="mug"
    )


def test_a_value_of_two_options_belongs_to_the_later_one() -> None:
    odd = replace(SCARF, options={"color": ("one", "two"), "size": ("two",)})
    shop = Shop(Catalogue.of([odd]))
    assert walk(shop, "search[scarf]", f"click[{odd.asin}]", "click[two]").chosen == (("size", "two"),)


def test_anchors_are_alike_for_the_same_state_and_differ_for_others() -> None:
    shop = made.shop()
    one = walk(shop, "search[oak lamp]", "click[M00]", "click[red]")
    other = walk(shop, "search[lamp]", "click[M00]", "click[blue]", "click[red]")
    assert one.anchor == other.anchor == "item M00 color: red"
    assert walk(shop, "search[oak lamp]").anchor != walk(shop, "search[lamp]").anchor
    assert Place().anchor == "start"


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 11))
def test_every_button_leads_somewhere_and_every_page_shows_its_buttons(choices: list[int], start: int) -> None:
    shop = made.shop()
    place = walk(shop, f"search[{made.products()[start].title}]")
    for number in choices:
        buttons = shop.buttons(place)
        if not buttons:
            break
        shown = page(shop, place, Look())
        assert all(f"[{button}]" in shown for button in buttons)
        place = shop.go(place, f"click[{buttons[number % len(buttons)]}]")


# Pages


def test_pages_are_short_and_say_what_can_be_clicked() -> None:
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
    assert page(shop, shop.go(item, "click[reviews]"), Look()).startswith("There is nothing under reviews.")
    assert shop.go(item, "click[navy blue]").chosen == (("color", "navy blue"),)  # not shown, and still there


@given(st.text(), st.integers(4, 50))
def test_cut_text_is_never_longer_than_it_may_be(text: str, limit: int) -> None:
    assert len(cut(text, limit)) <= limit


# The env


def play(env: WebShop, row: TaskRow, *actions: str) -> list[str]:
    shown = [env.begin(row)]
    for action in actions:
        shown.append(env.reply(action).text)
    return shown


def test_what_stands_in_the_conversation_is_not_shown_again() -> None:
    [row, *_] = made.rows("test")
    shown = play(
        made.MadeShop(),
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


def test_full_pages_are_shown_every_time_on_request() -> None:
    [row, *_] = made.rows("test")
    shown = play(made.MadeShop(full_pages=True), row, "search[oak lamp]", "click[M00]", "click[red]", "nonsense")
    assert "color (chosen: red): [red] [blue] [green]" in shown[3]
    assert shown[4] == f"Say search[words] or click[button].\n{shown[3]}"


def test_refusals_are_one_line_and_never_pile_up() -> None:
    [row, *_] = made.rows("test")
    shown = play(made.MadeShop(), row, "hm", "hm", "click[buy now]", "search[lamp]", "click[x" + "y" * 500 + "]")
    assert shown[1] == shown[2] == "Say search[words] or click[button]."
    assert shown[3] == "There is no [buy now] here."
    assert len(shown[5]) < 100


def test_the_env_keeps_the_contract() -> None:
    row = made.rows("test")[0]
    said = ["search[oak lamp]", "hm", "click[M00]", "click[red]", "click[features]", "click[< prev]", "click[buy now]"]
    asyncio.run(check_env(made.MadeShop, row, said))


def test_every_transition_tells_where_the_action_was_taken_and_the_last_what_was_bought() -> None:
    [row, *_] = made.rows("test")
    env = made.MadeShop()
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


# Rows, rewards, demonstrations


def rewarded(row: TaskRow, *actions: str) -> dict[str, float]:
    env = made.MadeShop()
    env.begin(row)
    steps = [
        Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], info=env.reply(action).info)
        for action in actions
    ]
    played = Trajectory(row_id=row.row_id, trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)
    return asyncio.run(made.reward(row, played))


def test_every_made_goal_is_paid_in_full_when_it_is_met() -> None:
    for row in made.rows("train") + made.rows("test"):
        [(_, color)] = row.ground_truth["options"]
        asin = row.ground_truth["asin"]
        title = made.shop().catalogue.products[asin].title
        parts = rewarded(row, f"search[{title}]", f"click[{asin}]", f"click[{color}]", "click[buy now]")
        assert parts["reward"] == parts["success"] == 1.0
        assert set(parts) == {"reward", "success", "bought", "type", "attributes", "options", "price", "refused"}


def test_a_poor_purchase_earns_a_part_and_none_earns_nothing() -> None:
    row = next(row for row in made.rows("train") if row.ground_truth["asin"] == "M01")  # a tin lamp
    [(_, color)] = row.ground_truth["options"]
    cheap = rewarded(row, "search[oak lamp]", "hm", "click[M00]", f"click[{color}]", "click[buy now]")
    assert (cheap["reward"], cheap["refused"]) == (1.0, 1.0)  # an oak lamp is a lamp too: same type, attribute, colour
    assert rewarded(row, "search[oak lamp]", "click[M00]", "click[buy now]")["reward"] == pytest.approx(2 / 3)
    tin_box = rewarded(row, "search[tin box]", "click[M07]", f"click[{color}]", "click[buy now]")
    assert (tin_box["type"], tin_box["price"]) == (1.0, 0.0)  # half of the nouns are the same; 54 dollars
    assert rewarded(row, "search[tin lamp]")["reward"] == rewarded(row)["reward"] == 0.0


def test_rows_have_fixed_names_and_splits_do_not_overlap() -> None:
    train, test = made.rows("train"), made.rows("test")
    assert (len(train), len(test)) == (28, 8)
    assert [row.row_id for row in test] == [f"goal-{index}" for index in range(8)]
    assert not {row.row_id for row in train} & {row.row_id for row in test}
    assert made.rows("train", 3) == train[:3]
    with pytest.raises(ConfigError, match="no split 'valid'"):
        made.rows("valid")


def test_the_buyer_who_knows_is_shown_only_where_it_is_right() -> None:
    shop = made.shop()
    shown = made.demos(20, seed=1)
    assert len(shown) == 20
    assert shown != made.demos(20, seed=2)
    for row, said in shown:
        assert said[-1] == f"click[{BUY}]"
        assert rewarded(row, *said)["reward"] == 1.0
    never = [(row, replace(GOAL, asin="M00", options=(("color", "pink"),))) for row, _ in shown]
    with pytest.raises(DataError, match="none of 20 goals can be demonstrated"):
        task.buyer_demos(shop, never, 1, 0, lambda shop, goal: knowing_buyer(shop, replace(goal, options=())))


def test_the_buyer_who_reads_opens_products_until_one_has_what_is_wanted() -> None:
    red = replace(SCARF, asin="B000000003", options={"color": ("dark red",), "size": ("large",)}, title="Plain Scarf")
    blue = replace(SCARF, options={"color": ("navy blue",), "size": ("large", "small")}, title="Soft Touch Scarf")
    shop = Shop(Catalogue.of([blue, red]))
    assert reading_buyer(shop, GOAL.text, Look()) == [
        "search[soft touch scarves with color: dark red, and size: large]",
        "click[B000000001]",  # its title says more
        "click[< prev]",
        "click[B000000003]",
        "click[dark red]",
        "click[large]",
        "click[buy now]",
    ]
    dear = replace(red, asin="B000000004", prices=(80.0,))
    assert "click[B000000004]" not in reading_buyer(Shop(Catalogue.of([dear, red])), GOAL.text, Look())
    assert reading_buyer(Shop(Catalogue.of([replace(SCARF, title="Cap", description="", features=("",), options={})])),
                         "Find me tents", Look()) == ["search[tents]"]  # fmt: skip


def test_queries_leave_out_courtesies_and_price() -> None:
    assert query_of(GOAL.text) == "soft touch scarves with color: dark red, and size: large"
    assert query_of("i want a scarf") == "i want a scarf"


# Files


def write_folder(folder: Path, *, zipped: bool) -> None:
    folder.mkdir()
    records = [scraped(asin=f"B00000000{index}", name=f"Oak Chair {index}") for index in range(3)]
    wish = {"attributes": ["solid wood"], "instruction": "Find me chairs", "instruction_attributes": ["solid wood"]}
    mined = {record["asin"]: wish for record in records}
    human = {
        "B000000001": [{"instruction": "a chair", "instruction_attributes": ["solid wood"], "instruction_options": []}]
    }
    for name, content in ((data.ITEMS, records), (data.ATTRIBUTES, mined), (data.HUMAN, human)):
        text = json.dumps(content).encode()
        (folder / f"{name}{'.gz' if zipped else ''}").write_bytes(gzip.compress(text) if zipped else text)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_is_read_in_the_original_form(tmp_path: Path, zipped: bool) -> None:
    write_folder(tmp_path / "shop", zipped=zipped)
    rows = task.rows("test", path=str(tmp_path / "shop"))
    assert len(rows) == 6  # three chairs in two colours
    assert len(task.rows("human", path=str(tmp_path / "shop"))) == 1
    assert panel_hash(rows) == panel_hash([replace(row, extra_info={}) for row in rows])  # wherever the folder is
    env = WebShop()
    env.begin(rows[0])
    assert env.reply("search[chair]").text.startswith("Page 1 of 1")


def test_missing_and_wrong_files_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no items_shuffle_1000.json or documents_1k.jsonl .*agent-r1 data recipe"):
        task.rows("test", path=str(tmp_path))
    (tmp_path / data.ITEMS).write_text("<html>")
    with pytest.raises(DataError, match=r"no items_ins_v2_1000\.json"):
        task.rows("test", path=str(tmp_path))
    (tmp_path / data.ATTRIBUTES).write_text("{}")
    with pytest.raises(DataError, match="not JSON"):
        task.rows("test", path=str(tmp_path))
    (tmp_path / data.ITEMS).write_text("{}")
    with pytest.raises(DataError, match="holds dict, not list"):
        task.rows("test", path=str(tmp_path))


def test_prepared_files_must_make_the_published_goals(tmp_path: Path) -> None:
    write_folder(tmp_path / "shop", zipped=False)
    with pytest.raises(DataError, match=r"makes 6 goals .* not the 6,910"):
        data.prepare(tmp_path / "shop", lambda line: None)
