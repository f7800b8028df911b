"""The recipe `webshop` with its real data, and with what is on record of the original engine.

Runs if $AGENT_R1_WEBSHOP names a folder that has the data.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from agent_r1.build.plan import build_plan
from agent_r1.config import load_config
from agent_r1.data.files import json_lines
from agent_r1.data.panels import panel_hash
from agent_r1.recipes.webshop import data, task
from agent_r1.recipes.webshop.buyers import knowing_buyer, reading_buyer
from agent_r1.recipes.webshop.data import open_catalogue
from agent_r1.recipes.webshop.pages import Look
from agent_r1.recipes.webshop.shop import Place, Shop, open_shop

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
def test_there_are_1000_products_and_6910_goals_in_two_fixed_splits(shop: Shop) -> None:
    catalogue = shop.catalogue
    assert (len(catalogue.products), len(catalogue.goals), len(catalogue.human)) == (1000, 6910, 13)
    assert data.goals_hash(catalogue.goals) == data.GOALS_SHA256
    assert panel_hash(task.rows("test", path=REAL)) == "75cb9472838a"
    assert panel_hash(task.rows("train", path=REAL)) == "898a31b17751"


@real
def test_a_dry_run_of_the_preset_plans_the_real_data() -> None:
    pytest.importorskip("gguf")  # the model comes in that form
    plan = build_plan(load_config("webshop", [f"data.path={REAL}"]))
    assert (len(plan.train_rows), len(plan.test_rows)) == (6709, 200)
    train, test = ({row.prompt[-1]["content"] for row in rows} for rows in (plan.train_rows, plan.test_rows))
    assert not train & test
    assert (len(train), len(test)) == (6699, 200)  # 10 stand in train twice


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
def test_purchases_score_as_in_the_original(shop: Shop, number: int) -> None:
    asin, paid = PURCHASES[number]
    assert task.score_of(shop.catalogue.goals[number], asin, {}, shop.catalogue).total == pytest.approx(paid)


@real
def test_options_score_as_in_the_original(shop: Shop) -> None:
    goal, color = shop.catalogue.goals[4], {"color": "xnj-tshirt334-gray"}
    for chosen, paid in (({}, 7 / 9), ({"size": "x-large"}, 8 / 9), (color | {"size": "x-large"}, 1.0)):
        assert task.score_of(goal, goal.asin, chosen, shop.catalogue).total == pytest.approx(paid)


@real
def test_search_results_match_the_original_in_order(shop: Shop) -> None:
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
def test_both_buyers_score_as_documented_on_real_goals(shop: Shop) -> None:
    goals = random.Random(0).sample(shop.catalogue.goals, 200)
    knows = [task.score_of_visit(shop, goal, knowing_buyer(shop, goal) or []).total for goal in goals]
    reads = [task.score_of_visit(shop, goal, reading_buyer(shop, goal.text, Look())).total for goal in goals]
    assert sum(knows) / 200 > 0.95
    assert 0.7 < sum(reads) / 200 < sum(knows) / 200
    assert len(task.demos(50, seed=0, path=REAL)) == len(task.reader_demos(50, seed=0, path=REAL)) == 50
