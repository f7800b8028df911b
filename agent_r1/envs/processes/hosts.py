"""Which episode lives in which process: the env of an episode, its calls, and the process that hosts it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.process import WorkerProcess
from agent_r1.envs.processes.protocol import Answer, EnvFault, Message
from agent_r1.types import Action, Observation, TaskRow, Transition

if TYPE_CHECKING:
    from agent_r1.envs.processes.pool import EnvPool

Method = Literal["reset", "step"]


class WorkerEnv(AgentEnv):
    """The env of one episode, in a worker process: the flow calls it, and the pool does the work."""

    def __init__(self, pool: EnvPool, number: int, cls: type[AgentEnv], made: bytes) -> None:
        self._pool = pool
        self.number, self.cls = number, cls
        self.made = made  # class and settings, as `dump_env` wrote them
        self.host: Host | None = None  # None: before its first call, and after its last
        self.row_id = ""
        self.latest: Call | None = None
        self.was_answered = False
        self.can_replay = cls.deterministic  # until a call fails, because its state is unknown from then on
        self.history: list[tuple[Method, bytes, str]] = []  # past calls and digests of their answers, for a replay
        self.replays = 0  # not counting those after another episode took down the process
        self.grown_bytes = 0  # memory that its calls have taken and not given back
        self.schemas: list[dict[str, Any]] = []
        self.fault: EnvFault | None = None  # why it cannot be played any more
        self.is_closed = False

    def __str__(self) -> str:
        return f"{self.cls.__name__} of row {self.row_id!r}"

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas in the last answer; empty before `reset`."""
        return self.schemas

    async def reset(self, row: TaskRow) -> Observation:
        self.row_id = row.row_id
        observation: Observation = await self._pool.play(self, "reset", row)
        return observation

    async def step(self, action: Action) -> Transition:
        transition: Transition = await self._pool.play(self, "step", action)
        return transition

    async def close(self) -> None:
        """Returns immediately; the worker closes the environment."""
        self._pool.leave(self)


@cache
def front_class(cls: type[AgentEnv]) -> type[WorkerEnv]:
    """Return a class with the name and flags of the env's own, for logs and flows."""
    flags = {"sees_ground_truth": cls.sees_ground_truth, "deterministic": cls.deterministic}
    return type(cls.__name__, (WorkerEnv,), flags)


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    message: Message
    seconds: float  # time limit
    env: WorkerEnv
    future: asyncio.Future[Any] | None = None  # None: nobody awaits the answer
    expected: str = ""  # in a replay: digest of the answer that another process gave
    imports: bool = False  # imports the class in its process

    def __str__(self) -> str:
        return f"{self.message.method} (replayed)" if self.expected else self.message.method

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
    envs: dict[int, WorkerEnv] = field(default_factory=dict)  # by their numbers
    calls: deque[Call] = field(default_factory=deque)
    began: float = 0.0  # when the oldest call began
    has_started: bool = False
    is_retired: bool = False  # takes no new episodes while another process can
    imported: set[type[AgentEnv]] = field(default_factory=set)
    data_bytes: int = 0  # memory of the process at its last answer
    base_bytes: int = 0  # the part of it taken at the start and by imports

    def send(self, call: Call) -> None:
        if not self.calls:
            self.began = time.monotonic()
        self.calls.append(call)
        self.process.send(call.message)

    def start(self, answer: Answer) -> None:
        self.has_started, self.began = True, time.monotonic()
        self.data_bytes = self.base_bytes = answer.data_bytes

    def take_answer(self, answer: Answer) -> Call:
        """Return the answered call; charge its memory growth to its env, or to the base if it imported."""
        call = self.calls.popleft()
        self.began = time.monotonic()
        grown, self.data_bytes = answer.data_bytes - self.data_bytes, answer.data_bytes
        if call.imports:
            self.base_bytes += grown
        else:
            call.env.grown_bytes += grown
        return call

    @property
    def taken_bytes(self) -> int:
        """Memory taken by episodes, including those that have ended."""
        return self.data_bytes - self.base_bytes

    @property
    def load(self) -> tuple[bool, int, int]:
        """The next episode goes to the process with the lowest load."""
        return self.is_retired, len(self.envs), len(self.calls)

    @property
    def is_overdue(self) -> bool:
        return bool(self.calls) and time.monotonic() - self.began > self.calls[0].seconds
