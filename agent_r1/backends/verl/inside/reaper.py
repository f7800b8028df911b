"""Ends what is left of a Ray cluster after its driver is gone, however that ended. Standard library only.

Ray's processes notice the end of their driver by themselves, but not all of them, and not after a SIGKILL. This process
waits until the other end of its standard input is closed, which the system does for a dead driver too. Then it gives
Ray some seconds, and kills every process whose environment holds the mark of the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "AGENT_R1_VERL_SESSION"
GRACE_SECONDS = 10.0
LIMIT_SECONDS = 60.0


class Reaper:
    """The driver's side. The other process starts to end Ray's once this object is released or the driver is gone."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self.mark = os.urandom(16).hex()  # set in the environment of the processes that it has to end
        words = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), self.mark, str(grace_seconds)]
        # A session of its own, so that signals of a terminal do not reach it.
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)

    def release(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # not awaited: it outlives this program by some seconds


def marked(mark: str) -> list[int]:
    """The running processes of a session. Only Linux can tell."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            wanted = f"{MARK}={mark}".encode()
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if wanted in (folder / "environ").read_bytes().split(b"\0") and not is_zombie:
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def reap(mark: str, grace_seconds: float) -> None:
    end = time.monotonic() + grace_seconds
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.5)
    end = time.monotonic() + LIMIT_SECONDS
    while (left := marked(mark)) and time.monotonic() < end:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1], float(sys.argv[2]))
