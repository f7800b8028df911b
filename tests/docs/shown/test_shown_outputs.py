"""Every block on a page has a language that a test knows; blocks of text are outputs that are compared, or listed."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from typer.main import get_command

from agent_r1.cli.app import app
from tests.docs.shown.blocks import BLOCKS, ROOT, in_language, name
from tests.docs.shown.outputs import CHECK, NOT_PRINTED, OUTPUTS, TEXTS, Output, differing, matches

LANGUAGES = {
    "python": "test_docs.py runs it",
    "bash": "test_shown_commands.py runs it",
    "yaml": "test_shown_recipes.py checks it",
    "text": "outputs.py lists it",
    "py": "PARTS lists it",
    "diff": "test_tutorial.py applies it",
}
# Python that cannot run by itself, and how many blocks: these clients need a server.
PARTS = {"docs/serve.md": 2}
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def test_every_block_has_a_language_whose_blocks_are_tested() -> None:
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert {name(block.page) for block in in_language("diff")} == {"docs/tutorial.md"}
    assert Counter(name(block.page) for block in in_language("py")) == PARTS  # test_serve_page.py runs the clients


def test_every_block_of_text_is_compared_or_listed() -> None:
    keys = [*OUTPUTS, *NOT_PRINTED]
    assert [block.place for block in TEXTS if not any(matches(block, key) for key in keys)] == []
    assert [key for key in keys if not any(matches(block, key) for block in TEXTS)] == []
    for why in NOT_PRINTED.values():
        for path in re.findall(r"tests/[\w/]+\.py", why):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("a 1\n...\nb", []),
        ("$ command\na   1", []),
        ("b\na 1", ["a 1"]),  # in another order
        ("a 2", ["a 2"]),
        ("a ...", []),
        ("c", ["c"]),
    ],
)
def test_lines_that_are_not_printed_are_found(shown: str, missing: list[str]) -> None:
    assert differing(shown, "a 1\nx\nb\n", Output(CHECK)) == missing


def test_numbers_may_differ_where_a_model_was_trained() -> None:
    printed = "kept 1a2c0162cb55: +0.5 of 3"
    assert differing("kept 3661bea17bbc: -12 of 40", printed, Output(CHECK, numbers=False)) == []
    assert differing("kept 3661bea17bbc: -12 of forty", printed, Output(CHECK, numbers=False)) != []


def test_the_tree_on_the_page_lists_every_folder_and_command() -> None:
    (tree,) = [block.body for block in in_language("text") if block.page == CONTRIBUTING]
    listed = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    folders = {path.parent.name for path in (ROOT / "agent_r1").glob("*/__init__.py")}
    assert listed - {"templates", "recipes"} == folders - {"templates", "recipes"}
    commands = re.search(r"  cli/ +agent-r1 (.*?)\n  \w", tree, re.DOTALL)
    assert commands is not None
    assert set(re.findall(r"\w+", commands[1])) == set(get_command(app).commands)  # type: ignore[attr-defined]
