"""Run the work of a command: react to Ctrl-C, SIGTERM and SIGHUP, to a full disk, and to environments that block.

The first signal saves and stops, a second stops at once, a third always works. Work outside the main thread, which
gets no signals, is stopped by `stop_work`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

from agent_r1.cli.terminal import Interrupted
from agent_r1.config import RunConfig
from agent_r1.doctor.watchdog import LIBRARY, watched
from agent_r1.errors import DiskError
from agent_r1.guard import CANCEL_SECONDS, Abort, run_through
from agent_r1.places import StartedHere
from agent_r1.ranks.rank_crew import RankCrew
from agent_r1.runs.run_log import logging_to
from agent_r1.train.rng import deterministic

T = TypeVar("T")

SAME_SECONDS = 1.0  # signals this close together count as one: terminals and launchers may both send it
BLOCKED_SECONDS = 20.0
_at_work: dict[int, Callable[[int], None]] = {}  # by thread: how to stop what `interruptible` runs there


def stop_work(thread: threading.Thread) -> bool:
    """Let the work of another thread save and stop, as the first Ctrl-C does; False if it has none at the moment."""
    stop = _at_work.get(thread.ident or 0)
    if stop is not None:
        stop(signal.SIGINT)
    return stop is not None


def interruptible(
    work: Coroutine[Any, Any, T],
    config: RunConfig,
    console: Console,
    kept: Callable[[], str],
    crew: RankCrew | None = None,
) -> T:
    """Run `work`. The first Ctrl-C, SIGTERM or SIGHUP lets it save and stop; a second one stops it at once.

    A disk error also reports what was saved. A `crew` of several ranks stops together, and an environment that blocks
    one of them ends the run."""
    received: list[int] = []
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)

    def stop(number: int) -> None:
        """May be called by a signal handler or by another thread."""
        if not received:  # a second cancel would interrupt saving
            received.append(number)
            loop.call_soon_threadsafe(task.cancel if crew is None else partial(crew.request_stop, number))

    def warn(line: str) -> None:
        if crew is not None:  # the other ranks would wait
            crew.watch.fail(f"is stuck: {line}")
        console.print(Text(line, style="yellow"), soft_wrap=True)

    loop = asyncio.new_event_loop()
    task = loop.create_task(warn_of_blocking(work, warn))
    _at_work[threading.get_ident()] = stop
    try:
        with _handling_signals(stop):
            try:
                with StartedHere(), deterministic(config.trainer.deterministic):
                    return run_through(loop, task)
            finally:
                del _at_work[threading.get_ident()]
                _close(loop)
    except asyncio.CancelledError:
        number = next(iter(received), crew.stop_number if crew is not None else 0)  # another rank may have received it
        if not number:
            raise
        raise Interrupted(number, kept()) from None
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, DiskError):
            raise  # raised by a library for another reason
        raise DiskError(f"{error}\n{kept()}") from error


@contextmanager
def _handling_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` for the first signal, even while user code blocks the event loop; a later one exits.

    Even a KeyboardInterrupt can be delayed, because its flow awaits the end of its env and the next env blocks the loop
    again. So the signal after that has the system's default action."""
    first: float | None = None  # time of the first signal

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        stop(number)
        if time.monotonic() - first <= SAME_SECONDS:
            return
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise Abort
        signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []  # else under nohup
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_unkept(work: Coroutine[Any, Any, T], config: RunConfig, console: Console) -> T:
    """Run work that writes nothing. Failed episodes are not logged: the result sums them up."""
    with logging_to(Path(os.devnull)):
        return interruptible(work, config, console, lambda: "nothing was written")


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Like the end of `asyncio.run`, but with a time limit for user code that ignores cancellation."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def warn_of_blocking(
    work: Coroutine[Any, Any, T], warn: Callable[[str], None], seconds: float = BLOCKED_SECONDS
) -> T:
    """Await `work`. Warn once, from another thread, if user code keeps all other episodes waiting."""

    def end(place: str) -> None:
        if place != LIBRARY:  # such as torch, when the engine works for an episode
            warn(
                f"{place} has blocked all other episodes for {seconds:.0f} s, and no time limit can end it. Set "
                "task.workers.processes=4 to run environments in separate processes"
            )

    async with watched(seconds, end):
        return await work
