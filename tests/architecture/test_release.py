"""`.ci/release`: a tree that is to be tagged names its version, everywhere and with a date."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD = {
    "CHANGELOG.md": "# Changes\n\n## Unreleased\n\n## 1.10.0 (2026-12-01)\n\n* New.\n\n## 1.9.0 (2026-11-01)\n",
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.10.0\n",
    "pyproject.toml": '[tool.setuptools_scm]\nfallback_version = "1.10.1.dev0"\n',
}


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", folder / ".ci")
    return subprocess.run(["bash", folder / ".ci" / "release", *words], capture_output=True, text=True, timeout=60)


def test_this_tree_names_the_newest_released_version(tmp_path: Path) -> None:
    for name in GOOD:
        shutil.copy(ROOT / name, tmp_path)
    result = ended(tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_prepared_release_passes(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    result = ended(tmp_path, "1.10.0")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("CHANGELOG.md", "1.10.0 (2026-12-01)", "1.10.0", "date"),
        ("CHANGELOG.md", "## Unreleased\n", "", "Unreleased"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n* More.\n", "changes under"),
        ("CHANGELOG.md", "1.10.0 (", "1.11.0 (", "CITATION.cff"),
        ("CITATION.cff", "1.10.0", "1.9.0", "CITATION.cff"),
        ("pyproject.toml", "1.10.1.dev0", "1.9.9.dev0", "fallback_version"),
        ("pyproject.toml", "1.10.1.dev0", "1.10.0.dev0", "fallback_version"),
    ],
)
def test_a_release_that_misses_a_step_is_refused(file: str, old: str, new: str, named: str, tmp_path: Path) -> None:
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text.replace(old, new, 1) if name == file else text, encoding="utf-8")
    result = ended(tmp_path, "1.10.0")
    assert result.returncode == 1
    assert named in result.stderr


def test_a_tag_with_another_version_is_refused(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert ended(tmp_path, "1.10.1").returncode == 1


def test_the_workflow_and_the_packaging_use_the_same_checks() -> None:
    assert "bash .ci/release " in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert "bash .ci/release\n" in (ROOT / ".ci" / "package").read_text(encoding="utf-8")
