from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from agent_r1.backends.verl.inside.reaper import marked

# Starts a reaper and a process with its mark that ignores every signal it can, prints both, and waits.
DRIVER = """
import os, subprocess, sys, time
from agent_r1.backends.verl.inside import reaper
held = reaper.Reaper(grace_seconds=1.0)
mark = held.mark
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], env={reaper.MARK: mark}, start_new_session=True)
print(mark, child.pid, flush=True)
time.sleep(600 if sys.argv[1] == "wait" else 0)
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs Linux")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_nothing_survives_a_driver(how: str) -> None:
    mode = "wait" if how == "killed" else "end"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, mode], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    mark, pid = driver.stdout.readline().split()
    end = time.monotonic() + 60
    if how == "killed":
        while int(pid) not in marked(mark):
            assert time.monotonic() < end, "the process did not start"
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
    driver.wait()
    while marked(mark):
        assert time.monotonic() < end, "the reaper left a process"
        time.sleep(0.2)


def test_other_processes_are_left_alone() -> None:
    assert marked("0" * 32) == []
