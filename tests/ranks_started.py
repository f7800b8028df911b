"""Start `agent-r1 train` as several ranks, as torchrun or srun would, in forks that skip the imports."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked import start_program, start_torchrun

SCALING = Path(__file__).parents[1] / "docs" / "scaling.md"
MINI = str(Path(__file__).parent / "mini")


def start_ranks(
    size: int, words: Sequence[str], log: Path, *, own: dict[int, Sequence[str]] | None = None, **variables: str
) -> list[BaseProcess]:
    """Run `agent-r1 train WORDS` on every rank; `own` words are for a single one. All write to the log."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    return [
        start_program(
            ["train", *words, *(own or {}).get(rank, ())],
            {**os.environ, **common, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log,
        )
        for rank in range(size)
    ]


def start_nodes(count: int, words: Sequence[str], log: Path) -> list[BaseProcess]:
    """Run `agent-r1 train WORDS` by the torchrun command of docs/scaling.md, with one rank on each node. All nodes are
    this machine."""
    _, _, after = SCALING.read_text(encoding="utf-8").partition("```bash\ntorchrun ")
    documented = shlex.split(after.partition("\nsrun ")[0].replace("\\\n", " "))
    program, options = documented.index("agent-r1"), {"--nnodes": str(count), "--nproc-per-node": "1"}
    options["--rdzv-endpoint"] = f"127.0.0.1:{_free_port()}"
    torchrun = [options.get(before, word) for before, word in pairwise(["", *documented[:program]])]
    train = [sys.executable, "-m", "agent_r1.cli", "train", *words]
    own = ["--local-addr", "127.0.0.1", *torchrun, *train]  # the machine's name may not be known to its network
    return [start_torchrun(own, {**os.environ, "OMP_NUM_THREADS": "1"}, log) for _ in range(count)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


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
