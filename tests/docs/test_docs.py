"""Docs match the code: their Python runs, their commands and recipes are valid, their links resolve."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from typer.main import get_command

from agent_r1.cli.app import app
from agent_r1.config import load_config, parse_config

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *ROOT.glob("agent_r1/recipes/*/README.md"),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Functions with annotations as strings would need a module to resolve them in; a real module is what users write.
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem.replace('-', '_')}"}
    for body in blocks(page, "python"):
        exec(compile(body, name(page), "exec"), namespace)


def commands(page: Path) -> list[str]:
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.split(r"&&|#", line)[: line.count("&&") + 1]]
    return [part for part in parts if re.match(r"(\.venv/bin/)?agent-r1 ", part)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_on_a_page_are_valid(page: Path) -> None:
    known = get_command(app)
    for line in commands(page):
        verb, *words = shlex.split(line)[1:]
        command = known.commands[verb]  # type: ignore[attr-defined]
        command.make_context(verb, list(words), resilient_parsing=False)
        if verb in ("train", "sft") and "quickstart" in words:
            load_config("quickstart", [word for word in words if "=" in word and not word.startswith("-")])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_every_recipe_shown_is_valid(page: Path) -> None:
    for body in blocks(page, "yaml"):
        tree = OmegaConf.to_container(OmegaConf.create(body))
        assert isinstance(tree, dict)
        parse_config({"recipe": "shown", **{str(key): value for key, value in tree.items()}})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:agent_r1|tests|docs|benchmarks)/[\w/.\-]+)`", text):
        assert (ROOT / path).exists(), path
