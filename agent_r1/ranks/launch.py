"""Start the ranks of a run on this machine, pass signals on to them, and say why they ended.

This process hosts the store through which the ranks meet, so it outlives every rank and can tell the others which of
them died.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen
from types import FrameType

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from agent_r1.ranks.rank_env import AGENT_STORE
from agent_r1.ranks.watch import claims_report, own_keys, post_failure, posted_failure

GPUS = "AGENT_R1_GPUS"  # set for ranks that `launch` has started
POLL_SECONDS = 0.1
END_SECONDS = 5.0  # time for the other ranks to end by themselves after one has failed
SAME_SECONDS = 1.0  # signals this close together count as one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(program: Sequence[str], size: int) -> tuple[int, str | None]:
    """Run `program` as that many ranks. Return the exit code, and why the run failed if no rank could say so."""
    address = "127.0.0.1"
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        AGENT_STORE: "True",
        GPUS: str(size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks: dict[int, Popen[bytes]] = {}
    launched = Launched(own_keys(store, "0"), ranks)
    try:
        for rank in range(size):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks[rank] = Popen(program, env=own, start_new_session=True)  # Ctrl-C reaches ranks through this process
        return launched.wait()
    finally:
        launched.kill()


class Launched:
    """Ranks that run."""

    def __init__(self, store: Store, ranks: dict[int, Popen[bytes]]) -> None:
        self._store, self._ranks = store, ranks
        self._first: float | None = None  # time of the first signal
        self._deadline: float | None = None  # time at which the remaining ranks are killed

    def wait(self) -> tuple[int, str | None]:
        # Under nohup, SIGHUP stays ignored.
        heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # ranks would miss the store
        try:
            while any(process.poll() is None for process in self._ranks.values()):
                if self._deadline is None and self._record_failure():
                    self._deadline = time.monotonic() + END_SECONDS
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.kill()
                time.sleep(POLL_SECONDS)
            self._record_failure()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        cause = posted_failure(self._store)
        code = self._ranks[0].returncode
        if code < 0:
            code = 128 - code if self._first is not None else 1
        if cause is None:
            return code, None
        return code or 1, cause if claims_report(self._store) else None

    def kill(self) -> None:
        """End the ranks that are left, and the processes that they started."""
        for process in self._ranks.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets the ranks save and stop; a later one ends them at once."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            for process in self._ranks.values():
                if process.poll() is None:
                    process.send_signal(number)
        elif now - self._first > SAME_SECONDS:
            self._deadline = now  # `kill` here would wait for ever if it has interrupted a `poll`, which holds a lock

    def _record_failure(self) -> bool:
        """Tell the other ranks if one has died; False if none has. A rank that raised has told them itself."""
        for rank, process in self._ranks.items():
            code = process.poll()
            if code is None or code == 0 or code in (128 + number for number in SIGNALS):  # saved and stopped
                continue
            if self._first is not None and -code in SIGNALS:  # stopped before it had anything to save
                continue
            key = f"who/{rank}"
            who = self._store.get(key).decode() if self._store.check([key]) else f"rank {rank} (pid {process.pid})"
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            post_failure(self._store, f"{who} {how}")
            return True
        return False
