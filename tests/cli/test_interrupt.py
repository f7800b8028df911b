"""Ctrl-C, SIGTERM and SIGHUP, also where user code blocks the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer

import pytest
from rich.console import Console

from agent_r1.cli.signals import SAME_SECONDS, interruptible
from agent_r1.cli.terminal import Interrupted
from agent_r1.config import load_config
from agent_r1.errors import DiskError

CONFIG = load_config(str(Path(__file__).parents[1] / "mini"), [])
CONSOLE = Console(quiet=True)
BLOCKED_SECONDS = 10.0


def signals(number: int, *after: float) -> None:
    for seconds in after:
        Timer(seconds, os.kill, (os.getpid(), number)).start()


@pytest.fixture(autouse=True)
def hearing_sighup() -> Iterator[None]:
    """Whoever runs these tests may not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


def test_so_are_ctrl_c_and_the_sigterm_of_a_launcher() -> None:
    saved = []

    async def work() -> None:
        try:
            await asyncio.sleep(BLOCKED_SECONDS)
        finally:
            await asyncio.sleep(0.3)
            saved.append("all")

    signals(signal.SIGINT, 0.1)
    signals(signal.SIGTERM, 0.2)
    with pytest.raises(Interrupted, match="SIGINT"):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
    assert saved == ["all"]


def test_a_second_ctrl_c_ends_what_blocks_the_event_loop() -> None:
    async def work() -> None:
        time.sleep(BLOCKED_SECONDS)

    started = time.monotonic()
    signals(signal.SIGINT, 0.1, 0.2 + SAME_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
    assert time.monotonic() - started < BLOCKED_SECONDS / 2


async def _blocked() -> None:
    try:
        time.sleep(BLOCKED_SECONDS)
    finally:
        await asyncio.sleep(0)  # as a flow does that closes its env


async def _blocked_at_its_end() -> None:
    try:
        await asyncio.sleep(BLOCKED_SECONDS)
    finally:
        time.sleep(BLOCKED_SECONDS)


@pytest.mark.parametrize("second", [_blocked, _blocked_at_its_end])
def test_where_it_is_held_up_a_third_one_ends_the_program(second: Callable[[], Awaitable[None]]) -> None:
    async def work() -> None:
        await asyncio.gather(second(), _blocked(), second())

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


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_as_they_were_afterwards(number: signal.Signals | None) -> None:
    async def work() -> int:
        if number is not None:
            os.kill(os.getpid(), number)
            await asyncio.sleep(BLOCKED_SECONDS)
        return 1

    with suppress(Interrupted):
        assert interruptible(work(), CONFIG, CONSOLE, lambda: "kept") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_an_error_of_the_disk_says_what_was_kept() -> None:
    async def work() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    with pytest.raises(DiskError, match=r"No space left on device: 'metrics.jsonl'\nkept"):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")


def test_an_error_that_is_not_of_the_disk_stays_as_it_is() -> None:
    async def work() -> None:
        raise OSError("owner/name is not a model of the hub")

    with pytest.raises(OSError, match=r"^owner/name is not a model of the hub$"):
        interruptible(work(), CONFIG, CONSOLE, lambda: "kept")
