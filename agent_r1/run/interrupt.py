"""Ctrl-C and SIGTERM: what runs may save what it has and end; a second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import torch

from agent_r1.agent.guard import CANCEL_SECONDS
from agent_r1.config import RunConfig
from agent_r1.run.rng import deterministic

T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; `kept` says what was saved and how to go on."""

    def __init__(self, number: int, kept: str) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.kept = kept


def interruptible(work: Coroutine[Any, Any, T], config: RunConfig, kept: Callable[[], str]) -> T:
    """Run `work`; the first Ctrl-C or SIGTERM lets it save and end, a second one ends it at once."""
    received: list[int] = []
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def stop(number: int) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            loop.add_signal_handler(number, stop, number)
    try:
        with deterministic(config.trainer.deterministic):
            return loop.run_until_complete(task)
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0], kept()) from None
    finally:
        _close(loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Like `asyncio.run` at its end, but it does not wait for ever for user code that ignores being cancelled."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
