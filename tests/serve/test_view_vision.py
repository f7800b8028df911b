"""Pictures of episodes in the viewer, in an exported page and in the terminal. Their files and names may be hostile."""

from __future__ import annotations

import io
import json
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from starlette.testclient import TestClient

from agent_r1 import Reply, TextEnv
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import RecordFile, transcript, write_groups
from agent_r1.serve.terminal_pictures import escapes, protocol_of, show_pictures
from agent_r1.serve.view.export import export_page
from agent_r1.serve.view.library import Library
from agent_r1.serve.view.server import HEADERS, make_app
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.types import Group, TaskRow
from agent_r1.vision.picture_store import PICTURES, find_picture
from benchmarks.browser import browser_or_none, why_no_browser
from tests.conftest import Cli
from tests.serve.small_runs import CONFIG
from tests.serve.test_view_export import data_of
from tests.serve.test_view_server import serve_with
from tests.vision.played import CALL, FIRST, parts, play_groups, seeing_row
from tests.vision.tiny_models import picture

SEEN = [picture(1, 16, 24), picture(2, 16, 24)]  # by the calls
FRAME = picture(7, 20, 20)
REASON = why_no_browser()


class Window(TextEnv):
    """Answers with the same picture each time."""

    def begin(self, row: TaskRow) -> Reply:
        return Reply(text="begin", images=[FRAME])

    def reply(self, said: str) -> Reply:
        return Reply(text="" if said == "a" else "moved", images=[FRAME], done=said == "end")


def groups() -> list[Group]:
    calling = play_groups([CALL % 1, f"{CALL % 2}{CALL % 1}", "done"], [seeing_row("calls")])
    walking = play_groups(["a", "b", "end"], [seeing_row("walks", shown=())], make_env=lambda _: Window())
    return [*calling, *walking]


@pytest.fixture(scope="module")
def played() -> list[Group]:
    return groups()


