"""Run user code (tools, environments, rewards) so that it can fail or hang alone, and explain its failures.

User code runs in a task with a deadline. What it raises comes back as an ordinary exception, even if it would have
ended the program; code that ignores its deadline is cancelled and then abandoned.

Not covered: code that blocks the event loop itself. Python cannot stop a thread either: a sync function that hangs
keeps its (daemon) thread, so untrusted code belongs in a process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sysconfig
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from agent_r1.text import sanitize
from agent_r1.types import Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 2.0  # time for cancelled code to clean up before it is abandoned
MAX_ERROR_CHARS = 2000
_BLAME = "_agent_r1_blame"  # attribute of an exception
_PACKAGE = Path(__file__).parent
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class TimedOut(Exception):
    """The deadline passed. Not a TimeoutError, which user code may raise itself."""


class Signal(BaseException):
    """Ends user code on purpose. Not an Exception, so that `except Exception` and `guarded` let it through."""


class Escaped(Exception):
    """User code raised an exception that would have ended the run, such as SystemExit."""


class Abort(KeyboardInterrupt):
    """Raised by our signal handler; never counts as a failure of the code that it interrupts."""


def is_signal(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt came from Ctrl-C and not from user code. Under Python's own handler the two cannot be
    told apart, so every KeyboardInterrupt counts as Ctrl-C."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_asyncio = bool(frames) and frames[-1] is asyncio.Runner._on_sigint.__code__  # type: ignore[attr-defined]
    return isinstance(error, Abort) or by_asyncio or signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Loop(asyncio.SelectorEventLoop):
    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do not wait for threads: a tool may hang in one. Closing the loop abandons them."""


def runner() -> asyncio.Runner:
    """Return a runner for user code, which exits even if a call of `asyncio.to_thread` hangs."""
    return asyncio.Runner(loop_factory=_Loop)


def run_through(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Run the loop until the task is done, even if user code stops the loop or raises SystemExit unguarded."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            if task.done() or loop.is_closed() or is_signal(error):
                raise
            logger.error("user code tried to end the event loop; it continues\n%s", trace(error))


async def guarded(work: Coroutine[Any, Any, T], *, seconds: float) -> T:
    """Return the result of `work`, or raise its exception as an `Exception` or `Signal`, or `TimedOut`."""
    cancelled_by_us = False

    async def contained() -> tuple[T | None, Exception | Signal | None]:
        try:
            return await work, None
        except (Exception, Signal) as error:  # noqa: BLE001 (raised again below, outside the task)
            return None, error
        except BaseException as error:
            if cancelled_by_us or is_signal(error):
                raise
            return None, _sole_signal(error) or Escaped(describe(error))

    task = asyncio.create_task(contained())
    try:
        await asyncio.wait({task}, timeout=seconds)
        in_time = task.done()
    finally:  # also when we are cancelled ourselves
        if not task.done():
            cancelled_by_us = True
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if not in_time:
        raise TimedOut(f"not finished after {seconds:g} s")
    value, error = task.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # without an error there is a value


def _sole_signal(error: BaseException) -> Signal | None:
    """Return the signal that a TaskGroup has wrapped, if it is all that was raised."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Signal) else None


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a sync one in a daemon thread, so that it cannot hold up the loop or the exit."""
    if is_async(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()

    def deliver(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():  # else it was cancelled
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (context.run(function, *args, **kwargs), None)
        except BaseException as error:  # noqa: BLE001 (raised below, in the event loop)
            outcome = (None, error)
        with suppress(RuntimeError):  # the event loop has closed meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    Thread(target=work, daemon=True).start()
    value, error = await done
    if error is not None:
        # Python delivers signals to the main thread, so the function itself raised this KeyboardInterrupt.
        raise error if isinstance(error, Exception | Signal) else Escaped(describe(error))
    return await value if inspect.isawaitable(value) else value


def is_async(function: Any) -> bool:
    """Whether a function or callable object is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def describe(error: BaseException) -> str:
    """Return `Type: message`, bounded and valid UTF-8, even if printing the exception fails."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 (str() of a user's exception may raise anything)
        text = "(its message cannot be printed)"
    return sanitize(f"{type(error).__name__}: {text[:MAX_ERROR_CHARS]}")


def trace(error: BaseException) -> str:
    """Return traceback and message for the log, bounded like `describe`."""
    return "".join(traceback.format_tb(error.__traceback__)) + describe(error)


def explain(error: BaseException, source: str = "") -> Failure:
    """Describe an exception, for example as `tool 'reverse' raised KeyError: 'ab' (task.py:11)`."""
    blamed, place = vars(error).get(_BLAME, ("", ""))
    return Failure(
        kind=type(error).__name__,
        message=describe(error),
        source=sanitize(source or blamed),
        place=_user_place(error) or sanitize(place),
    )


def blame(error: BaseException, source: str, place: str = "") -> None:
    """Record the source of an exception for `explain`, and its place if it has no traceback in this process."""
    vars(error)[_BLAME] = (source, place)  # not setattr: works for frozen classes too


def _user_place(error: BaseException) -> str:
    """`task.py:11`: the innermost frame of user code, or "". Frames of libraries and of this package are skipped."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        ours = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "recipes")
        if not ours and not is_library(path):
            return f"{path.name}:{line}"
    return ""


def is_library(file: str | Path) -> bool:
    """Whether a file belongs to the standard library or to an installed package other than ours."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return False
    installed = path.is_relative_to(_STANDARD_LIBRARY) or {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or not path.is_absolute()  # not absolute: "<string>", "<frozen ...>"
