"""A control group for each run, where the system lets us make them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agent_r1.tools.python import cgroup
from agent_r1.tools.python.levels import what_is_missing
from agent_r1.tools.python.limits import KilledBy, Limits
from agent_r1.tools.python.sandbox import Sandbox
from tests.tools.python_boxes import CPYTHON, run, works

PARENT = cgroup.parent_for_runs()
needs_groups = pytest.mark.skipif(
    PARENT is None, reason="no cgroup v2 with a memory controller above our own group that we may write to"
)


def make_tree(root: Path, controllers: str) -> Path:
    parent = root / "user.slice" / "app.slice"
    (parent / "train.scope").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory\n", encoding="utf-8")
    (parent / "cgroup.subtree_control").write_text(controllers, encoding="utf-8")
    (parent / "cgroup.procs").touch()
    return parent


def test_groups_go_beside_our_own_where_memory_is_controlled(tmp_path: Path) -> None:
    parent = make_tree(tmp_path, "cpu memory pids\n")
    assert cgroup.find_parent("0::/user.slice/app.slice/train.scope\n", tmp_path) == parent
    mixed = "4:memory:/jobs/7\n1:cpu:/\n0::/user.slice/app.slice/train.scope\n"
    assert cgroup.find_parent(mixed, tmp_path) == parent


@pytest.mark.parametrize(
    "membership",
    [
        "0::/\n",  # the root of a container: the group above is out of reach
        "4:memory:/user.slice/app.slice/train.scope\n",  # cgroup v1
        "0::/elsewhere/train.scope\n",
        "",
    ],
)
def test_no_group_is_made_elsewhere(tmp_path: Path, membership: str) -> None:
    make_tree(tmp_path, "cpu memory pids\n")
    assert cgroup.find_parent(membership, tmp_path) is None


def test_no_group_is_made_without_a_memory_controller(tmp_path: Path) -> None:
    make_tree(tmp_path, "cpu pids\n")
    assert cgroup.find_parent("0::/user.slice/app.slice/train.scope\n", tmp_path) is None


def test_groups_of_programs_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone, alive, others = (tmp_path / name for name in ("agent-r1-run-999999999-0", "agent-r1-run-1-0", "x.scope"))
    for folder in (gone, alive, others):
        folder.mkdir()
    cgroup.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [alive, others]


# Pages far apart: each takes a page of page tables, which no limit of a process counts.
PAGE_TABLES = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for number in range(64_000):
    place = libc.mmap((16 << 30) + (number << 21), 4096, 3, 0x22, -1, 0)
    if place == 2**64 - 1:
        break
    ctypes.memset(place, 1, 1)
print("survived")
"""


@needs_groups
@pytest.mark.parametrize("level", CPYTHON)
def test_a_run_that_takes_kernel_memory_is_ended_as_a_whole(level: str) -> None:
    if (missing := what_is_missing(level)) is not None:
        pytest.skip(f"level {level}: {missing}")
    limits = Limits(seconds=100, cpu_seconds=100, memory_mb=64, processes=1, scratch_mb=1)
    box = Sandbox(level=level, limits=limits, libraries=(), slots=2)
    ours = f"agent-r1-run-{os.getpid()}-*"
    try:
        outcome = run(box, PAGE_TABLES)
        assert (outcome.killed_by, outcome.stdout) == (KilledBy.SIGNAL, "")
        assert works(box)
        assert run(box, "x = 1", session="s").error is None
        assert PARENT is not None
        [group] = PARENT.glob(ours)
        assert (group / "memory.max").read_text(encoding="utf-8") == f"{65 << 20}\n"
    finally:
        asyncio.run(box.close())
    assert list(PARENT.glob(ours)) == []
