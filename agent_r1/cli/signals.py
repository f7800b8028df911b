"""Ctrl-C, SIGTERM and SIGHUP: the first signal saves and stops, a second stops at once, a third always works."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

from agent_r1.cli.stalls import blocking_told
from agent_r1.config import RunConfig
from agent_r1.errors import DiskError
from agent_r1.guard import CANCEL_SECONDS, Abort, run_through
from agent_r1.places import started_here
from agent_r1.runs.checkpoint import CheckpointError
from agent_r1.train.rng import deterministic

T = TypeVar("T")

SAME_SECONDS = 1.0  # signals this close together count as one: terminals and launchers may both send it


class Interrupted(Exception):
    """A signal stopped the run; `kept` says what was saved and how to continue."""

    def __init__(self, number: int, kept: str) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.kept = kept


def interruptible(work: Coroutine[Any, Any, T], config: RunConfig, console: Console, kept: Callable[[], str]) -> T:
    """Run `work`. The first Ctrl-C, SIGTERM or SIGHUP lets it save and stop; a second one stops it at once.

    A disk error also reports what was saved."""
    received: list[int] = []
    second = _Second()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def stop(number: int) -> None:
        handler = signal.getsignal(number)  # `second`, or what it has put in its place
        loop.remove_signal_handler(number)
        signal.signal(number, handler)
        if not received:  # a second cancel would interrupt saving
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # under nohup
            continue
        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            loop.add_signal_handler(number, stop, number)
            signal.signal(number, second)  # the loop still gets the signal when it runs again
    try:
        with started_here(), deterministic(config.trainer.deterministic), blocking_told(loop, partial(_warn, console)):
            return run_through(loop, task)
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0], kept()) from None
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, CheckpointError):
            raise  # raised by a library for another reason
        raise DiskError(f"{error}\n{kept()}") from error
    finally:
        _close(loop)
        second.give_way()


class _Second:
    """Handles signals while user code blocks the event loop: the first is left to the loop, a later one exits.

    Even a KeyboardInterrupt can be delayed, because its flow awaits the end of its env and the next env blocks the loop
    again. So the signal after that has the system's default action."""

    def __init__(self) -> None:
        self._first: float | None = None  # when it came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        if now - self._first <= SAME_SECONDS:
            return
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise Abort
        signal.raise_signal(number)

    def give_way(self) -> None:
        with suppress(ValueError):  # not the main thread: it was never in charge
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is self:
                    signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) in (self, signal.SIG_DFL):
                signal.signal(signal.SIGINT, signal.default_int_handler)


def _warn(console: Console, line: str) -> None:
    console.print(Text(line, style="yellow"), soft_wrap=True)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Like `asyncio.run` at its end, but it does not wait for ever for user code that ignores being cancelled."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
