"""Every recipe on a page is read and checked as before a run, with the Python of its page and a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agent_r1.build.plan import build_plan
from agent_r1.config import load_config
from tests.docs.shown.blocks import Block, in_language, name

# What pages leave to the reader. Definitions of the page take the place of those with the same name.
READERS_OWN = '''
from __future__ import annotations
from agent_r1 import tool
from tests.mini.task import Endless as World, demos, make_model, reward, rows
small_rows = rows

@tool
async def calculate(expression: str) -> str:
    """Calculate."""
    return expression

@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def rows_with(**tools):
    def rows(split: str, count: int = 20):
        return [TaskRow(prompt=row.prompt, row_id=row.row_id, env_kwargs={"tools_kwargs": tools})
                for row in small_rows(split, count)]
    return rows
'''
# How task.py ends for a recipe (page, and its place among the page's): rows that suit it, and its env.
ENDS = {
    ("docs/first-task.md", 0): "rows = rows_with(price={'prices': {'tea': 4}})",
    ("docs/tool-env.md", 0): "rows = rows_with(find_order={'orders': {}}, cancel_order={'orders': {}})",
    ("docs/vision.md", 0): "rows = rows_with(crop={'page': page})",
    ("docs/write-a-tool.md", 0): "rows = small_rows",
    ("docs/write-a-tool.md", 1): "rows, GameEnv = small_rows, World",
    ("docs/write-an-env.md", 1): "rows, Castle = small_rows, World",
}
# These are read, but what they name is not here.
NOT_HERE = {
    ("docs/adapters.md", 0): "downloads a data set",
    ("docs/adapters.md", 2): "my_games is a module of the reader",
    ("docs/adapters.md", 4): "verifiers: .ci/adapters tests it in an environment of its own",
    ("docs/adapters.md", 5): "openenv: .ci/adapters tests it in an environment of its own",
    ("docs/adapters.md", 6): "my_tasks is a folder of the reader",
    ("docs/configuration.md", 2): "/data/wikipedia is an index of the reader",
    ("docs/mcp.md", 0): "starts a server and calls another: tests/train/test_mcp_run.py",
}
NO_RECIPE = {("docs/verl.md", 0): "a manifest of Kubernetes"}
MODEL = ["model.path=null", "model.chat_template=null", "model.max_pixels=null", "model.make=task.make_model"]


def keyed(blocks: list[Block]) -> dict[tuple[str, int], Block]:
    """Blocks by their page and their place among its blocks."""
    found: dict[tuple[str, int], Block] = {}
    for block in blocks:
        page = name(block.page)
        found[page, sum(other == page for other, _ in found)] = block
    return found


SHOWN = keyed(in_language("yaml"))


def written(folder: Path, key: tuple[str, int]) -> Path:
    """Write a recipe and the Python of its page. A preset stands beside the page's first recipe."""
    block = SHOWN[key]
    page = "\n".join(other.body for other in in_language("python") if other.page == block.page)
    # A name can be registered once in a process, and each recipe has a module of its own.
    page = re.sub(r"^@\w+\.register\(.*\)\n|^from __future__ .*\n", "", page, flags=re.MULTILINE)
    (folder / "task.py").write_text(f"{READERS_OWN}\n{page}\n{ENDS.get(key, '')}\n", encoding="utf-8")
    (folder / "base.yaml").write_text(SHOWN[key[0], 0].body, encoding="utf-8")
    (folder / "shown.yaml").write_text(block.body, encoding="utf-8")
    return folder / "shown.yaml"


@pytest.mark.parametrize("key", [key for key in SHOWN if key not in NO_RECIPE], ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_recipe_shown_is_valid(
    key: tuple[str, int], tmp_path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(written(tmp_path, key))
    load_config(recipe)
    config = load_config(recipe, [] if "model: {make:" in SHOWN[key].body else MODEL)
    if key not in NOT_HERE:
        assert build_plan(config).train_rows


def test_the_exceptions_name_blocks_and_other_yaml_can_be_read() -> None:
    assert SHOWN.keys() >= {*ENDS, *NOT_HERE, *NO_RECIPE}
    for key in NO_RECIPE:
        assert {"apiVersion", "kind"} <= yaml.safe_load(SHOWN[key].body).keys()