@pytest.fixture(scope="module")
def folder(played: list[Group], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    run = RunDir.create(place / "sees", CONFIG)
    run.write_tokens(token_texts(parts()[0]))
    run.write_trajectories("eval", 0, played)
    return place


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(make_app(Library([folder])), base_url="http://localhost:8200")


def ask_episode(client: TestClient, n: int) -> Any:
    return client.get("/api/episode", params={"run": "sees", "file": "eval_000000", "n": n}).json()


def test_each_picture_is_stored_once_and_records_read_back_as_they_were(
    folder: Path, played: list[Group], tmp_path: Path
) -> None:
    pictures = folder / "sees" / "trajectories" / PICTURES
    assert sorted(p.stem for p in pictures.iterdir()) == sorted(p.name for p in (FIRST, FRAME, *SEEN))
    write_groups(tmp_path / "x.jsonl", played)
    [first, second] = RecordFile(tmp_path / "x.jsonl").trajectories()
    for read, made in zip((first, second), (group.trajectories[0] for group in played), strict=True):
        assert [step.pictures for step in read.steps] == [step.pictures for step in made.steps]
        assert [[c.pictures for c in s.calls] for s in read.steps] == [
            [c.pictures for c in s.calls] for s in made.steps
        ]
        assert [step.prompt_ids for step in read.steps] == [step.prompt_ids for step in made.steps]
        shown = [picture for step in read.steps for picture in step.pictures]
        assert len({id(picture) for picture in shown}) == len(set(shown)) < len(shown)  # one copy in memory
        assert all(
            (a.pixels == b.pixels).all() for a, b in zip(read.steps[-1].pictures, made.steps[-1].pictures, strict=True)
        )


def test_pictures_of_an_episode_that_never_began_are_kept(tmp_path: Path) -> None:
    [group] = play_groups(["never"], [seeing_row()], max_context_tokens=8)
    assert not group.trajectories[0].steps
    write_groups(tmp_path / "x.jsonl", [group])
    assert find_picture(tmp_path / PICTURES, FIRST.name) is not None


def test_a_page_names_the_pictures_where_they_were_shown(client: TestClient) -> None:
    page = ask_episode(client, 0)
    assert page["messages"][0]["pictures"] == [FIRST.name]
    assert page["messages"][0]["text"]["text"] == f"[image {FIRST.name[:6]}]\nwhat is it?"
    assert [[call["pictures"] for call in step["calls"]] for step in page["steps"]] == [
        [[SEEN[0].name]], [[SEEN[1].name], [SEEN[0].name]], [],
    ]  # fmt: skip
    assert [step["pictures"] for step in page["steps"]] == [[], [], []]
    walk = ask_episode(client, 1)
    assert walk["messages"][0]["pictures"] == [FRAME.name]
    assert [step["pictures"] for step in walk["steps"]] == [[FRAME.name], [FRAME.name], []]  # the same frame again


def test_the_tokens_of_a_picture_are_marked(client: TestClient) -> None:
    asked: dict[str, str | int] = {"run": "sees", "file": "eval_000000", "n": 0, "step": 0, "part": "prompt"}
    page = client.get("/api/tokens", params=asked).json()
    count = parts()[1].tokens(FIRST)
    start = page["texts"].index(f"[image {FIRST.name[:6]}]")
    assert page["texts"][start + 1 : start + count] == ["▪"] * (count - 1)
    assert page["texts"][start + count] == "<|vision_end|>"


def test_a_picture_is_served_with_its_type_and_every_security_header(client: TestClient) -> None:
    answer = client.get(f"/pictures/sees/{FIRST.name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    assert answer.content == FIRST.encoded
    for name, value in HEADERS.items():
        assert answer.headers.get_list(name) == [value]


@pytest.mark.parametrize(
    "address",
    [
        "/pictures/sees/../../config.json", "/pictures/sees/..%2f..%2f..%2fconfig.json", "/pictures/sees/%2e%2e",
        "/pictures/../sees/NAME", "/pictures/..%2fsees/NAME", "/pictures/other/NAME", "/pictures/sees/NAME.png",
        "/pictures/sees/NAME%00", "/pictures/sees/NAME%0a", "/pictures/sees/", "/pictures/sees", "/pictures/sees/*",
        "/pictures/sees/" + "0" * 32, "/pictures/sees/" + "G" * 32, "/pictures/sees/" + "a" * 5000,
    ],
)  # fmt: skip
def test_nothing_but_pictures_of_the_run_is_served(client: TestClient, address: str) -> None:
    answer = client.get(address.replace("NAME", FIRST.name))
    assert answer.status_code == 404
    assert "recipe" not in answer.text


def test_links_and_files_of_other_types_are_not_served(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "sees", CONFIG)
    pictures = run.path / "trajectories" / PICTURES
    pictures.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (pictures / f"{'1' * 32}.png").symlink_to(tmp_path / "secret")
    for suffix in ("svg", "html", "png.svg", "js"):
        (pictures / f"{'2' * 32}.{suffix}").write_text("<script>alert(1)</script>")
    (pictures / f"{'3' * 32}.png").write_text("<script>alert(1)</script>")  # a browser must not guess another type
    client = TestClient(make_app(Library([tmp_path])), base_url="http://localhost:8200")
    assert [client.get(f"/pictures/sees/{digit * 32}").status_code for digit in "123"] == [404, 404, 200]
    answer = client.get(f"/pictures/sees/{'3' * 32}")
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("image/png", "nosniff")
    pictures.rename(tmp_path / "elsewhere")
    pictures.symlink_to(tmp_path / "elsewhere")
    assert client.get(f"/pictures/sees/{'3' * 32}").status_code == 404


def test_an_export_holds_the_pictures_of_its_episodes(folder: Path, tmp_path: Path) -> None:
    export_page(Library([folder]), tmp_path / "page.html", episodes=2)
    text = (tmp_path / "page.html").read_text(encoding="ascii")
    assert "img-src data:;" in text
    pictures = data_of(text)["pictures"]
    assert pictures.keys() == {p.name for p in (FIRST, FRAME, *SEEN)}
    head, _, data = pictures[FIRST.name].partition(",")
    assert (head, b64decode(data)) == ("data:image/png;base64", FIRST.encoded)


def test_too_many_pictures_are_left_out_of_an_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.serve.view.export.PICTURE_BYTES", 2 * len(FIRST.encoded))
    export_page(Library([folder]), tmp_path / "page.html", episodes=2)
    assert FIRST.name in data_of((tmp_path / "page.html").read_text(encoding="ascii"))["pictures"]


def test_the_terminal_names_pictures_with_their_sizes(folder: Path, played: list[Group], cli: Cli) -> None:
    out = cli("show", folder / "sees", "eval_000000/0").out
    assert f"[image 40x24 {FIRST.name[:6]}]" in out
    assert f"[image 24x16 {SEEN[1].name[:6]}]" in out
    assert "\x1b" not in out
    [calling, walking] = [group.trajectories[0] for group in played]
    assert transcript(calling)[1] == ("tool", f"look: place 1\n[image 24x16 {SEEN[0].name[:6]}]")
    assert transcript(walking)[1] == ("env", f"[image 20x20 {FRAME.name[:6]}]")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
    ],
)
def test_terminals_that_can_show_pictures_are_known(environment: dict[str, str], expected: str | None) -> None:
    assert protocol_of(environment) == expected


