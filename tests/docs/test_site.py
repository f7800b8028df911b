"""The documentation site: its pages, links between them, llms.txt, and the checks of what was built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent_r1
from benchmarks.browser import why_no_browser
from tests.docs.shown.blocks import ROOT, in_language
from website.__main__ import navigation, outside, write_sources
from website.axe import barriers
from website.check import problems
from website.comments import comment_of
from website.llms import entries, find_definition, llms_texts, summary
from website.pages import Page, added_pages, api_pages, public_names, rewrite, site_pages, themed


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return site_pages()


def test_every_page_is_in_the_navigation_once(pages: dict[str, Page]) -> None:
    listed = [page for _, _, page in entries(navigation())]
    assert sorted(set(pages) - set(listed)) == [], "add these pages to nav in mkdocs.yml"
    assert sorted(listed) == sorted(pages)


def test_every_recipe_has_a_page_and_the_readme_is_the_home_page(pages: dict[str, Page]) -> None:
    recipes = {path.parent.name for path in ROOT.glob("agent_r1/recipes/*/README.md")}
    assert {page.split("/")[1][:-3] for page in pages if page.startswith("recipes/")} == recipes
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = pages["index.md"].text.split("[Tutorial")[0], pages["index.md"].text.split("{ .md-button }\n")[-1]
    assert readme.startswith(start)
    assert readme.endswith(end)
    assert len(start) + len(end) >= len(readme) - 2


def test_the_buttons_of_the_home_page_lead_to_pages(pages: dict[str, Page]) -> None:
    text = rewrite(pages["index.md"].text, "index.md", pages, lambda path: None)
    targets = re.findall(r"\]\(([^)]+)\)\{ \.md-button", text)
    assert len(targets) == 3
    assert set(targets) <= set(pages)


def reference() -> list[str]:
    return [line[4:] for page in api_pages().values() for line in page.text.splitlines() if line.startswith(":::")]


def test_the_api_reference_shows_every_public_name_and_each_has_a_docstring() -> None:
    assert set(public_names()) == set(agent_r1.__all__)
    shown = reference()
    assert {path.rpartition(".")[2] for path in shown} >= set(agent_r1.__all__)
    assert len(shown) == len(set(shown))
    for path in shown:
        *_, node = find_definition(path)  # the last of overloads
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            assert ast.get_docstring(node), f"{path} has no docstring"


def imported(body: str) -> Iterator[str]:
    """The names that a block imports from the package or takes from `ar`. Those of recipes are shown by the recipes."""
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom) and re.match(r"agent_r1(?!\.recipes)\b", node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ar":
            yield f"agent_r1.{node.attr}"


def test_the_api_reference_shows_every_name_that_pages_import() -> None:
    public = {f"agent_r1.{name}" for name in public_names()}
    used = {
        path: block.place for block in [*in_language("python"), *in_language("py")] for path in imported(block.body)
    }
    assert len(used) > 60
    assert {path: place for path, place in used.items() if path not in {*public, *reference()}} == {}


def rewritten(text: str, page: str, source: str) -> str:
    there = {
        page: Page(text, source),
        "index.md": Page("", "README.md"),
        "credit.md": Page("", "docs/credit.md"),
        "recipes/webshop.md": Page("", "agent_r1/recipes/webshop/README.md"),
    }
    return rewrite(text, page, there, lambda path: f"<{path}>" if path.endswith(".py") else None)


@pytest.mark.parametrize(
    ("page", "source", "link", "expected"),
    [
        ("recipes/x.md", "agent_r1/recipes/x/README.md", "[a](../../../docs/credit.md#b)", "[a](../credit.md#b)"),
        ("recipes/x.md", "agent_r1/recipes/x/README.md", "![a](../../../docs/x.png)", "![a](../x.png)"),
        ("recipes/x.md", "agent_r1/recipes/x/README.md", "[a](../webshop/README.md)", "[a](webshop.md)"),
        ("x.md", "docs/x.md", "[a](../agent_r1/recipes/webshop/README.md#r)", "[a](recipes/webshop.md#r)"),
        ("x.md", "docs/x.md", "[two\nlines](../README.md)", "[two\nlines](index.md)"),
        ("x.md", "docs/x.md", "[`a`](../agent_r1/types.py)", "[`a`](<agent_r1/types.py>)"),
        ("x.md", "docs/x.md", "[a](../LICENSE)", "a"),
        ("x.md", "docs/x.md", "[a](https://example.org) [b](#c)", "[a](https://example.org) [b](#c)"),
        ("x.md", "docs/x.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        ("x.md", "docs/x.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_of_a_page_lead_to_pages_of_the_site(page: str, source: str, link: str, expected: str) -> None:
    assert rewritten(link, page, source) == expected


def test_a_link_to_a_missing_file_fails_and_one_outside_needs_the_repositorys_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(FileNotFoundError, match="no/such"):
        outside("no/such")
    assert outside("pyproject.toml") is None
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/r")
    assert outside("pyproject.toml") == "https://example.org/r/blob/main/pyproject.toml"


def test_the_sources_of_the_site_can_be_written(tmp_path: Path, pages: dict[str, Page]) -> None:
    write_sources(tmp_path / "docs")
    assert {str(path.relative_to(tmp_path / "docs")) for path in (tmp_path / "docs").rglob("*.md")} == set(pages)
    assert "](../webshop.png)" in (tmp_path / "docs" / "recipes" / "webshop.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "quickstart.png").read_bytes() == (ROOT / "docs" / "quickstart.png").read_bytes()
    assert (tmp_path / "docs" / "llms.txt").exists()


def test_llms_txt_lists_every_page_and_the_long_form_has_their_text(pages: dict[str, Page]) -> None:
    listing, full = llms_texts(navigation(), pages, "https://example.org/")
    assert listing.startswith("# agent-r1\n\n> Train language-model agents")
    addresses = re.findall(r"\]\(https://example\.org/([^)]+)\)", listing)
    assert len(addresses) == len(pages) == len(set(addresses))
    assert {"index.html", "recipes/webshop.html", "algorithms/index.html"} <= set(addresses)
    assert all(re.search(r"\): \S", line) for line in listing.splitlines() if line.startswith("- ")), listing
    assert "class BaseTool(Resource, ABC):" in full
    assert "\n::: " not in full
    assert "asyncio.gather(*running" not in full  # bodies of functions are left out


def test_the_summary_of_a_page_is_its_first_sentence() -> None:
    assert summary("# T\n\n```bash\nx\n```\n\n| a |\n\nOne [two](x.md).\nThree.") == "One two."


def test_a_comment_beside_a_field_or_above_it_documents_it() -> None:
    lines = [
        "    # Above,",
        "    # in two lines.",
        "    a: int = 1",
        "    b: str  # beside",
        "",
        "    c = 2  # noqa: X",
    ]
    assert comment_of(lines, 3, 3) == "Above, in two lines."
    assert comment_of(lines, 4, 4) == "beside"
    assert comment_of(lines, 6, 6) == ""
    assert comment_of(["        self.a = 1  # beside"], 1, 1) == ""


GOOD = '<p>text</p><a href="b.html#there">b</a><img src="a.png"><ul><li>- x</li></ul>'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (GOOD, None),
        ('<a href="c.html">c</a>', "c.html leads nowhere"),
        ('<a href="b.html#gone">b</a>', "names a heading that b.html does not have"),
        ('<img src="b.png">', "b.png leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from another site"),
        ("<p>Either:\n- one\n- two</p>", "a list without a blank line before it"),
    ],
)
def test_the_checks_of_a_built_site_find_what_is_wrong(body: str, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(body, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>', encoding="utf-8")
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "llms.txt").write_text("[a](a.html)", encoding="utf-8")
    found = list(problems(tmp_path))
    assert (problem is None and found == []) or (problem is not None and len(found) == 1 and problem in found[0]), found


def test_the_checks_cover_styles_and_llms_txt(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("@import url(https://fonts.example.org/x)", encoding="utf-8")
    (tmp_path / "llms.txt").write_text("[a](gone.html)", encoding="utf-8")
    assert [line.split(": ")[1][:5] for line in problems(tmp_path)] == ["loads", "gone."]


def test_the_changelog_is_cut_by_version_with_the_newest_first() -> None:
    text = added_pages()["changelog.md"].text
    first, *versions = re.findall(r"^## (\S+)(?: \(\d{4}-\d\d-\d\d\))?$", text, re.MULTILINE)
    assert text.count("\n## ") == 1 + len(versions)
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert first == "Unreleased"
    assert numbers == sorted(numbers, reverse=True)


def test_a_browser_that_is_required_is_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("AGENT_R1_CHROMIUM", raising=False)
    monkeypatch.delenv("AGENT_R1_REQUIRE_BROWSER", raising=False)
    assert why_no_browser() is not None
    monkeypatch.setenv("AGENT_R1_REQUIRE_BROWSER", "1")
    with pytest.raises(RuntimeError, match="AGENT_R1_REQUIRE_BROWSER"):
        why_no_browser()


@pytest.mark.browser
@pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))
def test_barriers_are_found_in_both_schemes(tmp_path: Path) -> None:
    frame = "<!doctype html><html lang=en><head><title>x</title></head><body><main><h1>x</h1>{}</main></body></html>"
    pale = (
        "<style>p { background: #fff; color: #777 } @media (prefers-color-scheme: dark) { p { color: #111 } }</style>"
    )
    (tmp_path / "pale.html").write_text(frame.format(f"{pale}<p>Hard to read.</p>"), encoding="utf-8")
    (tmp_path / "silent.html").write_text(frame.format('<img src="">'), encoding="utf-8")
    found = list(barriers(tmp_path))
    assert [one.partition(": <")[0] for one in found] == [
        "pale.html (light): color-contrast",
        "silent.html (light): image-alt",
        "silent.html (dark): image-alt",
    ]


def test_a_picture_for_dark_systems_follows_the_theme_of_the_site() -> None:
    dark = '<source media="(prefers-color-scheme: dark)" srcset="a-dark.png">'
    light = '<img src="a-light.png" alt="An a" width="9">'
    assert themed(f"Before\n\n<picture>\n{dark}\n{light}\n</picture>\n\nafter") == (
        "Before\n\n![An a](a-light.png#only-light){ width=9 }\n![An a](a-dark.png#only-dark){ width=9 }\n\nafter"
    )


def test_every_picture_with_a_dark_version_has_both_files(pages: dict[str, Page]) -> None:
    found = re.findall(r"\]\(([^)#]+)#only-(light|dark)\)", pages["view.md"].text)
    assert len(found) == 2 * 15
    assert all((ROOT / "docs" / name).is_file() and name.endswith(f"-{theme}.png") for name, theme in found)
