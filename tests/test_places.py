"""Where relative paths start."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.places import StartedHere, anchored


def test_uses_that_overlap_keep_the_first_directory_until_the_last_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two threads do, whose order of ending is not that of nested blocks."""
    monkeypatch.chdir(tmp_path)
    first, second = StartedHere(), StartedHere()
    first.__enter__()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    second.__enter__()
    first.__exit__(None, None, None)
    assert anchored("a") == tmp_path / "a"
    second.__exit__(None, None, None)
    assert anchored("a") == tmp_path / "below" / "a"