def test_the_escapes_hold_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    large = picture(3, 300, 400)
    commands = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", escapes(large, "kitty"))
    assert commands[0][0] == "a=T,f=100,q=2,r=15,m=1"
    assert all(keys == "m=1" for keys, _ in commands[1:-1])
    assert commands[-1][0] == "m=0"
    decoded = Image.open(io.BytesIO(b64decode("".join(data for _, data in commands))))
    assert (np.asarray(decoded) == large.pixels).all()
    head, _, data = escapes(large, "iterm2").removesuffix("\x07").partition(":")
    assert head == "\x1b]1337;File=inline=1;height=15;preserveAspectRatio=1"
    assert Image.open(io.BytesIO(b64decode(data))).size == (400, 300)
    monkeypatch.setenv("TERM", "xterm-kitty")
    monkeypatch.delenv("TMUX", raising=False)
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal)
        show_pictures([FIRST], console)
        assert ("\x1b_G" in console.file.getvalue()) is is_terminal  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_or_none() as started:
        yield started


def sizes_of_pictures(page: Any) -> list[int]:
    page.wait_for_selector(".conversation")
    page.wait_for_load_state("networkidle")
    return [one.evaluate("(one) => one.complete ? one.naturalWidth : 0") for one in page.locator(".picture img").all()]


@pytest.mark.browser
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_page_and_the_exported_page_show_the_pictures(browser: Any, folder: Path, tmp_path: Path) -> None:
    export_page(Library([folder]), tmp_path / "page.html", episodes=2)
    server, link = serve_with(str(folder))
    problems: list[str] = []
    try:
        for base in (link, (tmp_path / "page.html").as_uri()):
            page = browser.new_page()
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.goto(f"{base}#/run/sees/episode/eval_000000/0")
            assert sizes_of_pictures(page) == [40, 24, 24, 24]
            page.locator(".picture").first.click()
            assert page.locator(".picture.full").count() == 1
            page.goto(f"{base}#/run/sees/episode/eval_000000/1")
            page.reload()
            assert sizes_of_pictures(page) == [20, 20, 20]
            page.close()
    finally:
        server.terminate()
        server.wait(20)
    assert problems == []


@pytest.mark.browser
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_picture_that_is_missing_or_has_a_hostile_name_is_said_to_be_missing(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(folder / "sees", tmp_path / "sees") / "trajectories"
    shutil.rmtree(run / PICTURES)
    hostile = json.dumps('"><script>document.title="x"</script>')
    records = (run / "eval_000000.jsonl").read_text().replace(f'"{FIRST.name}"', hostile)
    (run / "eval_000000.jsonl").write_text(records)
    (run / "eval_000000.jsonl.idx").unlink()
    server, link = serve_with(str(tmp_path))
    try:
        page = browser.new_page()
        page.goto(f"{link}#/run/sees/episode/eval_000000/0")
        page.wait_for_selector(".picture.missing")
        assert "is missing" in page.locator(".picture.missing").first.inner_text()
        assert page.title() != "x"
        page.close()
    finally:
        server.terminate()
        server.wait(20)
