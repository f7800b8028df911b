"""House rules that no linter checks: sizes, names, defaults in one place, and which packages load without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agent_r1"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
# What only the runs that name it import: the core could do without. Import contracts hold the core to that.
OPTIONAL = (
    *("tools/mcp/", "tools/python/", "tools/search/", "rollout/rewards/"),
    *("engines/vllm/", "engines/transformers_engine.py"),
)
# Recipes and templates; other trainers, trackers and adapters; how kinds of models take pictures; serving and its wire
# format; what measures, estimates or examines runs; what writes models for others; the Python API.
OUTSIDE_CORE = (
    *("recipes/", "templates/", "backends/", "vision/", "wire/", "serve/", "bench/", "plan/"),
    *("track/", "share/", "adapters/", "doctor/", "api/"),
)


def modules_outside(*prefixes: str) -> list[Path]:
    """Return the modules of the package that are not below these folders."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not str(path.relative_to(PACKAGE)).startswith(prefixes)]


CORE = modules_outside(*OUTSIDE_CORE, *OPTIONAL)
WITH_OPTIONAL = modules_outside(*OUTSIDE_CORE)
MAX_CORE_LINES = 19_000  # of code; physical lines are about 40 % more
MAX_LINES_WITH_OPTIONAL = 23_000
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_FOLDER_FILES = 12
MAX_README_LINES = 150
SHARED_NAMES = {
    "base.py": "the protocol or base class of its folder",
    "checks.py": "checks of settings alone, and checks that need the built parts",
    "context.py": "context policies and the settings that choose one",
    "errors.py": "the errors of the package and how the config words its errors",
    "learner.py": "the learner and how it is built",
    "load.py": "how the config and how models are read",
    "process.py": "a process that hosts environments and one that runs Python for a tool",
    "schema.py": "the schema of the config and that of tools",
    "tool.py": "the tool of its folder",
    "trainer.py": "the trainer and how it is built",
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def count_code_lines(text: str) -> int:
    """Count the lines that are neither blank nor a comment nor part of a docstring."""
    lines = text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def code_lines(paths: list[Path]) -> int:
    return sum(count_code_lines(path.read_text(encoding="utf-8")) for path in paths)


def test_code_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    text = '"""One\n\ntwo."""\n\n# why\nX = 1  # c\n\n\ndef f():\n    """Three."""\n    return 1\n'
    assert count_code_lines(text) == 3  # X, def, return


def test_the_core_stays_small() -> None:
    assert code_lines(CORE) <= MAX_CORE_LINES


def test_the_core_with_its_optional_parts_stays_small() -> None:
    assert code_lines(WITH_OPTIONAL) <= MAX_LINES_WITH_OPTIONAL


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_documented_and_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree), "state where the module sits in the flow and what it does not know"
    for function in functions(tree):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, function.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_no_folder_has_more_than_a_dozen_modules() -> None:
    modules = [path for path in modules_outside("recipes/", "templates/") if path.name != "__init__.py"]
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FOLDER_FILES} == {}


def test_modules_share_a_file_name_only_for_a_reason() -> None:
    found = defaultdict(list)
    for path in WITH_OPTIONAL:
        if path.name not in ("__init__.py", "__main__.py"):
            found[path.name].append(str(path.relative_to(PACKAGE)))
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in shared.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() - shared.keys() == set()  # a name that is no longer shared needs no reason


def test_config_values_have_no_second_default() -> None:
    second_default = re.compile(r"config\w*(\.\w+)*\.get\(|getattr\(\w*config, \"\w+\", [^N]")
    assert [str(path) for path in MODULES if second_default.search(path.read_text(encoding="utf-8"))] == []


RUNS = [f"agent_r1.runs.{path.stem}" for path in sorted((PACKAGE / "runs").glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (["agent_r1", "agent_r1.flows.flow", "agent_r1.data.rows"], ["torch", "transformers"]),
        (["agent_r1.wire.chat_request", "agent_r1.wire.reply"], ["torch", "transformers", "starlette"]),
        (RUNS, ["torch", "transformers"]),
        (["agent_r1.serve.view.server", "agent_r1.serve.view.commands"], ["torch", "transformers"]),
        (["agent_r1.cli"], ["torch"]),
    ],
    ids=["acting", "wire", "runs", "viewer", "command line"],
)
def test_light_packages_import_without_torch(modules: list[str], heavy: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; loaded = {set(heavy)} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout
