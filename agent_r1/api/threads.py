"""Run our work in a thread of its own: the caller's may already have an event loop, as in a notebook.

The caller waits. Ctrl-C (in a notebook: interrupt) reaches the caller's thread, if that is the main one, and lets the
work save and stop as it does on the command line; a second one stops waiting at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from agent_r1.api.screen import is_interactive
from agent_r1.cli.signals import stop_work
from agent_r1.errors import ConfigError
from agent_r1.train.rng import restore_rng, rng_state

T = TypeVar("T")

NAME = "agent-r1"  # name of threads that train or evaluate
POLL_SECONDS = 0.05  # time between attempts to stop work that has just begun
_at_work = threading.Lock()  # held by the thread that trains or evaluates


def apart(work: Callable[[], T]) -> T:
    """Return what `work` returns, run in another thread. Random streams and thread counts are left as they were.

    Raises `Interrupted` if Ctrl-C stopped it, and ConfigError while other work goes on, unless that work itself calls
    this: random streams and the loading of models are shared by the whole process.
    """
    if threading.current_thread().name == NAME:  # a callback, for which the outer work waits
        return _isolated(work)
    if not _at_work.acquire(blocking=False):
        raise ConfigError(
            "another run is training or being evaluated in this process, and they would disturb each other: wait for "
            "it, or use another process"
        )

    def release_after() -> T:
        try:
            return work()
        finally:
            _at_work.release()

    return _isolated(release_after)


def _isolated(work: Callable[[], T]) -> T:
    random_streams, threads = rng_state(), torch.get_num_threads()
    try:
        return _wait(work)
    finally:
        restore_rng(random_streams)
        torch.set_num_threads(threads)


def _wait(work: Callable[[], T]) -> T:
    done: Future[T] = Future()
    context = copy_context()  # in which a notebook shows what a cell prints

    def run() -> None:
        try:
            done.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 (raised below, in the caller's thread)
            done.set_exception(error)

    thread = threading.Thread(target=run, name=NAME, daemon=True)
    try:
        thread.start()
        return done.result()
    except KeyboardInterrupt:
        if done.done():  # raised by the work itself
            raise
    while not done.done() and not stop_work(thread):
        time.sleep(POLL_SECONDS)
    result = done.result()
    if not is_interactive():  # it came too late to stop the work, but the script must end
        raise KeyboardInterrupt
    return result


class Loop:
    """An event loop in a daemon thread, for objects that must always be used in the same loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="agent-r1 loop", daemon=True).start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
