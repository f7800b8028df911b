"""Docs match the code: their Python runs, their links resolve. `shown/` has the other code blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.shown.blocks import PAGES, ROOT, blocks, name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Functions with annotations as strings would need a module to resolve them in; a real module is what users write.
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem.replace('-', '_')}"}
    for body in blocks(page, "python"):
        exec(compile(body, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:agent_r1|tests|docs|benchmarks)/[\w/.\-]+)`", text):
        assert (ROOT / path).exists(), path
