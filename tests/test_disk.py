"""Files and folders are written completely or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent_r1.disk import A_DAY, write_atomically


def test_a_file_and_a_folder_appear_only_when_they_are_complete(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "new" / "file") as part:
        part.write_text("whole", encoding="utf-8")
        assert not (tmp_path / "new" / "file").exists()
    assert (tmp_path / "new" / "file").read_text(encoding="utf-8") == "whole"
    with write_atomically(tmp_path / "folder") as part:
        part.mkdir()
        (part / "inside").write_text("x", encoding="utf-8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "inside", "new"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old", encoding="utf-8")

    def fail() -> None:
        with write_atomically(tmp_path / "file") as part:
            part.write_text("ha", encoding="utf-8")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "old"


def test_leftovers_that_cannot_be_deleted_do_not_fail_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".old.01.part").touch()
    os.utime(tmp_path / ".old.01.part", (time.time() - A_DAY - 60,) * 2)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:  # of another user, in a shared folder
        if path.name == ".old.01.part":
            raise PermissionError(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with write_atomically(tmp_path / "file") as part:
        part.touch()
    assert (tmp_path / "file").exists()


def test_leftovers_of_killed_processes_are_deleted_after_a_day(tmp_path: Path) -> None:
    for name, age in {".old.01.part": A_DAY + 60, ".new.02.part": 60, "mine.part": A_DAY + 60}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with write_atomically(tmp_path / "file") as part:
        part.touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.02.part", "file", "mine.part"]
