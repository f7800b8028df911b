"""Ctrl-C and SIGTERM, also where user code blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest
from rich.console import Console

from agent_r1.config import load_config
from agent_r1.run.interrupt import SAME_SECONDS, Interrupted, interruptible

CONFIG = load_config(str(Path(__file__).parent / "mini"), [])
CONSOLE = Console(quiet=True)
BLOCKED_SECONDS = 10.0


def signals(number: int, *after: float) -> None:
    for seconds in after:
        Timer(seconds, os.kill, (os.getpid(), number)).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_work_end_by_itself(number: signal.Signals) -> None:
    saved = []

    async def work() -> None:
        try:
            await asyncio.sleep(BLOCKED_SECONDS)
        finally:
            saved.append("all")

    signals(number, 0.1)
    with pytest.raises(Interrupted) as stopped:
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
    assert (str(stopped.value), stopped.value.kept, saved) == (number.name, "kept", ["all"])


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(BLOCKED_SECONDS)
        finally:
            await asyncio.sleep(0.2)  # as long as it takes to save

    signals(signal.SIGTERM, 0.1, 0.1, 0.15, 0.2)
    with pytest.raises(Interrupted, match="SIGTERM"):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")


def test_a_second_ctrl_c_ends_what_blocks_the_event_loop() -> None:
    async def work() -> None:
        time.sleep(BLOCKED_SECONDS)

    started = time.monotonic()
    signals(signal.SIGINT, 0.1, 0.2 + SAME_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
    assert time.monotonic() - started < BLOCKED_SECONDS / 2


def test_where_it_is_held_up_a_third_one_ends_the_program() -> None:
    async def blocked() -> None:
        try:
            time.sleep(BLOCKED_SECONDS)
        finally:
            await asyncio.sleep(0)  # as a flow does that closes its env

    async def work() -> None:
        await asyncio.gather(blocked(), blocked())

    started, child = time.monotonic(), os.fork()
    if child == 0:
        try:
            signals(signal.SIGINT, 0.1, 0.2 + SAME_SECONDS, 0.5 + SAME_SECONDS)
            interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGINT
    assert time.monotonic() - started < BLOCKED_SECONDS / 2


def test_signals_are_as_they_were_afterwards() -> None:
    async def work() -> int:
        return 1

    assert interruptible(work(), CONFIG, CONSOLE, lambda: "kept") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
