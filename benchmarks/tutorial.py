"""The task of docs/tutorial.md, made and trained as its page says: success after the warm start and after RL.

    python -m benchmarks.tutorial             # seeds 0, 1; writes results/tutorial.json, table and picture
    python -m benchmarks.tutorial --draw      # measure nothing; draw the stored results, and write them into the page

Every run starts with an empty cache.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_r1.cli.commands.init import write_task
from benchmarks.machine import RESULTS, machine
from benchmarks.quickstart import draw, play
from benchmarks.recipes import ROOT, keep

PAGE = ROOT / "docs" / "tutorial.md"
OUT = RESULTS / "tutorial.json"
PICTURE = ROOT / "docs" / "tutorial.png"
SEEDS = (0, 1)
MARKS = "<!-- results -->\n", "<!-- end of results -->"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def follow(folder: Path) -> Path:
    """Write the task in `folder`, and change it as the page says."""
    task = folder / "shop"
    write_task(task, Console(quiet=True))
    code = task / "task.py"
    for block in blocks("python"):
        code.write_text(with_definitions(code.read_text(encoding="utf-8"), block), encoding="utf-8")
    for block in blocks("diff"):
        name, *lines = block.splitlines()
        for old, new in zip(lines[::2], lines[1::2], strict=True):
            replace_line(folder / name, old, new)
    return task


def with_definitions(code: str, block: str) -> str:
    """Put the definitions of a block in place of those with their names, or below `total`."""
    for node in ast.parse(block).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        text = "\n".join(block.splitlines()[first_line(node) - 1 : node.end_lineno])
        lines, old, total = code.splitlines(), None, None
        for other in ast.parse(code).body:
            old = other if named(other) == named(node) else old
            total = other if named(other) == "total" else total
        if old is not None:
            lines[first_line(old) - 1 : old.end_lineno] = [text]
        else:
            assert total is not None
            lines[total.end_lineno : total.end_lineno] = ["", "", text]
            lines = [*lines]
        code = "\n".join(lines) + "\n"
    return code


def named(node: ast.stmt) -> str | None:
    return getattr(node, "name", None) or (ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None)


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([int(node.lineno), *(int(decorator.lineno) for decorator in decorators)])


def replace_line(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert (old[0], new[0], text.count(old[1:] + "\n")) == ("-", "+", 1), (file, old, new)
    file.write_text(text.replace(old[1:], new[1:]), encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    lines = ["| seed | held-out success after the warm start | after 30 GRPO steps | minutes |", "|---|---|---|---|"]
    lines += [
        f"| {run['seed']} | {run['before']:.1%} | {run['after']:.1%} | {run['seconds'] / 60:.0f} |".replace("%", " %")
        for run in results["runs"]
    ]
    rows = f"Greedy, 200 rows about items never seen in training, {results['cores']} shared cores, no GPU"
    return "\n".join([*lines, "", f"{rows}, commit `{results['commit']}`: `{results['command']}`."]) + "\n"


def write(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(results)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tutorial")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw and write the stored results")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            task = follow(Path(folder))
            facts, runs = {"command": "python -m benchmarks.tutorial", **machine()}, []
            for seed in SEEDS:
                runs.append(play(str(task), seed, Path(folder)))
                keep(OUT, {**facts, "runs": runs})
    results = json.loads(OUT.read_text(encoding="utf-8"))
    draw(results["runs"], PICTURE)
    write(results)


if __name__ == "__main__":
    main()
