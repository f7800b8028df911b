"""The books of a pool: which episode lives in which process, and what each process was asked. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.channel import Answer, EnvFault, EnvOutOfMemory, EnvReply, Given, Message, Play
from agent_r1.envs.processes.process import WorkerProcess
from agent_r1.envs.processes.values import load, load_error
from agent_r1.guard import blame, explain
from agent_r1.types import TaskRow


@dataclass(slots=True, eq=False, kw_only=True)
class Hosted:
    """One episode's env, as this side knows it."""

    number: int
    cls: type[AgentEnv]
    made: bytes  # its class and settings, as `dump_env` wrote them
    host: Host | None = None  # None: before its first call, and after its last
    row_id: str = ""
    latest: Call | None = None
    has_past: bool = False  # a call of it was answered
    history: list[tuple[Given, str]] = field(default_factory=list)  # past calls, kept only if the env can be replayed
    has_failed: bool = False  # and is in a state that its history does not tell
    replays: int = 0  # because its process died of nobody, or was filled by it, as it seems
    grown_bytes: int = 0  # what its calls have taken of the memory of its process, and not given back
    is_apart: bool = False  # shares no process any more: it is suspected of filling them
    schemas: list[dict[str, Any]] = field(default_factory=list)
    fault: EnvFault | None = None  # why it cannot be played any more
    closed: bool = False

    def __str__(self) -> str:
        return f"{self.cls.__name__} of row {self.row_id!r}"

    @property
    def can_replay(self) -> bool:
        return self.cls.deterministic and not self.has_failed


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Something a process was asked to do."""

    message: Message
    seconds: float  # it may take so long
    hosted: Hosted | None = None  # None: the start of a process, or of an episode that has left it
    future: asyncio.Future[Any] | None = None  # None: nobody waits for it
    imports: bool = False  # the first of a class in a process

    def __str__(self) -> str:
        verb = type(self.message).__name__.lower()
        if isinstance(self.message, Play):
            verb = "reset" if isinstance(self.message.given, TaskRow) else "step"
            if self.message.expected:
                verb += " (played again)"
        return verb

    @property
    def is_awaited(self) -> bool:
        return self.future is not None and not self.future.done() and not self.future.get_loop().is_closed()

    def deliver(self, *, value: object = None, error: Exception | None = None) -> None:
        """To whoever still waits."""
        if not self.is_awaited:
            return
        assert self.future is not None
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


@dataclass(slots=True, eq=False, kw_only=True)
class Host:
    """A process, whom it hosts and what it was asked, oldest first. The oldest is the one that runs."""

    process: WorkerProcess
    hosted: dict[int, Hosted] = field(default_factory=dict)
    calls: deque[Call] = field(default_factory=deque)
    began: float = 0.0  # when the oldest call did
    answers: int = 0  # the first one says that it has started
    imported: set[type[AgentEnv]] = field(default_factory=set)  # or will have been, when a call begins that is sent now
    is_retired: bool = False  # takes no new episodes while another process can
    is_apart: bool = False  # is there for one episode
    is_attached: bool = False  # to the event loop of its pool
    data_bytes: int = 0  # of memory that it has asked the system for, as of its last answer
    base_bytes: int = 0  # what of these came with its start and with classes: nobody's
    start_problem: str = ""

    def take_in(self, hosted: Hosted) -> None:
        hosted.host = self
        self.hosted[hosted.number] = hosted
        self.imported.add(hosted.cls)

    def count(self, call: Call, answer: Answer) -> None:
        """What a call took is its episode's, except for what comes with a class: its module, and what that loads."""
        grown, self.data_bytes = answer.data_bytes - self.data_bytes, answer.data_bytes
        if call.imports or not self.has_started:
            self.base_bytes += grown
        elif call.hosted is not None:
            call.hosted.grown_bytes += grown
        self.began = time.monotonic()
        self.answers += 1

    def is_half_full(self, max_bytes: int | None) -> bool:
        """Episodes have taken more than half of what they can."""
        return max_bytes is not None and 2 * (self.data_bytes - self.base_bytes) > max_bytes - self.base_bytes

    def let_go(self, leaving: Iterable[Hosted]) -> dict[Hosted, list[Call]]:
        """Their calls that have no answer yet. If the process goes on it will answer them, and nobody will listen."""
        waiting: dict[Hosted, list[Call]] = {hosted: [] for hosted in leaving}
        for index, call in enumerate(self.calls):
            if call.hosted in waiting:
                waiting[call.hosted].append(call)
                self.calls[index] = Call(message=call.message, seconds=call.seconds)
        for hosted in waiting:
            del self.hosted[hosted.number]
            hosted.host, hosted.grown_bytes = None, 0
        return waiting

    @property
    def has_started(self) -> bool:
        return self.answers > 0

    @property
    def load(self) -> tuple[bool, int, int]:
        """Where the least is, the next episode goes."""
        return self.is_retired, len(self.hosted), len(self.calls)

    @property
    def is_overdue(self) -> bool:
        return bool(self.calls) and time.monotonic() - self.began > self.calls[0].seconds


def read_reply(answer: Answer) -> tuple[EnvReply | None, Exception | None]:
    """Decode an answer. One that cannot be decoded becomes an error, which fails only its own episode."""
    try:
        if answer.failed:
            return None, load_error(answer.body)
        body = load(answer.body)
        if body is None:
            return None, None
        value, schemas = body
        if not isinstance(schemas, list | None):
            raise ValueError(f"tool schemas must be a list, got {type(schemas).__name__}")
        return EnvReply(value=value, tool_schemas=schemas), None
    except (ValueError, TypeError) as error:
        return None, TypeError(f"cannot decode what the env {'raised' if answer.failed else 'returned'}: {error}")


def out_of_memory(host: Host, call: Call, error: Exception | None, *, limit: str, taken_mb: int) -> EnvOutOfMemory:
    """What a MemoryError of an env does not say."""
    assert call.hosted is not None
    num = len(host.hosted)
    shared = "which one episode had to itself" if num < 2 else f"which {num} episodes shared"
    fault = EnvOutOfMemory(
        f"{call} got no memory in a process {shared}: it may take {limit}, and had taken {taken_mb} MiB before. Raise "
        f"that, or look for what {call.hosted.cls.__name__} keeps"
    )
    if error is not None:
        failure = explain(error)
        blame(fault, failure.source, failure.place)
    return fault
