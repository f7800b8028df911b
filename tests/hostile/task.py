"""An environment that attacks its own process, in the way named by $TRICK."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from agent_r1.types import Observation, TaskRow
from tests.mini.task import Endless, reward
from tests.mini.task import make_model as make_model
from tests.mini.task import rows as plain_rows

__all__ = ["Hostile", "make_model", "reward", "rows"]

RED = "\x1b[31m\x9b31m\x1b]0;owned\x07"  # colours, and a title for the window


def rows(split: str, count: int = 4) -> list[TaskRow]:
    made = plain_rows(split, count)
    if os.environ["TRICK"] != "words":
        return made
    return [
        replace(
            row,
            row_id=RED + chr(0xDC80 + number),
            prompt=[{"role": "user", "content": f"{split} {number}: \ud800 {RED}[link=http://x]here[/link]"}],
        )
        for number, row in enumerate(made)
    ]


class Hostile(Endless):
    async def reset(self, row: TaskRow) -> Observation:
        TRICKS[os.environ["TRICK"]]()
        return await super().reset(row)


def _go_elsewhere() -> None:
    os.chdir(os.environ["ELSEWHERE"])


def _go_nowhere() -> None:
    os.chdir(place := tempfile.mkdtemp())
    os.rmdir(place)


def _close_descriptor() -> None:
    for number in (1, 2):
        with suppress(OSError):
            os.close(number)


def _close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _leave() -> None:
    sys.exit(7)


def _leave_later() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 7)


def _stop_loop() -> None:
    asyncio.get_running_loop().stop()


def _stay() -> None:
    threading.Thread(target=threading.Event().wait, name="a tool's").start()


def _stay_in_the_pool() -> None:
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)


def _hang_up() -> None:
    """Once there is something to save."""
    if os.path.isdir(os.path.join(os.environ["RUN"], "checkpoints", "step_000001")):
        os.kill(os.getpid(), signal.SIGHUP)
        if os.environ.get("NOHUP") is None:
            time.sleep(0.1)


def _chat() -> None:
    print("a line of a tool\n" * 1000, flush=True)  # noqa: T201


TRICKS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "words": lambda: None,
    "go elsewhere": _go_elsewhere,
    "go nowhere": _go_nowhere,
    "close descriptors": _close_descriptor,
    "close streams": _close_streams,
    "interrupt": _interrupt,
    "leave": _leave,
    "leave later": _leave_later,
    "stop loop": _stop_loop,
    "stay": _stay,
    "stay in the pool": _stay_in_the_pool,
    "hang up": _hang_up,
    "chat": _chat,
}
