"""`agent-r1 view --export`: one file with everything inside, and nothing that runs but our own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_r1.errors import ConfigError
from agent_r1.serve.view.export import bundle, export_page, inline_frame, page_text
from agent_r1.serve.view.library import Library
from agent_r1.serve.view.server import static_files
from tests.conftest import Cli
from tests.serve.small_runs import HOSTILE, make_run


@pytest.fixture
def page(tmp_path: Path, cli: Cli) -> str:
    make_run(tmp_path / "runs" / "shop")
    ended = cli("view", tmp_path / "runs", "--export", tmp_path / "page.html", "--episodes", "8")
    assert ended.code == 0
    assert ": 1 run, 8 of 20 episodes" in ended.out
    return (tmp_path / "page.html").read_text(encoding="ascii")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*)</script>\n', page)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_policy_allows_only_the_script_and_style_inside(page: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}(?: type=\"module\")?>(.*?)</{tag}>", page, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


def test_the_data_cannot_end_its_element_and_is_complete(page: str) -> None:
    assert "<img" not in page
    data = data_of(page)
    run = data["data"]["shop"]
    assert len(run["episodes"]) == 8
    assert {row["file"] for row in run["episodes"]} == {"eval_000003", "eval_000000", "train_000003", "train_000001"}
    assert run["episodes"][0]["question"] == "What does tea cost?"
    # Two of each file: the two attempts at tea. Three steps in all, with the tokens of their prompts.
    assert run["tokens"]["train_000003/0/1/0"]["ids"] == [0, 1, 2, 3, 4, 5, 6]
    assert len(run["tokens"]) == 4 * 3
    assert len(run["metrics"]["records"]) == 5
    assert set(run["batches"]) == {row["file"] for row in run["episodes"]}
    assert len(run["batches"]["train_000003"]["episodes"]) == 4


def test_hostile_episodes_can_be_exported(tmp_path: Path) -> None:
    make_run(tmp_path / "shop", steps=1)
    export_page(Library([tmp_path]), tmp_path / "page.html", episodes=1000)
    text = (tmp_path / "page.html").read_text(encoding="ascii")
    assert text.count("</script>") == 2
    assert HOSTILE in json.dumps(data_of(text)).encode().decode("unicode_escape")


def test_every_module_is_bundled_after_those_it_imports() -> None:
    static = static_files()
    text = bundle(static)
    order = re.findall(r"^const module_(\w+) = ", text, re.MULTILINE)
    assert sorted(order) == sorted(name.removesuffix(".js") for name in static if name.endswith(".js"))
    for name in order:
        for needed in re.findall(r'from "\./(\w+)\.js"', static[f"{name}.js"].decode()):
            assert order.index(needed) < order.index(name)
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)


def test_a_notebook_shows_the_page_in_a_frame_without_an_origin(tmp_path: Path) -> None:
    make_run(tmp_path / "shop")
    library = Library([tmp_path])
    frame = inline_frame(library)
    assert frame is not None
    found = re.fullmatch(r"<iframe sandbox='([^']*)' srcdoc='([^']*)'[^<>]*></iframe>", frame, re.DOTALL)
    assert found
    assert set(found[1].split()) == {"allow-scripts", "allow-downloads"}
    assert html.unescape(found[2]) == page_text(library, episodes=60)[0]
    assert inline_frame(library, most=1000) is None


def test_nothing_to_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no runs to export"):
        export_page(Library([tmp_path]), tmp_path / "page.html", episodes=1)
    assert not (tmp_path / "page.html").exists()
