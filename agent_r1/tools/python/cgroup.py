"""A control group for each run, if the system allows it: limits the run's memory including kernel memory.

Needs cgroup v2 with a memory controller and write access to the parent of our own group, as in a service of a systemd
user session. Elsewhere, runs have only the limits of their processes. All of this runs on the host, not in the sandbox.
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
    """Find the group in which we may create others, from the text of /proc/self/cgroup; None if there is none.

    A group that contains processes, such as our own, cannot limit groups below it, so this is its parent.
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
    """A group for one run. Raises OSError if it cannot be created."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        self._folder.mkdir()
        try:
            most = (limits.processes * limits.memory_mb + limits.scratch_mb) * MIB
            self._write("memory.max", str(most))
            self._write("memory.oom.group", "1")  # kill the whole run
            if (self._folder / "memory.swap.max").exists():  # missing if the kernel does not account swap
                self._write("memory.swap.max", "0")
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        self._write("cgroup.procs", str(pid))

    def remove(self) -> None:
        """Remove the group after its processes have ended."""
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
    """The parent of the groups of runs. Tested with an idle process, because permissions alone are not enough."""
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
    """Remove the empty groups of killed programs."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not Path(f"/proc/{folder.name.removeprefix(_PREFIX).split('-')[0]}").exists():
            with suppress(OSError):  # not empty: not ours after all
                folder.rmdir()


def pid_of(handle: int) -> int:
    """The pid behind a pidfd, in the namespace of this process."""
    found = re.search(r"^Pid:\s+(\d+)$", Path(f"/proc/self/fdinfo/{handle}").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ProcessLookupError("the process has ended")
    return int(found[1])
