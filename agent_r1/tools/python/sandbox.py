"""`Sandbox`: run untrusted Python from any event loop, a bounded number of pieces at a time.

Calls wait their turn in the order they came. Each running call has a thread that watches its process (`zygote.py`);
waiting calls and idle sessions have none. Nothing belongs to an event loop, so one sandbox serves a whole program.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from agent_r1.errors import ConfigError
from agent_r1.tools.python.backends import Backend, Process
from agent_r1.tools.python.levels import Level, choose_level, make_backend
from agent_r1.tools.python.limits import Limits, Outcome, SandboxError
from agent_r1.tools.python.zygote import Wish

LIBRARIES = ("numpy", "sympy")
CORES_PER_ZYGOTE = 4  # a zygote forks one process after the other; this many cores do not keep it busy
LOOK_SECONDS = 1.0  # how often idle sessions are looked at
LOST_STATE = "the interpreter was started anew: what earlier calls defined is gone"


@dataclass(slots=True)
class _Session:
    """The process of an episode. Calls of one session run one after the other."""

    process: Process | None = None
    lost: bool = False  # the next call finds an empty interpreter, and is told
    released: bool = False
    began: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sandbox:
    """Runs code at a level of isolation (`levels.py`); a level that cannot be had is a ConfigError here and now."""

    def __init__(
        self,
        *,
        level: str = "auto",
        limits: Limits | None = None,
        libraries: Sequence[str] = LIBRARIES,
        slots: int | None = None,  # pieces of code that run at the same time; None: one per core
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        slots = cores if slots is None else slots
        if not isinstance(slots, int) or slots < 1:
            raise ConfigError(f"slots of a sandbox must be a whole number from 1 on, got {slots!r}")
        if not _are_names(libraries):
            raise ConfigError(f"libraries of a sandbox must be a list of names such as [numpy], got {libraries!r}")
        self.limits = limits or Limits()
        self.level: Level = choose_level(level, libraries)
        self._backend = make_backend(
            self.level.name, self.limits, libraries, zygotes=max(1, min(slots, cores) // CORES_PER_ZYGOTE)
        )
        self._workers = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")
        self._sessions: dict[str, _Session] = {}
        self._closed = threading.Event()
        # Also at the end of the program. Must not hold `self`.
        self._finalizer = weakref.finalize(self, _shut, self._backend, self._workers, self._sessions, self._closed)
        self._keeper: threading.Thread | None = None

    async def run(self, code: str, *, session: str | None = None) -> Outcome:
        """Run `code` in a process of its own, or in the one of `session`, which keeps its variables until `release`.

        SandboxError if the sandbox itself fails. Cancelling the call kills the process.
        """
        if len(code) > self.limits.code_chars:
            return Outcome(stdout="", error=f"the code is longer than {self.limits.code_chars} characters")
        if self._closed.is_set():
            raise SandboxError("the Python sandbox is closed")
        wish = Wish()
        future: Future[Outcome]
        if session is None:
            future = self._workers.submit(_run_once, self._backend, code, wish)
        else:
            self._keep_sessions()
            held = self._sessions.setdefault(session, _Session())
            future = self._workers.submit(_run_in, self._backend, held, code, wish)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed.is_set() and future.cancelled():
                raise SandboxError("the Python sandbox was closed before the call's turn came") from None
            wish.give_up()
            raise

    async def release(self, session: str) -> None:
        """End a session; one that was never used is no mistake."""
        held = self._sessions.pop(session, None)
        if held is not None:
            held.released = True
            await asyncio.to_thread(_end, held)

    async def close(self) -> None:
        """End everything. May be called twice."""
        await asyncio.to_thread(self._finalizer)

    def _keep_sessions(self) -> None:
        if self._keeper is None:
            arguments = (self._sessions, self.limits, self._closed)
            self._keeper = threading.Thread(target=_end_overdue, args=arguments, daemon=True, name="sandbox-sessions")
            self._keeper.start()


def _are_names(value: object) -> bool:
    """A single name is none: its letters would be taken for names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(name, str) for name in value)


# What workers do. They hold no `Sandbox`: one that is let go of while they work would have to wait for itself.


def _run_once(backend: Backend, code: str, wish: Wish) -> Outcome:
    with wish:
        process = backend.open(session=False)
        try:
            return process.call(code, wish)
        finally:
            process.close()


def _run_in(backend: Backend, held: _Session, code: str, wish: Wish) -> Outcome:
    with held.lock, wish:
        if held.released:
            raise SandboxError("the session was released while a call waited for it")
        lost, held.lost = held.lost, False
        if held.process is None:
            held.process = backend.open(session=True)
            held.began = time.monotonic()
        try:
            outcome = held.process.call(code, wish)
        except BaseException:
            _drop(held)
            raise
        if not held.process.usable:
            _drop(held)
        held.used = time.monotonic()
    if not lost:
        return outcome
    return Outcome(
        stdout=f"[{LOST_STATE}]\n{outcome.stdout}",
        error=outcome.error,
        seconds=outcome.seconds,
        killed_by=outcome.killed_by,
    )


def _drop(held: _Session) -> None:
    process, held.process, held.lost = held.process, None, True
    if process is not None:
        process.close()


def _end(held: _Session) -> None:
    process = held.process
    if process is not None:
        process.kill()  # which ends a call that still runs
    with held.lock:
        _drop(held)


def _end_overdue(sessions: dict[str, _Session], limits: Limits, closed: threading.Event) -> None:
    """The keeper of sessions: ends those that are idle, or have lived, for too long."""
    while not closed.wait(LOOK_SECONDS):
        for held in list(sessions.values()):
            now = time.monotonic()
            overdue = now - held.used > limits.idle_seconds or now - held.began > limits.session_seconds
            if overdue and held.process is not None and held.lock.acquire(blocking=False):
                try:
                    _drop(held)
                finally:
                    held.lock.release()


def _shut(
    backend: Backend, workers: ThreadPoolExecutor, sessions: dict[str, _Session], closed: threading.Event
) -> None:
    closed.set()
    workers.shutdown(wait=False, cancel_futures=True)
    for held in list(sessions.values()):
        held.released = True
        _end(held)
    sessions.clear()
    backend.close()
    workers.shutdown(wait=True)
