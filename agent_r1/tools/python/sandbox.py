"""`Sandbox`: run untrusted Python from any event loop, a bounded number of calls at a time.

Calls wait their turn in order of arrival. A thread watches each running call (`process.py`); waiting calls and idle
sessions have none. Nothing belongs to an event loop, so one sandbox serves a whole program.

The tests attack every guarantee of a level. Whether this machine supports a level is found out by running code, because
a kernel or a container may forbid namespaces. A level that is missing is an error, never replaced by another one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tools.python.launcher import Launcher
from agent_r1.tools.python.process import Limits, Outcome, SandboxError, SandboxProcess

LIBRARIES = ("numpy", "sympy")
CORES_PER_ZYGOTE = 4  # a zygote forks one process at a time, fast enough for this many cores
LOST_STATE = "the interpreter was restarted: what earlier calls defined is gone"


# What code at a level cannot do, whatever it tries:
#   time: run longer than its wall time
#   memory: take more than memory_mb in a process, and processes * memory_mb + scratch_mb in all
#   output: return more than output_chars
#   ends: leave a process behind
#   processes: have more processes and threads than its limit
#   network: reach a network, a socket of the host, or another run
#   files: read anything but Python and the chosen libraries: no environment, no other process
#   writes: write anywhere but to a private /tmp, which is deleted with the run
GUARANTEES = ("time", "memory", "output", "ends", "processes", "network", "files", "writes")
LEVELS = {"namespaces": GUARANTEES, "process": GUARANTEES[:3]}  # process: runs as the same user, hides nothing


def check_level(level: str) -> None:
    """Raise ConfigError if this machine does not support `level`."""
    if level not in LEVELS:
        raise ConfigError(f"unknown sandbox level {level!r}.{did_you_mean(str(level), LEVELS)}")
    missing = what_is_missing(level)
    if missing is not None:
        raise ConfigError(
            f"the sandbox level {level!r} does not work here: {missing}. Allow user namespaces "
            "(user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or set level=process, which "
            "does not isolate this machine: use it only in a container that holds nothing of value"
        )


@cache
def what_is_missing(level: str) -> str | None:
    """Run a program at this level. Returns None if it works, else the reason."""
    try:
        launcher = Launcher(Limits(seconds=20), (), isolated=level != "process")
        with closing(launcher), closing(launcher.fork()) as process:
            outcome = process.call("print(6 * 7)")
    except (SandboxError, ConfigError, OSError) as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a first program failed: {outcome.error or outcome.stdout!r}"


@dataclass(slots=True)
class _Session:
    """The process of an episode, or of a single call. Its calls run one after another."""

    process: SandboxProcess | None = None
    lost: bool = False  # the next call starts with an empty interpreter, and says so
    released: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sandbox:
    """Runs code at a level of isolation. Raises ConfigError if this machine does not support it."""

    def __init__(
        self,
        *,
        level: str = "namespaces",
        limits: Limits | None = None,
        libraries: Sequence[str] = LIBRARIES,
        slots: int | None = None,  # calls that run at the same time; None: one per core
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        slots = cores if slots is None else slots
        if not isinstance(slots, int) or slots < 1:
            raise ConfigError(f"slots of a sandbox must be an integer of at least 1, got {slots!r}")
        if isinstance(libraries, str) or not isinstance(libraries, Sequence):
            raise ConfigError(f"libraries of a sandbox must be a list of names such as [numpy], got {libraries!r}")
        check_level(level)
        self.level = level
        self.limits = limits or Limits()
        self._launchers = [
            Launcher(self.limits, tuple(libraries), isolated=level != "process")
            for _ in range(max(1, min(slots, cores) // CORES_PER_ZYGOTE))
        ]
        self._turns = cycle(self._launchers)
        self._workers = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")
        self._sessions: dict[str, _Session] = {}
        self._closed = threading.Event()
        # Also called at the end of the program. Must not hold `self`.
        self._finalizer = weakref.finalize(
            self, _shut_down, self._launchers, self._workers, self._sessions, self._closed
        )

    async def run(self, code: str, *, session: str | None = None) -> Outcome:
        """Run `code` in a new process, or in the process of `session`, which keeps its variables until `release`.

        Raises SandboxError if the sandbox itself fails. Cancelling the call kills the process.
        """
        if len(code) > self.limits.code_chars:
            return Outcome(stdout="", error=f"the code is longer than {self.limits.code_chars} characters")
        if self._closed.is_set():
            raise SandboxError("the Python sandbox is closed")
        held = _Session() if session is None else self._sessions.setdefault(session, _Session())
        future = self._workers.submit(_run, next(self._turns), held, code, session is not None)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled():  # it had not begun, so the session keeps its state
                if self._closed.is_set():
                    raise SandboxError("the Python sandbox was closed before the call ran") from None
                raise
            if session is not None and self._sessions.get(session) is held:  # otherwise it was released meanwhile
                self._sessions[session] = _Session(lost=True)
            asyncio.get_running_loop().run_in_executor(None, _end_session, held)
            raise

    async def release(self, session: str) -> None:
        """End a session, even one that was never used."""
        held = self._sessions.pop(session, None)
        if held is not None:
            await asyncio.to_thread(_end_session, held)

    async def close(self) -> None:
        """End everything. May be called twice."""
        await asyncio.to_thread(self._finalizer)


# The loop of the worker threads. They hold no reference to the `Sandbox`, which would keep it alive while they work.


def _run(launcher: Launcher, session: _Session, code: str, keep: bool) -> Outcome:
    with session.lock:
        lost, session.lost = session.lost, False
        try:
            if session.process is None and not session.released:
                session.process = launcher.fork()
            if session.released or session.process is None:  # perhaps while it forked
                raise SandboxError("the session was released while a call waited for it")
            outcome = session.process.call(code)
            keep = keep and session.process.usable
        except BaseException:
            _drop_process(session)
            raise
        if not keep:
            _drop_process(session)
    return replace(outcome, stdout=f"[{LOST_STATE}]\n{outcome.stdout}") if lost else outcome


def _drop_process(session: _Session) -> None:
    process, session.process, session.lost = session.process, None, True
    if process is not None:
        process.close()


def _end_session(session: _Session) -> None:
    session.released = True
    process = session.process
    if process is not None:
        process.kill()  # ends a running call
    with session.lock:
        _drop_process(session)


def _shut_down(
    launchers: list[Launcher], workers: ThreadPoolExecutor, sessions: dict[str, _Session], closed: threading.Event
) -> None:
    closed.set()
    workers.shutdown(wait=False, cancel_futures=True)
    for session in list(sessions.values()):
        _end_session(session)
    sessions.clear()
    for launcher in launchers:
        launcher.close()
    workers.shutdown(wait=True)
