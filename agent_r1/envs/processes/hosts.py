"""The bookkeeping of a pool: which episode lives in which process, and the open calls of each process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.process import WorkerProcess
from agent_r1.envs.processes.protocol import Answer, EnvFault, Message

Method = Literal["reset", "step"]


@dataclass(slots=True, eq=False, kw_only=True)
class HostedEnv:
    """The env of one episode, as the pool knows it."""

    number: int
    cls: type[AgentEnv]
    made: bytes  # class and settings, as `dump_env` wrote them
    host: Host | None = None  # None: before its first call, and after its last
    row_id: str = ""
    latest: Call | None = None
    was_answered: bool = False
    history: list[tuple[Method, bytes, str]] = field(default_factory=list)  # past calls and digests, for a replay
    has_failed: bool = False  # a call failed, so the state is unknown and cannot be replayed
    replays: int = 0  # not counting those after another episode took down the process
    grown_bytes: int = 0  # memory that its calls have taken and not given back
    is_apart: bool = False  # suspected of filling processes, so it gets its own
    schemas: list[dict[str, Any]] = field(default_factory=list)
    fault: EnvFault | None = None  # why it cannot be played any more
    is_closed: bool = False

    def __str__(self) -> str:
        return f"{self.cls.__name__} of row {self.row_id!r}"

    @property
    def can_replay(self) -> bool:
        return self.cls.deterministic and not self.has_failed


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    message: Message
    seconds: float  # time limit
    hosted: HostedEnv | None = None  # None: the start of a process, or a call that moved to another process
    future: asyncio.Future[Any] | None = None  # None: nobody awaits the answer
    imports: bool = False  # starts the process, or imports the class in it

    @property
    def is_awaited(self) -> bool:
        return self.future is not None and not self.future.done()

    def deliver(self, *, value: object = None, error: Exception | None = None) -> None:
        if self.future is None or self.future.done() or self.future.get_loop().is_closed():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


@dataclass(slots=True, eq=False, kw_only=True)
class Host:
    """A process, the envs it hosts, and its calls without an answer, oldest first. The oldest is the one that runs."""

    process: WorkerProcess = field(init=False)
    max_bytes: int | None  # memory limit
    hosted: dict[int, HostedEnv] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)
    began: float = 0.0  # when the oldest call began
    has_started: bool = False
    start_problem: str = ""
    is_retired: bool = False  # takes no new episodes while another process can
    is_apart: bool = False  # hosts one suspect
    imported: set[type[AgentEnv]] = field(default_factory=set)
    data_bytes: int = 0  # memory of the process at its last answer
    base_bytes: int = 0  # the part of it taken at the start and by imports
    was_half_full: bool = False  # episodes had taken more than half of their memory before the last answer

    def send(self, call: Call) -> None:
        if not self.calls:
            self.began = time.monotonic()
        self.calls.append(call)
        self.process.send(call.message)

    def take_answer(self, answer: Answer) -> Call:
        """Return the answered call; charge its memory growth to its env, or to the base if it imported."""
        call = self.calls.popleft()
        self.began = time.monotonic()
        left = (self.max_bytes or 0) - self.base_bytes
        self.was_half_full = self.max_bytes is not None and 2 * (self.data_bytes - self.base_bytes) > left
        grown, self.data_bytes = answer.data_bytes - self.data_bytes, answer.data_bytes
        if call.imports:
            self.base_bytes += grown
        elif call.hosted is not None:
            call.hosted.grown_bytes += grown
        return call

    def release(self, leaving: Iterable[HostedEnv]) -> dict[HostedEnv, list[Call]]:
        """Remove envs. Returns copies of their calls without an answer; answers to the originals are ignored."""
        waiting: dict[HostedEnv, list[Call]] = {hosted: [] for hosted in leaving}
        for call in self.calls:
            if call.hosted in waiting:
                waiting[call.hosted].append(replace(call))
                call.hosted = call.future = None
        for hosted in waiting:
            del self.hosted[hosted.number]
            hosted.host, hosted.grown_bytes = None, 0
        return waiting

    @property
    def load(self) -> tuple[bool, int, int]:
        """The next episode goes to the process with the lowest load."""
        return self.is_retired, len(self.hosted), len(self.calls)

    @property
    def is_overdue(self) -> bool:
        return bool(self.calls) and time.monotonic() - self.began > self.calls[0].seconds
