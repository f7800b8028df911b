"""Rules of the house that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agent_r1"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("module", ["agent_r1.flows.flow", "agent_r1", "agent_r1.data.rows"])
def test_what_acts_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; heavy = {{'torch', 'transformers'}} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, agent_r1.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree), "a module says where it sits in the flow and what it does not know"
    for function in functions(tree):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, function.name


def test_no_module_reads_config_values_with_a_second_default() -> None:
    offenders = [
        str(path)
        for path in MODULES
        if re.search(r"config\w*(\.\w+)*\.get\(|getattr\(\w*config, \"\w+\", [^N]", path.read_text(encoding="utf-8"))
    ]
    assert offenders == []


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
