"""Run the work of a command: react to Ctrl-C, SIGTERM and SIGHUP, to a full disk, and to environments that block.

The first signal saves and stops, a second stops at once, a third always works. Only the main thread gets signals; work
in another thread is stopped by `stop_work`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
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
from agent_r1.envs.base import call_env
from agent_r1.errors import DiskError
from agent_r1.guard import CANCEL_SECONDS, Abort, run_through
from agent_r1.places import StartedHere
from agent_r1.ranks.rank_crew import RankCrew
from agent_r1.train.rng import deterministic

T = TypeVar("T")

SAME_SECONDS = 1.0  # signals this close together count as one: terminals and launchers may both send it
BLOCKED_SECONDS = 20.0
_PACKAGE = Path(__file__).parents[1]
_at_work: dict[int, Callable[[], object]] = {}  # by thread: how to stop what `interruptible` runs there


def stop_work(thread: threading.Thread) -> bool:
    """Let the work of another thread save and stop, as the first Ctrl-C does; False if it has none at the moment."""
    stop = _at_work.get(thread.ident or 0)
    return stop is not None and stop() is not None


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
    second = _Second()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def stop(number: int) -> None:
        handler = signal.getsignal(number)  # `second`, or the handler that has replaced it
        if loop.remove_signal_handler(number):  # not in another thread
            signal.signal(number, handler)
        if not received:  # a second cancel would interrupt saving
            task.cancel() if crew is None else crew.request_stop(number)
        received.append(number)

    _listen(loop, stop, second)
    _at_work[threading.get_ident()] = lambda: loop.call_soon_threadsafe(stop, signal.SIGINT)
    try:
        with (
            StartedHere(),
            deterministic(config.trainer.deterministic),
            watch_for_blocking(loop, partial(_warn, console, crew)),
        ):
            return run_through(loop, task)
    except asyncio.CancelledError:
        if crew is not None and crew.stop_number:  # another rank has received it
            received.append(crew.stop_number)
        if not received:
            raise
        raise Interrupted(received[0], kept()) from None
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, DiskError):
            raise  # raised by a library for another reason
        raise DiskError(f"{error}\n{kept()}") from error
    finally:
        del _at_work[threading.get_ident()]
        _close(loop)
        second.restore()


def _listen(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], second: _Second) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # under nohup
            continue
        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            loop.add_signal_handler(number, stop, number)
            signal.signal(number, second)  # the loop still gets the signal when it runs again


def _warn(console: Console, crew: RankCrew | None, line: str) -> None:
    if crew is not None:  # the other ranks would wait
        crew.watch.fail(f"is stuck: {line}")
    console.print(Text(line, style="yellow"), soft_wrap=True)


class _Second:
    """Handles signals while user code blocks the event loop: the first is left to the loop, a later one exits.

    Even a KeyboardInterrupt can be delayed, because its flow awaits the end of its env and the next env blocks the loop
    again. So the signal after that has the system's default action."""

    def __init__(self) -> None:
        self._first: float | None = None  # time of the first signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        if now - self._first <= SAME_SECONDS:
            return
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise Abort
        signal.raise_signal(number)

    def restore(self) -> None:
        with suppress(ValueError):  # not the main thread: it was never installed
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is self:
                    signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) in (self, signal.SIG_DFL):
                signal.signal(signal.SIGINT, signal.default_int_handler)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Like the end of `asyncio.run`, but with a time limit for user code that ignores cancellation."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@contextmanager
def watch_for_blocking(
    loop: asyncio.AbstractEventLoop, warn: Callable[[str], None], seconds: float = BLOCKED_SECONDS
) -> Iterator[None]:
    """Warn once, from another thread, if an environment blocks this thread's event loop, and with it every other
    episode."""
    watched, ended = threading.get_ident(), threading.Event()
    last_beat = time.monotonic()

    def beat() -> None:
        nonlocal last_beat
        last_beat = time.monotonic()
        loop.call_later(1.0, beat)

    def watch() -> None:
        while not ended.wait(min(1.0, seconds / 4)):
            blocked = time.monotonic() - last_beat > seconds
            if blocked and (place := _env_at_work(sys._current_frames().get(watched))):
                warn(
                    f"{place} has blocked all other episodes for {seconds:.0f} s, and no time limit can end it. "
                    "Set task.workers.processes=4 to run environments in separate processes"
                )
                return

    loop.call_soon(beat)
    watcher = threading.Thread(target=watch, name="watch for blocking envs", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _env_at_work(frame: FrameType | None) -> str | None:
    """Return the running method of an environment with file and line, or None if none is running, for example while the
    learner works."""
    frames: list[FrameType] = []
    while frame is not None and frame.f_code is not call_env.__code__:
        frames.append(frame)
        frame = frame.f_back
    if frame is None or not frames:
        return None
    own = [each for each in frames if not Path(each.f_code.co_filename).is_relative_to(_PACKAGE)]
    method = (own or frames)[-1]  # the outermost: `TextEnv.step` calls the user's `reply`
    return f"{method.f_code.co_qualname} ({Path(method.f_code.co_filename).name}, line {method.f_lineno})"
