"""Every page of the viewer in headless Chromium: what it shows, where it leads, and that hostile text stays text."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runs.run_dir import RunDir
from agent_r1.serve.view.export import export_page, inline_frame
from agent_r1.serve.view.library import Library
from benchmarks.browser import browser_or_none, why_no_browser
from tests.serve.small_runs import HOSTILE, LONG, add_step, group, make_episode, make_run, make_step
from tests.serve.test_view_server import serve_with

REASON = why_no_browser()
pytestmark = [pytest.mark.browser, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
PAGES = [
    "#/", "#/settings", "#/run/shop/episodes", "#/run/shop/evaluations", "#/run/shop/episode/train_000002/0",
    "#/run/shop/batch/train_000002",
    "#/run/shop/episode/train_000002/2?view=tokens", "#/run/shop/group/train_000002/tea", "#/run/shop/row/hostile",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_or_none() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "shop")
    make_run(place / "other", seed=7)
    return place


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    server, link = serve_with(str(folder))
    yield link
    server.terminate()
    server.wait(20)


class Watched:
    """A page, and everything that went wrong on it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def go(self, address: str) -> Any:
        self.page.goto(address)
        return self.page

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def hash(self) -> str:
        found: str = self.page.evaluate("location.hash")
        return found

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true. (playwright's own function needs `eval`, which the page forbids.)"""
        for _ in range(300):
            if self.page.evaluate(script):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not true within 15 s: {script}\n{self.page.locator('main').inner_text()[:2000]}")


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Start a server of the test's own. It outlives the pages, which would report that it is gone."""
    servers = []

    def start(place: Path) -> str:
        server, link = serve_with(str(place))
        servers.append(server)
        return link.replace("127.0.0.1", "localhost")

    yield start
    for server in servers:
        server.terminate()
        server.wait(20)


@pytest.fixture
def open_page(browser: Any, url: str, serve: Callable[[Path], str]) -> Iterator[Any]:
    opened: list[Watched] = []

    def make(address: str, base: str = url, **options: Any) -> Watched:
        watched = Watched(browser, **options)
        opened.append(watched)
        watched.go(base + address)
        return watched

    yield make
    for watched in opened:
        assert watched.problems == []
        assert all(asked.startswith((url, "file:", "blob:", "about:", "http://localhost:")) for asked in watched.asked)
        watched.context.close()


def painted(view: Watched, index: int) -> int:
    """Count the colours on the index-th canvas."""
    return int(view.page.evaluate("""(index) => {
      const canvas = [...document.querySelectorAll("canvas")].filter((one) => one.offsetParent)[index];
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const seen = new Set();
      for (let at = 0; at < data.length; at += 4) if (data[at + 3]) seen.add(data.slice(at, at + 3).join());
      return seen.size;
    }""", index))  # fmt: skip


def test_the_runs_are_listed_with_their_curves(open_page: Any) -> None:
    view = open_page("#/")
    view.page.wait_for_selector(".chart:visible")
    assert sorted(view.texts("li.run b")) == ["other", "shop"]
    assert view.texts(".chip.status") == ["finished", "finished"]
    assert view.page.locator("li.run svg.spark polyline").count() == 2
    titles = view.texts(".chart:visible h2")
    assert titles[:3] == ["Success on held-out rows", "Reward", "Success in training"]
    assert {"Entropy", "Gradient norm", "Time of a step: shop"} <= set(titles)
    assert "Mismatch KL" not in titles  # not recorded
    assert painted(view, 0) > 3


def test_runs_are_chosen_smoothed_and_zoomed_by_address(open_page: Any) -> None:
    view = open_page("#/")
    view.page.wait_for_selector(".chart:visible")
    view.page.locator("li.run[data-run=other] input").uncheck()
    view.wait_for("!document.body.innerText.includes('Time of a step: other')")
    assert view.hash() == "#/?runs=shop"
    view.page.locator("#smooth").fill("0.5")
    assert "smooth=0.5" in view.hash()
    box = view.page.locator(".chart:visible canvas").nth(1).bounding_box()
    view.page.mouse.move(box["x"] + 80, box["y"] + 60)
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    view.page.mouse.up()
    assert re.search(r"zoom=[\d.]+%2C[\d.]+", view.hash())
    again = open_page(view.hash())
    again.page.wait_for_selector(".chart:visible")
    assert again.page.locator("#smooth").input_value() == "0.5"
    assert again.page.locator("li.run input:checked").count() == 1
    again.page.get_by_text("Reset zoom").click()
    assert "zoom" not in again.hash()


def test_a_point_of_a_curve_leads_to_its_episodes(open_page: Any) -> None:
    view = open_page("#/?runs=shop")
    view.page.wait_for_selector(".chart:visible")
    canvas = view.page.locator(".chart:visible canvas").nth(1)
    box = canvas.bounding_box()
    middle = (46 + box["width"] - 12) / 2  # step 2 of 1 to 3
    canvas.hover(position={"x": middle, "y": 60})
    assert "step 2" in view.texts(".tip:visible")[0]
    assert "0.2 ±" in view.texts(".tip:visible")[0]
    canvas.click(position={"x": middle, "y": 60})
    view.page.wait_for_selector("a.row")
    assert view.hash() == "#/run/shop/episodes?kind=train&step=2"
    assert view.texts(".count")[0].startswith("4 episodes")


def test_curves_work_by_keyboard(open_page: Any) -> None:
    view = open_page("#/?runs=shop")
    view.page.wait_for_selector(".chart:visible")
    view.page.locator(".chart:visible canvas").nth(1).focus()
    view.page.keyboard.press("ArrowLeft")
    view.page.keyboard.press("ArrowLeft")
    view.page.keyboard.press("Enter")
    view.page.wait_for_selector("a.row")
    assert view.hash() == "#/run/shop/episodes?kind=train&step=2"


def test_curves_are_saved_as_numbers_and_pictures(open_page: Any) -> None:
    view = open_page("#/?runs=shop")
    view.page.wait_for_selector(".chart:visible")
    chart = view.page.locator(".chart:visible").nth(3)
    chart.hover()
    for label, check in (("CSV", b"series,step,value,band"), ("PNG", b"\x89PNG")):
        with view.page.expect_download() as saved:
            chart.get_by_text(label).click()
        assert Path(saved.value.path()).read_bytes().startswith(check)
        assert saved.value.suggested_filename.endswith(label.lower())


def test_settings_that_differ_are_shown_and_all_on_demand(open_page: Any) -> None:
    view = open_page("#/settings?runs=shop,other")
    view.page.wait_for_selector("table.settings")
    assert view.texts("tbody th") == ["seed"]
    assert view.texts("tbody td") == ["0", "7"]
    view.page.locator("#all").check()
    assert len(view.texts("tbody th")) > 50
    view.page.locator("#search").fill("trainer.steps")
    assert view.texts("tbody th") == ["trainer.steps"]


def test_episodes_are_filtered_searched_and_sorted(open_page: Any) -> None:
    view = open_page("#/run/shop/episodes")
    view.page.wait_for_selector("a.row")
    assert view.texts(".count")[0].startswith("20 episodes")
    view.page.get_by_label("Stop reason").select_option("error")
    view.wait_for("document.querySelector('.count').textContent.startsWith('5 episodes')")
    assert set(view.texts("a.row .chip")) == {"error"}
    view.page.get_by_label("Stop reason").select_option("")
    view.page.get_by_label("Tool").select_option("stock")
    view.wait_for("document.querySelector('.count').textContent.startsWith('5 episodes')")
    view.page.get_by_label("Tool").select_option("")
    view.page.get_by_label("Search").fill("COSTS 2")
    view.wait_for("document.querySelector('.count').textContent.startsWith('1 episode ')")
    assert view.hash() == "#/run/shop/episodes?text=COSTS+2"
    again = open_page(view.hash())
    again.page.wait_for_selector("a.row")
    assert again.texts("a.row small")[-1] == "It costs 2 coins"
    view.page.get_by_label("Search").fill("no such words")
    view.page.wait_for_selector(".empty")
    assert "No episode matches" in view.texts(".empty")[0]
    view.page.get_by_text("Show all episodes").click()
    view.page.wait_for_selector("a.row")
    view.page.get_by_label("Sort").select_option("-reward")
    view.wait_for("document.querySelector('a.row .reward').textContent.includes('1')")


def test_a_long_list_keeps_few_rows_on_the_page(open_page: Any, serve: Callable[[Path], str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "many", steps=1)
    lines = run.trajectories_file("train", 1).read_text(encoding="utf-8").splitlines()[:2]
    run.trajectories_file("train", 1).write_text("\n".join(lines * 3000) + "\n", encoding="utf-8")
    base = serve(tmp_path)
    view = open_page("#/run/many/episodes?kind=train&sort=step", base=base)
    view.wait_for("document.querySelector('.count')?.textContent.startsWith('6,000 episodes')")
    assert view.page.locator("a.row").count() < 60
    view.page.evaluate("document.querySelector('.rows').scrollTop = 1e9")
    view.wait_for("document.querySelector('a.row:last-child')?.href.includes('train_000001/5999')")
    assert view.page.locator("a.row").count() < 60
    view.page.locator(".rows").focus()
    view.page.keyboard.press("Home")
    view.page.keyboard.press("j")
    view.page.keyboard.press("Enter")
    view.page.wait_for_selector(".conversation")
    assert "/episode/train_000001/1" in view.hash()
    view.page.keyboard.press("j")
    view.wait_for("location.hash.includes('/episode/train_000001/2')")
    view.page.keyboard.press("Escape")
    view.wait_for("location.hash === '#/run/many/episodes?kind=train&sort=step'")


def test_an_episode_shows_calls_rewards_and_times(open_page: Any) -> None:
    view = open_page("#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".conversation")
    assert view.texts("main h1") == ["tea"]
    assert view.texts(".message.user .text") == ["What does tea cost?"]
    assert view.texts(".message.agent")[0].split("\n")[-1] == "up"  # the call stands in its place: "I look {it} up"
    call = view.texts(".call")[0]
    assert all(part in call for part in ("price", "200 ms", "reward +0.125", "item", "tea", "4"))
    assert "Expected 4" in view.texts(".truth")[0]
    parts = view.page.locator(".track .part").evaluate_all("parts => parts.map((part) => part.title)")
    assert parts[:2] == ["step 1 (buyer): sampling 500 ms", "step 1: price 250 ms"]
    assert parts[-1].startswith("other: 500 ms")
    view.page.locator(".track .part").nth(2).click()
    assert view.hash().endswith("?s=1")
    view.go(view.page.url.replace("train_000002/0?s=1", "train_000002/1"))
    view.wait_for("document.querySelector('.call.bad')")
    assert "no such item" in view.texts(".call.bad")[0]
    view.go(view.page.url.replace("train_000002/1", "train_000002/3"))
    view.page.wait_for_selector(".message.bad")
    assert "tool 'price' raised it broke" in view.texts(".message.bad")[0]


def backgrounds(view: Watched, selector: str) -> list[str]:
    spans = view.page.locator(selector)
    found: list[str] = spans.evaluate_all("spans => spans.map((one) => one.style.backgroundColor)")
    return found


def test_only_sampled_tokens_are_coloured_and_each_says_its_id_and_text(open_page: Any) -> None:
    view = open_page("#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".conversation")
    view.page.keyboard.press("t")
    view.page.wait_for_selector(".tokens .token")
    assert view.hash().endswith("view=tokens")
    shades = backgrounds(view, "#step-0 .message.agent .token")
    assert len(set(shades)) == 4  # log-probs -0.01, -0.5, -2, -5
    view.page.locator("#step-0 .token").nth(1).hover()
    tip = view.texts(".token-tip")[0]
    assert all(part in tip for part in ("id 2, position 1", '" two"', "-0.5", "p = 60.65 %", "+0.25"))
    view.page.get_by_label("Colour tokens by").select_option("advantage")
    shades = backgrounds(view, "#step-0 .message.agent .token")
    assert "--cool" in shades[0]
    assert "--warm" in shades[3]
    assert view.hash().endswith("view=tokens&color=advantage")
    view.page.get_by_label("Colour tokens by").select_option("ratio")
    shades = backgrounds(view, "#step-0 .message.agent .token")  # ratios 1, 0.5, 1, 2: as strong below 1 as above it
    assert "--warm" in shades[1]
    assert shades[3] == shades[1].replace("--warm", "--cool") != shades[0] == shades[2]
    assert view.texts(".key span") == ["≤ 0.5", "1", "≥ 2"]
    view.page.get_by_label("Colour tokens by").select_option("entropy")
    assert len(set(backgrounds(view, "#step-0 .message.agent .token"))) == 4  # 0, 0.1, 0.2, 0.4
    assert view.texts(".key span") == ["0", "0.4 nats"]
    view.page.locator("#step-1 .prompt summary").first.click()
    view.page.wait_for_selector("#step-1 .prompt .token")
    assert set(backgrounds(view, "#step-1 .prompt .token")) == {""}
    assert view.page.locator("#step-1 .prompt .token.old").count() == 3
    assert "the history was rewritten after token 3" in view.texts("#step-1 .prompt summary")[0]
    view.page.locator("#step-1 .prompt .token").nth(5).hover()
    assert "given to the model: no value" in view.texts(".token-tip")[0]
    view.page.get_by_label("Colour tokens by").select_option("mask")
    assert len(set(backgrounds(view, "#step-0 .message.agent .token"))) == 1


def test_what_a_rewritten_prompt_lacks_can_be_read(open_page: Any) -> None:
    """The second prompt is [0 .. 6]; before it were the prompt [0, 1, 2] and the response [1, 2, 5, 4]."""
    view = open_page("#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".conversation")
    assert view.page.locator(".left-out").count() == 1  # only where something was left out
    view.page.locator("#step-1 .left-out summary").click()
    view.page.wait_for_selector(".left-out del")
    assert view.texts(".left-out del") == ["one two</script><b>x</b>\u2039e2\u203a\u203982\u203a"]
    assert view.texts(".dropped small") == ["4 tokens, written by the model; stood after token 3 of this prompt"]


@pytest.mark.parametrize(
    "address", [*PAGES, "#/run/shop/episodes?row=hostile", "#/run/shop/group/train_000002/hostile"]
)
def test_hostile_text_stays_text_on_every_page(open_page: Any, address: str) -> None:
    view = open_page(address)
    view.wait_for("document.querySelector('main').children.length > 0 && !document.querySelector('.loading')")
    view.page.wait_for_timeout(300)
    assert "hacked" not in view.page.title()
    assert view.page.evaluate("document.querySelectorAll('main img, main script, main b b, main iframe').length") == 0
    if "train_000002/2" in address or "hostile" in address:
        assert HOSTILE in view.page.evaluate("document.querySelector('main').textContent")


def test_roles_label_steps_and_filter_episodes(open_page: Any) -> None:
    view = open_page("#/run/shop/episodes?role=seller")
    view.page.wait_for_selector("a.row")
    assert view.texts(".count") == ["5 episodes · mean reward 0"]
    view.page.select_option("select[name=role]", "buyer")
    view.wait_for("document.querySelector('.count').textContent.startsWith('10 episodes')")
    assert view.hash().endswith("role=buyer")
    view = open_page("#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".step")
    assert view.texts(".chip.role") == ["buyer", "buyer"]


def test_the_time_line_of_a_batch_names_the_slowest_and_leads_to_episodes(open_page: Any) -> None:
    view = open_page("#/run/shop/batch")
    view.page.wait_for_selector("main[data-state=ready]")
    [said] = view.texts(".batch-summary p")
    assert said == (
        "4 episodes in 3.00 s; nine of ten had ended after 3.00 s. "
        "The last to end was tea (episode 1), which spent 500 ms on sampling in step 1."
    )
    spent = view.texts(".spent li")
    assert [line.split("\n")[0].split(" 3")[0] for line in spent][:1] == ["other"]
    assert len(view.texts(".batch a.row")) == 4
    assert painted(view, 0) >= 3  # sampling, tools and the rest
    view.page.locator(".batch a.row canvas").first.hover(position={"x": 40, "y": 8})
    assert view.texts(".batch-tip div")[1] == "step 1 (buyer): sampling, 500 ms"
    view.page.select_option(".bar select", "end")
    view.wait_for("document.querySelector('.batch a.row').textContent.includes('tea')")
    assert view.hash() == "#/run/shop/batch?sort=end"
    view.page.locator(".rows.batch").focus()
    for key in ("j", "j", "k"):
        view.page.keyboard.press(key)
    view.wait_for("document.querySelector('#batch-status').textContent.startsWith('tea (episode 1): 2.00 s')")
    view.page.keyboard.press("Enter")
    view.page.wait_for_selector(".conversation")
    assert view.hash() == "#/run/shop/episode/train_000003/1"
    view.page.get_by_role("link", name="Time line of its batch").click()
    view.page.wait_for_selector("main[data-state=ready] .rows.batch")
    view.page.keyboard.press("h")
    view.wait_for("location.hash === '#/run/shop/batch/train_000002'")


def test_a_batch_of_512_episodes_keeps_few_rows_on_the_page(
    open_page: Any, serve: Callable[[Path], str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "large", steps=1)
    episodes = [make_episode(f"row-{n // 8}", n % 8, 1.0, *[make_step()] * 10) for n in range(512)]
    run.write_trajectories("train", 2, [group("row", "?", None, *episodes)])
    view = open_page("#/run/large/batch", serve(tmp_path / "large"))
    view.page.wait_for_selector("main[data-state=ready]")
    assert view.texts(".batch-summary p")[0].startswith("512 episodes in 9.00 s; ")
    assert 10 < view.page.locator(".batch a.row").count() < 80
    view.page.keyboard.press("End")
    view.wait_for("document.querySelector('#batch-status').textContent.startsWith('row-63 (episode 511)')")
    assert view.page.locator(".batch a.row").count() < 80


def test_a_long_result_is_fetched_in_parts(open_page: Any) -> None:
    view = open_page("#/run/shop/episode/train_000002/2")
    view.page.wait_for_selector(".long button")
    whole = len(HOSTILE + LONG)
    shown = "document.querySelector('.result').textContent.length"
    assert view.page.evaluate(shown) == 16_000
    assert "Show more" in view.texts(".call .long button")[0]
    view.page.locator(".call .long button").click()
    view.wait_for(f"{shown} === {whole}")
    assert view.page.locator(".call .long button").is_hidden()


def test_a_group_is_shown_side_by_side(open_page: Any) -> None:
    view = open_page("#/run/shop/group/train_000002/tea")
    view.page.wait_for_selector(".attempt .call")
    assert view.page.locator(".attempt").count() == 2
    assert "mean reward 0.5" in view.texts(".facts")[0]
    assert view.texts(".attempt .reward .mark") == ["✓", "✗"]
    left, right = (view.page.locator(".attempt").nth(index).bounding_box() for index in (0, 1))
    assert left["y"] == right["y"]
    view.page.keyboard.press("j")
    view.wait_for("location.hash.endsWith('/hostile')")


def test_a_row_at_different_steps_is_compared_word_by_word(open_page: Any) -> None:
    view = open_page("#/run/shop/row/tea?a=train_000001%2F0&b=train_000003%2F0")
    view.page.wait_for_selector("mark")
    assert view.texts("mark") == ["1", "3"]  # It costs 1 coins, It costs 3 coins
    assert view.page.locator(".dot").count() == 10
    view.page.locator(".dot").nth(5).click()
    view.wait_for("location.hash.includes('b=train_000002')")
    view.page.keyboard.press("a")
    view.page.keyboard.press("j")  # the left one: from the first attempt of step 1 to the second
    view.wait_for("location.hash.includes('a=train_000001%2F1')")
    assert "b=train_000002" in view.hash()
    view.page.keyboard.press("Escape")
    view.page.wait_for_selector("a.row")
    assert view.hash() == "#/run/shop/episodes?row=tea"


def test_a_row_with_many_attempts_is_shown_from_the_first_step_to_the_last(
    open_page: Any, serve: Callable[[Path], str], tmp_path: Path
) -> None:
    """Two sides are chosen with a finger too. Each of the 30 steps has ten attempts, of which 200 are shown."""
    run = make_run(tmp_path / "many", steps=1)
    lines = run.trajectories_file("train", 1).read_text(encoding="utf-8").splitlines()[:2]
    for step in range(1, 31):
        run.trajectories_file("train", step).write_text("\n".join(lines * 5) + "\n", encoding="utf-8")
    phone = {"has_touch": True, "viewport": {"width": 390, "height": 760}}
    view = open_page("#/run/many/row/tea?a=train_000016%2F7", serve(tmp_path), **phone)
    view.page.wait_for_selector("main[data-state=ready]")
    shown = [text.split("\n") for text in view.texts(".dot")]
    assert len(shown) in (200, 201)  # the one that the address names may be beside those
    assert {int(step) for step, _ in shown} == set(range(31))
    assert shown[-1] == ["30", "✗ B"]
    assert [step for step, mark in shown if mark.endswith("A")] == ["16"]
    view.page.get_by_role("button", name="A (left)").tap()
    view.page.locator(".dot").last.tap()
    view.wait_for("location.hash.includes('a=train_000030%2F9')")
    assert view.texts(".dot")[-1].split("\n")[1] == "✗ AB"


def drag_finger(view: Watched, selector: str, path: list[tuple[float, float]]) -> None:
    box = view.page.locator(selector).first.bounding_box()
    session = view.context.new_cdp_session(view.page)
    for kind, point in zip(["touchStart", *["touchMove"] * (len(path) - 1)], path, strict=True):
        where = {"x": box["x"] + point[0], "y": box["y"] + point[1]}
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [where]})
    view.page.wait_for_timeout(100)  # at rest, or it would be a fling, which the next tap only stops
    session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [where]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_curves_are_zoomed_with_a_finger_and_with_keys(open_page: Any) -> None:
    view = open_page("#/?runs=shop", has_touch=True, viewport={"width": 390, "height": 760})
    view.page.wait_for_selector(".chart:visible")
    view.page.locator(".chart:visible canvas").first.scroll_into_view_if_needed()
    drag_finger(view, ".chart:visible canvas", [(60, 60), (80, 62), (120, 62), (180, 62)])
    view.wait_for("location.hash.includes('zoom=')")
    view.page.get_by_text("Reset zoom").tap()
    view.wait_for("!location.hash.includes('zoom=')")
    view.page.locator(".chart:visible canvas").nth(1).focus()
    view.page.keyboard.press("ArrowLeft")  # the last of steps 1 to 3
    view.page.keyboard.press("+")
    assert view.hash() == "#/?runs=shop&zoom=2%2C3"
    view.page.keyboard.press("ArrowLeft")
    view.page.keyboard.press("ArrowLeft")  # the zoom follows
    assert view.hash() == "#/?runs=shop&zoom=1%2C2"
    view.page.keyboard.press("-")
    assert view.hash() == "#/?runs=shop"
    view.page.keyboard.press("+")
    view.page.keyboard.press("Escape")
    assert view.hash() == "#/?runs=shop"


def test_every_page_of_a_run_has_its_keys(open_page: Any) -> None:
    view = open_page("#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".conversation")
    view.page.keyboard.press("g")
    view.page.wait_for_selector(".attempt")
    assert view.hash() == "#/run/shop/group/train_000002/tea"
    for address, back in (
        ("#/run/shop/evaluations", "#/?runs=shop"),
        ("#/settings?runs=shop%2Cother", "#/?runs=shop%2Cother"),
        ("#/run/shop/batch/train_000002", "#/run/shop/episodes?kind=train&step=2"),
    ):
        view.page.evaluate(f"location.hash = {address!r}")
        view.page.wait_for_selector(".tabs nav, table.settings")
        if "batch" in address:
            for step, key in ((2, "l"), (3, "h"), (2, "Escape")):
                view.page.wait_for_selector(f"main[data-state=ready] h2:text-is('train step {step}')")
                view.page.keyboard.press(key)
            break
        view.page.keyboard.press("Escape")
        view.wait_for(f"location.hash === {back!r}")
    view.wait_for(f"location.hash === {back!r}")
    view.page.wait_for_selector("a.row")
    view.page.keyboard.press("/")
    assert view.page.evaluate("document.activeElement.id") == "search"
    view.page.keyboard.press("Escape")
    assert view.page.evaluate("document.activeElement.id") != "search"


def test_the_values_of_tokens_are_read_by_keyboard(open_page: Any) -> None:
    view = open_page("#/run/shop/episode/train_000002/0?view=tokens")
    view.page.wait_for_selector(".tokens .token")
    view.page.locator("#step-0 .message.agent .tokens").focus()
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("ArrowRight")
    tip = view.texts(".token-tip:visible")[0]
    assert all(part in tip for part in ("id 2, position 1", '" two"', "-0.5"))
    assert view.page.locator(":focus").get_attribute("aria-describedby") == "token-tip"
    view.page.keyboard.press("End")
    assert "id 4, position 3" in view.texts(".token-tip:visible")[0]
    view.page.keyboard.press("Escape")  # leaves the tokens, not the page
    assert view.page.locator(".token-tip:visible").count() == 0
    assert view.hash().startswith("#/run/shop/episode/train_000002/0")


def test_a_live_run_is_followed(open_page: Any, serve: Callable[[Path], str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", steps=2)
    base = serve(tmp_path)
    curves, table = open_page("#/", base=base), open_page("#/run/live/episodes", base=base)
    table.wait_for("document.querySelector('.count')?.textContent.startsWith('16 episodes')")
    curves.page.wait_for_selector(".chart:visible")
    add_step(run, 3)
    table.wait_for("document.querySelector('.count').textContent.startsWith('20 episodes')")
    curves.wait_for("document.querySelector('li.run').textContent.includes('step 3')")
    label = "[...document.querySelectorAll('canvas')][1].getAttribute('aria-label')"
    curves.wait_for(f"{label} === 'Reward. Last values: live 0.3'")
    make_run(tmp_path / "new")
    curves.wait_for("document.querySelectorAll('li.run').length === 2")
    shutil.rmtree(run.path)
    curves.wait_for("document.querySelectorAll('li.run').length === 1")
    table.page.wait_for_selector(".empty")
    assert "moved, renamed or deleted" in table.texts(".empty")[0]
    for view in (curves, table):  # the browser reports the answer 404
        view.page.goto("about:blank")
        view.problems.clear()


def test_without_runs_the_page_says_how_to_make_one(
    open_page: Any, serve: Callable[[Path], str], tmp_path: Path
) -> None:
    base = serve(tmp_path)
    view = open_page("#/", base=base)
    view.page.wait_for_selector(".empty")
    assert "agent-r1 train quickstart" in view.texts(".empty")[0]
    make_run(tmp_path / "first")
    view.page.wait_for_selector("li.run")


@pytest.mark.parametrize("address", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(open_page: Any, address: str) -> None:
    view = open_page(address, viewport={"width": 375, "height": 700})
    view.wait_for("document.querySelector('main').children.length > 0 && !document.querySelector('.loading')")
    view.page.wait_for_timeout(300)
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.parametrize("address", PAGES)
def test_every_control_has_a_name_and_text_is_readable_in_light_and_dark(open_page: Any, address: str) -> None:
    for scheme in ("light", "dark"):
        view = open_page(address, color_scheme=scheme)
        view.wait_for("document.querySelector('main').children.length > 0 && !document.querySelector('.loading')")
        unnamed = view.page.evaluate("""() => [...document.querySelectorAll("button, input, select, a, canvas")]
          .filter((one) => one.offsetParent && !(one.textContent || one.ariaLabel || one.title || one.labels?.length))
          .map((one) => one.outerHTML)""")
        assert unnamed == []
        ratios = view.page.evaluate(CONTRASTS)
        assert min(ratios) >= 4.5, f"{scheme}: contrast {min(ratios):.2f}"


needs_axe = pytest.mark.skipif(
    find_spec("axe_core_python") is None, reason="axe is not installed: pip install -e '.[dev]'"
)
PHONE = {"width": 375, "height": 700}


def serious_problems(view: Watched) -> list[Any]:
    view.wait_for("document.querySelector('main').children.length > 0 && !document.querySelector('.loading')")
    view.page.wait_for_timeout(300)
    if not view.page.evaluate("'axe' in window"):
        view.page.evaluate((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = view.page.evaluate("""async () => {
      const { violations, passes } = await axe.run();
      return { violations, passes: passes.length };
    }""")
    assert found["passes"] > 10  # it did look
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in serious]


@needs_axe
@pytest.mark.parametrize("address", PAGES)
def test_axe_finds_nothing_serious(browser: Any, url: str, address: str) -> None:
    for scheme in ("light", "dark"):
        view = Watched(browser, color_scheme=scheme, bypass_csp=True)  # the page's own policy lets no other script in
        view.go(url + address)
        assert serious_problems(view) == [], scheme
        if scheme == "dark":
            view.page.set_viewport_size(PHONE)
            assert serious_problems(view) == [], "on a phone"
        view.context.close()


@needs_axe
def test_axe_finds_nothing_serious_in_the_help_and_in_an_exported_page(
    browser: Any, url: str, folder: Path, tmp_path: Path
) -> None:
    view = Watched(browser, bypass_csp=True)
    view.go(url + "#/run/shop/episode/train_000002/0")
    view.page.wait_for_selector(".conversation")
    view.page.locator("#step-1 .left-out summary").click()
    view.page.wait_for_selector(".left-out del")
    assert serious_problems(view) == [], "with what was left out"
    view.page.keyboard.press("?")
    assert view.page.locator("dialog[open]").count() == 1
    assert serious_problems(view) == [], "with the help"
    target = tmp_path / "page.html"
    export_page(Library([folder]), target, episodes=24)
    for address in ("#/", "#/run/shop/episodes", "#/run/shop/episode/train_000001/0?view=tokens"):
        view.go("about:blank")
        view.go(target.as_uri() + address)
        view.page.wait_for_selector(".chart:visible, a.row, .conversation")
        assert serious_problems(view) == [], f"exported: {address}"
    view.context.close()


# The contrast of the text colours with the backgrounds they are used on (WCAG: 4.5 for text).
CONTRASTS = """() => {
  const light = (variable) => {
    const probe = document.createElement("span");
    probe.style.color = `var(${variable})`;
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    probe.remove();
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const backs = ["--page", "--card", "--raised"];
  return ["--text", "--muted", "--accent", "--bad"].flatMap((text) => backs.map((back) => contrast(text, back)));
}"""


def test_light_and_dark_can_be_chosen(open_page: Any) -> None:
    view = open_page("#/", color_scheme="light")
    view.page.wait_for_selector("li.run")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = view.page.evaluate(colour)
    view.page.get_by_label("Light or dark").click()
    after = view.page.evaluate(colour)
    assert before != after
    view.page.reload()
    view.page.wait_for_selector("li.run")
    assert view.page.evaluate(colour) == after
    assert open_page("#/", color_scheme="dark").page.evaluate(colour) == after


def test_the_keyboard_help_and_wrong_addresses(open_page: Any) -> None:
    view = open_page("#/nowhere")
    view.page.wait_for_selector(".empty")
    assert "There is no such page" in view.texts(".empty")[0]
    view.page.keyboard.press("?")
    assert view.page.locator("dialog").is_visible()
    view.page.keyboard.press("Escape")
    assert not view.page.locator("dialog").is_visible()


def test_another_page_cannot_frame_the_viewer(browser: Any, url: str, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text(f'<iframe src="{url}"></iframe>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"http://127.0.0.1:{other.server_port}/other.html")
        page.wait_for_timeout(1000)
        assert page.frames[1].url.startswith("chrome-error:")
        assert "frame-ancestors 'none'" in "".join(said)
        page.close()
        other.shutdown()


def test_an_exported_file_needs_no_server(open_page: Any, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    kept = export_page(Library([folder]), target, episodes=24)
    assert kept["episodes"] == 24
    text = target.read_text(encoding="ascii")
    assert text.count("</script>") == 2  # hostile text does not end the data
    view = open_page("#/", base=target.as_uri())
    view.page.wait_for_selector(".chart:visible")
    assert painted(view, 0) > 3
    assert "24 of 40 episodes" in view.texts(".note")[0]
    for address in (*PAGES, "#/run/shop/episodes?text=onerror&stop=max_steps"):
        view.go(target.as_uri() + address)
        view.page.reload()
        view.wait_for("document.querySelector('main').children.length > 0 && !document.querySelector('.loading')")
        assert "cannot be shown" not in view.texts("main")[0] or "train_000002" in address
        assert "hacked" not in view.page.title()
    assert view.texts(".count")[0].startswith("4 episodes")  # of each run 12: three of each of four files
    view.page.locator("a.row").first.click()
    view.page.wait_for_selector(".conversation")
    assert all(asked.startswith("file:") for asked in view.asked)


def test_the_page_works_inside_a_notebook(open_page: Any, folder: Path, tmp_path: Path) -> None:
    frame = inline_frame(Library([folder / "shop"]))
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>n</title>{frame}", encoding="utf-8")
    view = open_page("", base=(tmp_path / "notebook.html").as_uri())
    inside = view.page.frame_locator("iframe")
    inside.locator(".chart:visible").first.wait_for()
    inside.locator("a[href='#/run/shop/episodes']").click()
    inside.locator("a.row").first.wait_for()
    inside.get_by_label("Stop reason").select_option("error")
    inside.locator(".count", has_text="5 episodes").wait_for()
    inside.locator("a.row").first.click()
    inside.get_by_text("it broke").wait_for()
    inside.get_by_role("link", name="agent-r1").click()
    inside.locator(".chart:visible").first.wait_for()
    assert view.page.evaluate("location.hash") == ""


def test_a_run_directory_is_not_changed_by_looking_at_it(browser: Any, tmp_path: Path) -> None:
    run: RunDir = make_run(tmp_path / "shop", steps=1)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    server, link = serve_with(str(run.path))
    try:
        view = Watched(browser)
        view.go(f"{link}#/run/shop/episodes")
        view.page.wait_for_selector("a.row")
        view.context.close()
    finally:
        server.terminate()
        server.wait(20)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
