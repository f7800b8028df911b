"""A control group for each run, where the system lets us make one: a bound on its memory that includes the kernel's.

Needs cgroup v2 with a memory controller and write access to the group above our own, as in a service of a systemd user
session. Elsewhere runs have the limits of their processes only. Everything happens on the host's side.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from agent_r1.tools.python.limits import Limits

MIB = 1 << 20
_PREFIX = "agent-r1-run-"
_NUMBERS = itertools.count()


def find_parent(membership: str, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The group in which we may make others, given the text of /proc/self/cgroup; None if there is none.

    A group with processes in it, such as our own, cannot limit groups below it, so it is the one above.
    """
    found = re.search(r"^0::(/.+)$", membership, re.M)
    if found is None or not (root / "cgroup.controllers").exists():
        return None
    parent = (root / found[1].lstrip("/")).parent
    with suppress(OSError):
        allowed = (parent / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        if "memory" in allowed and os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK):
            return parent
    return None


class Group:
    """A group for one run. OSError if it cannot be made."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        self._folder.mkdir()
        try:
            most = (limits.processes * limits.memory_mb + limits.scratch_mb) * MIB
            self._write("memory.max", str(most))
            self._write("memory.oom.group", "1")  # a run ends as a whole
            if (self._folder / "memory.swap.max").exists():  # not where the kernel does not account swap
                self._write("memory.swap.max", "0")
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        self._write("cgroup.procs", str(pid))

    def remove(self) -> None:
        """Once its processes have ended."""
        with suppress(OSError):
            self._folder.rmdir()

    def _write(self, name: str, text: str) -> None:
        fd = os.open(self._folder / name, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


@cache
def parent_for_runs() -> Path | None:
    """Where groups of runs go. Tried out with a process that waits, as permissions do not tell everything."""
    try:
        parent = find_parent(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
        if parent is None:
            return None
        remove_leftovers(parent)
        group = Group(parent, Limits())
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                group.add(process.pid)
            finally:
                process.kill()
                process.wait()
                group.remove()
    except OSError:
        return None
    return parent


def remove_leftovers(parent: Path) -> None:
    """Empty groups of programs that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not Path(f"/proc/{folder.name.removeprefix(_PREFIX).split('-')[0]}").exists():
            with suppress(OSError):  # not empty: not ours after all
                folder.rmdir()


def pid_of(handle: int) -> int:
    """The process behind a pidfd, as this process numbers it."""
    found = re.search(r"^Pid:\s+(\d+)$", Path(f"/proc/self/fdinfo/{handle}").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ProcessLookupError("the process has ended")
    return int(found[1])
