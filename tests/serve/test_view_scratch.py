"""The texts of episodes on disk: found, read by position, also where there is no disk; and little is kept in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.serve.view.index import scratch as module
from agent_r1.serve.view.index.episodes import EpisodeIndex, wait_until_read
from agent_r1.serve.view.index.scratch import Scratch, Shelf
from tests.serve.small_runs import group, make_episode, make_run, make_step


def put(shelf: Shelf, *texts: bytes) -> None:
    ended = [text + b"\0" for text in texts]
    shelf.add(shelf.scratch.append(b"".join(ended)), list(map(len, ended)))


def find(shelf: Shelf, needle: bytes, wanted: list[bool]) -> list[int]:
    return list(shelf.containing(needle, np.array(wanted, bool), bytearray()))


@given(st.lists(st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\0", b" ")), min_size=1, max_size=4)),
       st.binary(min_size=1, max_size=2).filter(lambda text: b"\0" not in text))  # fmt: skip
def test_texts_are_found_and_read_by_position(batches: list[list[bytes]], needle: bytes) -> None:
    scratch = Scratch()
    shelf, other = Shelf(scratch), Shelf(scratch)
    for index, batch in enumerate(batches):
        put(shelf, *batch)
        if index % 3 == 0:  # otherwise, batches that follow each other become one block
            put(other, needle)
    texts = [text for batch in batches for text in batch]
    assert [bytes(shelf[position]) for position in range(len(texts))] == [text + b"\0" for text in texts]
    assert find(shelf, needle, [True] * len(texts)) == [n for n, text in enumerate(texts) if needle in text]
    assert find(shelf, needle, [False] * len(texts)) == []


def test_without_a_disk_texts_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(Scratch())
    put(shelf, b"on disk")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    shelf.scratch._disk, disk = None, shelf.scratch._disk
    monkeypatch.setattr(module, "_nameless_file", full)
    put(shelf, b"one", b"two")
    put(shelf, b"three")
    shelf.scratch._disk = disk
    assert [bytes(shelf[n]) for n in range(4)] == [b"on disk\0", b"one\0", b"two\0", b"three\0"]
    assert find(shelf, b"t", [True] * 4) == [2, 3]


def test_an_episode_takes_little_memory_however_long_its_texts_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=1)
    step = make_step(text="word " * 800)
    episodes = [make_episode(f"row-{n // 8}", n, 1.0, step, step) for n in range(256)]
    for number in range(2, 4):
        run.write_trajectories("train", number, [group("row", "question " * 20, None, *episodes)])
    tracemalloc.start()
    try:
        index = EpisodeIndex(run)
        wait_until_read(index, 60)
        assert index.find({"text": "WORD word"}, offset=0, limit=1)["matches"] == 2 * 256
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / (2 * 256) < 400  # bytes; the texts of each are 8,000 long
