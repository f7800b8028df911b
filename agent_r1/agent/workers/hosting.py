"""The books of a pool: which episode lives in which process, and what each process was asked. Decides nothing."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from agent_r1.agent.workers.process import WorkerProcess
from agent_r1.agent.workers.wire import Answer, EnvFault, Given, Message, Play, Shown
from agent_r1.types import TaskRow


@dataclass(slots=True, eq=False, kw_only=True)
class Hosted:
    """One episode's env, as this side knows it."""

    number: int
    env_name: str
    made: bytes  # its class and settings, as `dump_env` wrote them
    can_replay: bool
    host: Host | None = None  # None: before its first call, and after its last
    row_id: str = ""
    answered: int = 0  # calls that did not fail
    history: list[tuple[Given, bytes]] = field(default_factory=list)  # of these, where it can be played again
    replays: int = 0
    schemas: list[dict[str, Any]] = field(default_factory=list)
    fault: EnvFault | None = None  # why it cannot be played any more
    closed: bool = False

    def __str__(self) -> str:
        return f"{self.env_name} of row {self.row_id!r}"


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Something a process was asked to do."""

    message: Message
    seconds: float  # it may take so long
    hosted: Hosted | None = None  # None: the start of a process
    future: asyncio.Future[Any] | None = None  # None: nobody waits for it

    def __str__(self) -> str:
        verb = type(self.message).__name__.lower()
        if isinstance(self.message, Play):
            verb = "reset" if isinstance(self.message.given, TaskRow) else "step"
        return verb

    def deliver(self, *, value: object = None, error: Exception | None = None) -> None:
        """To whoever still waits."""
        future = self.future
        if future is None or future.done() or future.get_loop().is_closed():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


@dataclass(slots=True, eq=False, kw_only=True)
class Host:
    """A process, whom it hosts and what it was asked, oldest first. The oldest is the one that runs."""

    process: WorkerProcess
    hosted: dict[int, Hosted] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)
    began: float = 0.0  # when the oldest call did
    has_started: bool = False
    is_retired: bool = False  # takes no new episodes
    is_attached: bool = False  # to the event loop of its pool
    start_problem: str = ""

    def take_in(self, hosted: Hosted) -> None:
        hosted.host = self
        self.hosted[hosted.number] = hosted

    @property
    def is_overdue(self) -> bool:
        return bool(self.calls) and time.monotonic() - self.began > self.calls[0].seconds


def read_answer(answer: Answer) -> tuple[Shown | None, Exception | None]:
    try:
        body = pickle.loads(answer.body)
    except Exception as error:  # noqa: BLE001 (of classes that cannot be had here, anything)
        return None, TypeError(f"what the env returned cannot be read in this process: {error!r}")
    return (None, body) if answer.failed else (body, None)
