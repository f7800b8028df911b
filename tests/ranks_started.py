"""Start `agent-r1 train` as several ranks, as torchrun or srun would, in forks that skip the imports."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked import start_program

MINI = str(Path(__file__).parent / "mini")


def start_ranks(
    size: int, words: Sequence[str], log: Path, *, own: dict[int, Sequence[str]] | None = None, **variables: str
) -> list[BaseProcess]:
    """Run `agent-r1 train WORDS` on every rank; `own` words are for a single one. All write to the log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    return [
        start_program(
            ["train", *words, *(own or {}).get(rank, ())],
            {**os.environ, **common, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log,
        )
        for rank in range(size)
    ]


def ends(processes: Sequence[BaseProcess], seconds: float = 300.0) -> list[int | None]:
    """Wait for all to end, and return their exit codes."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        with suppress(ProcessLookupError):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
    return codes


def wait_for(metrics: Path, step: int, log: Path, seconds: float = 300.0) -> None:
    """Wait until a training step has been written."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text(encoding="utf-8"):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came: {log.read_text(encoding='utf-8')}")
