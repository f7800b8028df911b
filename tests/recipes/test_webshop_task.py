"""The recipe `webshop`: rows, rewards of whole episodes, scripted buyers, and the files a shop is made of."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.build.plan import build_plan
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.data.panels import panel_hash
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.webshop import data, synthetic, task
from agent_r1.recipes.webshop.buyers import knowing_buyer, query_of, reading_buyer
from agent_r1.recipes.webshop.data import Catalogue
from agent_r1.recipes.webshop.env import WebShop
from agent_r1.recipes.webshop.goals import Goal
from agent_r1.recipes.webshop.pages import Look
from agent_r1.recipes.webshop.shop import BUY, Shop
from agent_r1.types import Step, StopReason, TaskRow, Trajectory
from benchmarks import webshop as benchmark
from tests.recipes.test_webshop import GOAL, SCARF, scraped
from tests.recipes.test_webshop_shop import scarves

# Rows, rewards, demonstrations


def rewarded(row: TaskRow, *actions: str) -> dict[str, float]:
    env = synthetic.SyntheticShop()
    env.begin(row)
    steps = [
        Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], info=env.reply(action).info)
        for action in actions
    ]
    played = Trajectory(row_id=row.row_id, trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)
    return asyncio.run(synthetic.reward(row, played))


def test_every_synthetic_goal_can_be_met_in_full() -> None:
    for row in synthetic.rows("train") + synthetic.rows("test"):
        [(_, color)] = row.ground_truth["options"]
        asin = row.ground_truth["asin"]
        title = synthetic.shop().catalogue.products[asin].title
        parts = rewarded(row, f"search[{title}]", f"click[{asin}]", f"click[{color}]", "click[buy now]")
        assert parts["reward"] == parts["success"] == 1.0
        assert set(parts) == {"reward", "success", "bought", "type", "attributes", "options", "price", "refused"}


def test_a_poor_purchase_earns_partial_credit_and_none_earns_nothing() -> None:
    row = next(row for row in synthetic.rows("train") if row.ground_truth["asin"] == "M01")  # a tin lamp
    [(_, color)] = row.ground_truth["options"]
    cheap = rewarded(row, "search[oak lamp]", "hm", "click[M00]", f"click[{color}]", "click[buy now]")
    assert (cheap["reward"], cheap["refused"]) == (1.0, 1.0)  # an oak lamp is a lamp too: same type, attribute, colour
    assert rewarded(row, "search[oak lamp]", "click[M00]", "click[buy now]")["reward"] == pytest.approx(2 / 3)
    tin_box = rewarded(row, "search[tin box]", "click[M07]", f"click[{color}]", "click[buy now]")
    assert (tin_box["type"], tin_box["price"]) == (1.0, 0.0)  # half of the nouns are the same; 54 dollars
    assert rewarded(row, "search[tin lamp]")["reward"] == rewarded(row)["reward"] == 0.0


def test_rows_have_fixed_names_and_splits_do_not_overlap() -> None:
    train, test = synthetic.rows("train"), synthetic.rows("test")
    assert (len(train), len(test)) == (28, 8)
    assert [row.row_id for row in test] == [f"goal-{index}" for index in range(8)]
    assert not {row.prompt[-1]["content"] for row in train} & {row.prompt[-1]["content"] for row in test}
    assert synthetic.rows("train", 3) == train[:3]
    with pytest.raises(ConfigError, match="no split 'valid'"):
        synthetic.rows("valid")


def test_the_knowing_buyer_demonstrates_only_correct_purchases() -> None:
    shop = synthetic.shop()
    shown = synthetic.demos(20, seed=1)
    assert len(shown) == 20
    assert shown != synthetic.demos(20, seed=2)
    for row, said in shown:
        assert said[-1] == f"click[{BUY}]"
        assert rewarded(row, *said)["reward"] == 1.0
    never = [(row, replace(GOAL, asin="M00", options=(("color", "pink"),))) for row, _ in shown]
    with pytest.raises(DataError, match="none of 20 goals can be demonstrated"):
        task.buyer_demos(shop, never, 1, 0, lambda shop, goal: knowing_buyer(shop, replace(goal, options=())))


def test_demonstrations_are_short() -> None:
    shop = scarves(25)
    asked = [(task.as_row(goal, goal.asin, ""), goal) for goal in shop.catalogue.goals]

    def shown(buyer: task.Buyer) -> set[str]:
        return {row.row_id for row, _ in task.buyer_demos(shop, asked, len(asked), 0, buyer)}

    assert shown(knowing_buyer) == {f"B{number:02}" for number in range(20)}  # the others are two pages away

    def long_buyer(shop: Shop, goal: Goal) -> list[str]:
        """Looks at the description once, or twice where the number is odd: 7 or 9 actions on the first page."""
        *before, buy = knowing_buyer(shop, goal) or []
        return [*before, *["click[description]", "click[< prev]"] * (1 + int(goal.asin[1:]) % 2), buy]

    # 5 (search, product, color, size, buy) + 2 are 7, and one page more 8; + 4 are 9
    assert shown(long_buyer) == {f"B{number:02}" for number in range(0, 20, 2)}


def test_the_reading_buyer_opens_products_until_one_matches() -> None:
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


def test_a_context_policy_that_forgets_needs_full_pages() -> None:
    window = ["context.policy=window", "context.turns=1"]
    with pytest.raises(ConfigError, match=r"SyntheticShop .*task\.env_kwargs\.full_pages=true"):
        build_task(load_config("webshop/tiny", window))
    build_task(load_config("webshop/tiny", [*window, "task.env_kwargs.full_pages=true"]))
    build_task(load_config("webshop/tiny", []))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("full_pages=perhaps", "full_pages of SyntheticShop .*'perhaps'"),
        ("title_chars=abc", "title_chars of SyntheticShop .*'abc'"),
    ],
)
def test_settings_of_the_wrong_type_are_refused_before_the_run(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(load_config("webshop/tiny", [f"task.env_kwargs.{setting}"]))


def test_queries_omit_pleasantries_and_price() -> None:
    assert query_of(GOAL.text) == "soft touch scarves with color: dark red, and size: large"
    assert query_of("i want a scarf") == "i want a scarf"


# Files


def write_folder(folder: Path, *, zipped: bool, count: int = 3) -> None:
    folder.mkdir()
    records = [scraped(asin=f"B{index:09}", name=f"Oak Chair {index}") for index in range(count)]
    wish = {"attributes": ["solid wood"], "instruction_attributes": ["solid wood"]}
    mined = {record["asin"]: wish | {"instruction": f"Find me {record['name']}"} for record in records}
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


def test_a_row_from_elsewhere_is_refused() -> None:
    stray = replace(synthetic.rows("test")[0], extra_info={})
    played = Trajectory(row_id=stray.row_id, trajectory_id="t", steps=[], stop=StopReason.MAX_STEPS)
    with pytest.raises(DataError, match="'goal-0'"):
        WebShop().begin(stray)
    with pytest.raises(DataError, match="does not say where its products are"):
        asyncio.run(task.reward(stray, played))


@pytest.mark.parametrize("line", ['{"id": 1}', "[]"])
def test_a_document_without_a_product_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    (tmp_path / data.DOCUMENTS).write_text(f"{json.dumps({'product': scraped()})}\n{line}\n")
    (tmp_path / data.ATTRIBUTES).write_text("{}")
    with pytest.raises(DataError, match=r"documents_1k\.jsonl record 2 "):
        task.rows("test", path=str(tmp_path))


def test_the_benchmark_runs_on_a_small_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "shop", zipped=False, count=102)  # 204 goals: 4 to train on
    assert 2 <= benchmark.speed(tmp_path / "shop")["steps_per_episode"] <= task.MAX_SAID + 4
    earned = benchmark.buyers(tmp_path / "shop")
    assert earned["train, exactly what is wanted"] == {"score": 1.0, "full": 1.0}
    assert earned["train, knows the product"]["full"] == 1.0
    assert earned["test, that product without options"]["score"] == pytest.approx(2 / 3)  # attribute, option, price
    assert earned["test, first result, no option"] == pytest.approx(
        {"score": 2 / 3, "full": 0.0, "actions": 3.0, "at most 8 actions": 1.0}
    )
    assert earned["wrong values that are paid"] == {"paid": 0, "of": 204}  # black | red for oak, oak for it


def test_missing_and_wrong_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"documents_1k.jsonl .*agent-r1 data recipe"):
        task.rows("test", path=str(tmp_path))
    with pytest.raises(DataError, match=r"none.*agent-r1 data recipe"):
        task.rows("test", path=str(tmp_path / "none"))
    (tmp_path / data.ITEMS).write_text("<html>")
    with pytest.raises(DataError, match=r"no items_ins_v2_1000\.json"):
        task.rows("test", path=str(tmp_path))
    (tmp_path / data.ATTRIBUTES).write_text("{}")
    with pytest.raises(DataError, match="not JSON"):
        task.rows("test", path=str(tmp_path))
    (tmp_path / data.ITEMS).write_text("{}")
    with pytest.raises(DataError, match="holds a dict, not a list"):
        task.rows("test", path=str(tmp_path))


def test_prepared_files_must_make_the_published_goals(tmp_path: Path) -> None:
    write_folder(tmp_path / "shop", zipped=False)
    with pytest.raises(DataError, match=r"6 goals .* 6,910"):
        data.prepare(tmp_path / "shop", lambda line: None)
