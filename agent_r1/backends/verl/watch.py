"""Notices processes of verl that died, names them, and ends a run that cannot go on. verl itself waits for ever.

Every process has one question under way. Ray answers it with an error as soon as the process is gone, also while it is
busy. So a process that works for an hour is left alone, and none is asked twice at the same time.

It cancels the task of the main thread, which can then save what is finished. If that is stuck in a call that
waits for the dead process, this thread ends the program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from agent_r1.errors import RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROUND_SECONDS = 2.0  # time between questions to processes that answered
GRACE_SECONDS = 40.0  # time for the main thread to end the run by itself
_KNOWN = (r"(pid: \d+)", r"(ip: \S+)", r"exit detail: (.*?)(?: Some common causes|$)")
SAVE_SECONDS = 900.0  # replaces GRACE_SECONDS while the main thread saves


class VerlProcessError(RolloutError):
    """A process of verl died."""


class Watch:
    """Watches the processes of one run. `report` tells the user the cause if the main thread cannot."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._ended, self._noticed = threading.Event(), threading.Event()
        self.cause: str | None = None
        self.saves = False  # the main thread is writing a checkpoint

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. If a process dies, it is cancelled, and the error names the process."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if self.cause is None:  # cancelled by a signal
                raise
            raise VerlProcessError(self.cause) from None
        except Exception as error:
            if not _is_consequence(error):
                raise
            self._noticed.wait(3 * ROUND_SECONDS)
            if self.cause is None:
                logger.error("a call to verl's processes failed", exc_info=error)
                raise VerlProcessError(f"a call to verl's processes failed: {_one_line(error)}") from error
            raise VerlProcessError(self.cause) from error
        finally:
            self._ended.set()

    def begin(self, processes: Mapping[str, Any]) -> None:
        """Watch these actors, named by their role."""
        threading.Thread(target=self._run, args=(dict(processes),), name="watch over verl", daemon=True).start()

    def _run(self, processes: dict[str, Any]) -> None:
        asked = {_ask(actor): name for name, actor in processes.items()}
        while not self._ended.is_set():
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ROUND_SECONDS)
            for question in answered:
                name = asked.pop(question)
                if (reason := _death(question)) is not None:
                    self._tell(f"{name} died: {reason}")
                    return
                asked[_ask(processes[name])] = name
            if self._ended.wait(ROUND_SECONDS if answered else 0.0):
                return

    def _tell(self, cause: str) -> None:
        self.cause = cause
        self._noticed.set()
        self._loop.call_soon_threadsafe(self._cancel)
        if self._ended.wait(GRACE_SECONDS) or (self.saves and self._ended.wait(SAVE_SECONDS)):
            return
        self._report(cause)
        os._exit(1)  # the main thread waits for a process that is gone

    def _cancel(self) -> None:
        if self._task is not None and not self._task.cancelling():  # it may be ending already
            self._task.cancel()


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error may come from the death of another process."""
    while error is not None:
        if isinstance(error, RayError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _ask(actor: Any) -> Any:
    return actor.__ray_ready__.remote()


def _death(question: Any) -> str | None:
    """Why a process died, in one line; None if it answered."""
    try:
        ray.get(question)
    except ActorUnavailableError:  # out of reach for a moment
        time.sleep(ROUND_SECONDS)
    except RayActorError as error:
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    """The error without the traceback of another process, which is in the log."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    text = " ".join(str(error).split())
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {text}"[:1000]
    # Ray writes a paragraph of possible causes, of which a few words say what is known.
    known = [found[1] for pattern in _KNOWN if (found := re.search(pattern, text))]
    return ", ".join(known) if known else text[:1000]
