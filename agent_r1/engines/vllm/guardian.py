"""Runs a command and ends it, with all its children, as soon as the process that started the guardian is gone.

    python -I guardian.py COMMAND ...

The other process holds the write end of our standard input: the kernel closes it however that process ends, SIGKILL
included. Uses the standard library only and knows nothing about vLLM.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def main(command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None:
            ready, _, _ = select.select([sys.stdin], [], [], 0.5)
            if ready and not os.read(0, 1024):  # end of file
                signal_group(child.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_SECONDS)
                break
    finally:
        signal_group(child.pid, signal.SIGKILL)  # children may outlive a server that crashed
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
