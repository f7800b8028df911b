"""`EnvPool`: environments that live in worker processes, spoken to from an event loop.

An episode is hosted by the process with the fewest; a process hosts many and calls them one at a time. A process that
dies or hangs takes down the one episode whose call was running. The others it hosted are played again elsewhere where
their class says `deterministic = True`, and fail as `EnvLost` where it does not. Processes are started when they are
needed, replaced when they are missed, and end with the pool or with this process, however it ends.

Nothing belongs to an event loop but calls under way, so a pool serves one loop after another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, TypeVar

from agent_r1.agent.env import AgentEnv, make_env
from agent_r1.agent.guard import describe
from agent_r1.agent.workers.hosting import Call, Host, Hosted, read_answer
from agent_r1.agent.workers.process import WorkerProcess, end_all
from agent_r1.agent.workers.wire import (
    Answer,
    Close,
    EnvCrashed,
    EnvFault,
    EnvHung,
    EnvLost,
    EnvStartError,
    Given,
    Play,
    Replay,
    Start,
    dump_env,
)
from agent_r1.errors import ConfigError
from agent_r1.types import Action, Observation, TaskRow, Transition

logger = logging.getLogger(__name__)

MIB = 1 << 20
START_SECONDS = 60.0  # to start Python and import what is ours, on a busy machine
MAX_BAD_STARTS = 3  # in a row, before no more are tried
MAX_REPLAYS = 3  # of one episode: a process may also die of what nobody asked it to do
HARD_LIMIT = 2  # times memory_mb: beyond it the system refuses memory

Value = TypeVar("Value", Observation, Transition)


class WorkerEnv(AgentEnv):
    """An env in another process. `EnvPool.env` makes them, in classes that are called like the env's own."""

    def __init__(self, pool: EnvPool, hosted: Hosted) -> None:
        self._pool = pool
        self._hosted = hosted

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """As of the last answer: before `reset` there are none."""
        return self._hosted.schemas

    async def reset(self, row: TaskRow) -> Observation:
        return await self._pool.play(self._hosted, row, Observation)

    async def step(self, action: Action) -> Transition:
        return await self._pool.play(self._hosted, action, Transition)

    async def close(self) -> None:
        """Waits for nothing: what the env still does about it is of no interest to the episode."""
        self._pool.leave(self._hosted)


class EnvPool:
    """At most `processes` take new episodes; one that has outgrown `memory_mb` only finishes those it has."""

    def __init__(
        self,
        *,
        processes: int,
        step_seconds: float,  # one `reset` or `step` may take so long
        memory_mb: int | None = None,
        prepare: Callable[[], object] | None = None,  # called first in every process, so it must be picklable
    ) -> None:
        if memory_mb is not None and not os.path.exists("/proc/self/statm"):
            raise ConfigError("memory_mb needs Linux: elsewhere the memory of a process is not known. Leave it out")
        self._processes = processes
        self._step_seconds = step_seconds
        self._memory_bytes = None if memory_mb is None else memory_mb * MIB
        limit = None if memory_mb is None else HARD_LIMIT * memory_mb * MIB
        self._start = Start(prepare=prepare, max_bytes=limit)
        self._numbers = count()
        self._known: set[tuple[object, ...]] = set()  # kinds of envs that can be made
        self._bad_starts = 0
        self._start_error: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hosts: list[Host] = []
        self._ending: list[WorkerProcess] = []
        # Also at the end of the program. Must not hold `self`.
        self._finalizer = weakref.finalize(self, _shut, self._hosts, self._ending, os.getpid())

    def env(self, cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> WorkerEnv:
        """An env of this class and these settings; ConfigError if it cannot be made. Costs no process yet."""
        kind = (cls, *sorted(kwargs))
        if kind not in self._known:
            make_env(cls, name, kwargs)  # which only checks settings: what costs begins in `reset`
            self._known.add(kind)
        made = dump_env(cls, name, kwargs)
        hosted = Hosted(number=next(self._numbers), env_name=cls.__name__, made=made, can_replay=cls.deterministic)
        return _front(cls)(self, hosted)

    def close(self) -> None:
        """End all processes; who waits for one is told. May be called twice."""
        for host in self._hosts:
            self._detach(host)
            for call in host.calls:
                call.deliver(error=EnvFault("the pool of env processes was closed"))
        if self._timer is not None:
            self._timer.cancel()
        self._finalizer()

    # What episodes ask for

    async def play(self, hosted: Hosted, given: Given, _: type[Value]) -> Value:
        """One `reset` or `step`."""
        if hosted.closed or not self._finalizer.alive:
            raise RuntimeError(f"{hosted} was called after {'it' if hosted.closed else 'its pool'} had been closed")
        if hosted.fault is not None:
            raise hosted.fault
        if isinstance(given, TaskRow):
            hosted.row_id = given.row_id
        loop = asyncio.get_running_loop()
        self._enter(loop)
        future: asyncio.Future[Value] = loop.create_future()
        self._ask(hosted, given, future)
        return await future

    def leave(self, hosted: Hosted) -> None:
        """The episode is over. If a call of it was cancelled and still runs, nobody waits for that either."""
        host, hosted.host, hosted.closed = hosted.host, None, True
        if host is None or not self._finalizer.alive:
            return
        self._enter(asyncio.get_running_loop())
        del host.hosted[hosted.number]
        if not self._sent(host, Call(message=Close(episode=hosted.number), seconds=self._step_seconds, hosted=hosted)):
            self._gone(host)

    def _ask(self, hosted: Hosted, given: Given, future: asyncio.Future[Any] | None) -> None:
        """EnvFault: it cannot be played any more."""
        while True:
            host = hosted.host or self._place()
            message = Play(episode=hosted.number, given=given, made=b"" if hosted.host is host else hosted.made)
            if self._sent(host, Call(message=message, seconds=self._step_seconds, hosted=hosted, future=future)):
                host.take_in(hosted)
                return
            self._gone(host)
            if hosted.fault is not None:
                raise hosted.fault

    def _sent(self, host: Host, call: Call) -> bool:
        """False if nobody is there. Raises what pickle does where a message cannot be sent."""
        try:
            host.process.send(call.message)
        except OSError:
            return False
        if not host.calls:
            host.began = time.monotonic()
        host.calls.append(call)
        self._attach(host)
        self._watch()
        return True

    # Processes: where episodes go, and what comes back

    def _place(self) -> Host:
        """The process with the fewest episodes, or another one if all have some and there may be more."""
        able = [host for host in self._hosts if not host.is_retired]
        least = min(able, key=lambda host: (len(host.hosted), len(host.calls)), default=None)
        if least is not None and (not least.hosted or len(able) == self._processes or self._start_error):
            return least
        if self._start_error is not None:
            raise EnvStartError(self._start_error)
        try:
            host = Host(process=WorkerProcess())
        except OSError as error:
            raise EnvStartError(f"a process for envs cannot be started: {error}") from error
        self._hosts.append(host)
        self._sent(host, Call(message=self._start, seconds=START_SECONDS))  # if not, the next message finds out
        return host

    def _readable(self, host: Host) -> None:
        for answer in host.process.receive():
            if not host.calls or (answer.failed and not host.has_started):
                host.start_problem = answer.traceback
                host.process.is_open = False
                break
            self._answered(host, answer)
        if host.process.is_open:
            self._tidy(host)
        else:
            self._died(host)

    def _answered(self, host: Host, answer: Answer) -> None:
        call = host.calls.popleft()
        host.began = time.monotonic()
        hosted = call.hosted
        if hosted is None:
            host.has_started, self._bad_starts = True, 0
            return
        if self._memory_bytes is not None and answer.resident_bytes > self._memory_bytes and not host.is_retired:
            logger.warning("an env process has grown to %d MiB: no new episodes", answer.resident_bytes // MIB)
            host.is_retired = True
        shown, error = read_answer(answer)
        if error is not None:
            hosted.can_replay = False  # it is in a state that its history does not tell
            logger.warning("%s of %s failed\n%s", call, hosted, answer.traceback or describe(error))
        if shown is not None:
            assert isinstance(call.message, Play)
            hosted.answered += 1
            if hosted.can_replay:
                hosted.history.append((call.message.given, answer.digest))
            if shown.tool_schemas is not None:
                hosted.schemas = shown.tool_schemas
        call.deliver(value=shown.value if shown is not None else None, error=error)

    def _tidy(self, host: Host) -> None:
        if host.hosted or host.calls:
            return
        self._detach(host)
        if host.is_retired:
            self._hosts.remove(host)
            host.process.end()
            self._ending.append(host.process)
            self._watch()

    # Faults

    def _gone(self, host: Host) -> None:
        """Nothing can be sent to it. What it answered before its end still counts."""
        self._readable(host)
        if host in self._hosts:
            self._died(host)

    def _died(self, host: Host, *, hung: bool = False) -> None:
        """Its answers have all been read, so the oldest call left is the one it died of."""
        self._hosts.remove(host)
        self._detach(host)
        how = host.process.kill(ask_where=hung)
        running = host.calls[0] if host.calls else None
        culprit = running.hosted if running is not None else None
        what = f"{running} of {culprit}" if culprit is not None else "no call" if host.has_started else "its start"
        logger.warning("an env process %s during %s; printed last:\n%s", how, what, host.process.tail)
        if not host.has_started:
            self._started_badly(host.start_problem or f"it {how}\n{host.process.tail}")
        if running is not None and culprit is not None:
            culprit.host, culprit.fault = None, EnvCrashed(f"the process of the env {how} during {running}")
            if hung:
                limit = f"{running.seconds:g} s (task.workers.step_seconds)"
                culprit.fault = EnvHung(f"{running} took longer than {limit}, and its process was killed")
        reason = f"the process of the env {'was killed, because it hung' if hung else how} during {what}"
        waiting = {call.hosted: call for call in host.calls if isinstance(call.message, Play)}
        for call in host.calls:
            if culprit is not None and call.hosted is culprit:
                call.deliver(error=culprit.fault)
        for hosted in host.hosted.values():
            if hosted is not culprit:
                self._move(hosted, waiting.get(hosted), reason)

    def _started_badly(self, problem: str) -> None:
        self._bad_starts += 1
        if self._bad_starts >= MAX_BAD_STARTS:
            self._start_error = f"{self._bad_starts} processes for envs in a row did not start; the last one: {problem}"

    def _move(self, hosted: Hosted, waiting: Call | None, reason: str) -> None:
        """To another process, with the call that had not begun."""
        hosted.host = None
        try:
            if hosted.answered > 0:
                self._replay(hosted, reason)
            if waiting is not None:
                assert isinstance(waiting.message, Play)
                self._ask(hosted, waiting.message.given, waiting.future)
        except EnvFault as fault:
            hosted.fault = fault
            if waiting is not None:
                waiting.deliver(error=fault)

    def _replay(self, hosted: Hosted, reason: str) -> None:
        if not hosted.can_replay:
            raise EnvLost(f"{reason}; {hosted.env_name} cannot be played again, as it is not deterministic")
        hosted.replays += 1
        if hosted.replays > MAX_REPLAYS:
            raise EnvLost(f"{reason}; {hosted.env_name} was played again {MAX_REPLAYS} times already")
        message = Replay(episode=hosted.number, made=hosted.made, history=tuple(hosted.history))
        call = Call(message=message, seconds=self._step_seconds * len(hosted.history), hosted=hosted)
        while not self._sent(host := self._place(), call):
            self._gone(host)
        host.take_in(hosted)

    # The event loop

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls under way move along when another loop takes over: what cancelled episodes asked for goes on."""
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("an EnvPool serves one event loop at a time, and another one is running")
        attached = [host for host in self._hosts if host.is_attached]
        for host in attached:
            self._detach(host)
        self._loop, self._timer = loop, None
        for host in attached:
            self._attach(host)
        self._watch()

    def _attach(self, host: Host) -> None:
        assert self._loop is not None
        if not host.is_attached:
            host.is_attached = True
            self._loop.add_reader(host.process.channel, self._readable, host)
            self._loop.add_reader(host.process.output, self._printed, host)
        if host.process.has_more_to_send:
            self._loop.add_writer(host.process.channel, self._writable, host)

    def _detach(self, host: Host) -> None:
        if host.is_attached and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(host.process.channel)
            self._loop.remove_reader(host.process.output)
            self._loop.remove_writer(host.process.channel)
        host.is_attached = False

    def _writable(self, host: Host) -> None:
        assert self._loop is not None
        try:
            host.process.flush()
        except OSError:
            self._gone(host)
        else:
            if not host.process.has_more_to_send:
                self._loop.remove_writer(host.process.channel)

    def _printed(self, host: Host) -> None:
        assert self._loop is not None
        if not host.process.listen():
            self._loop.remove_reader(host.process.output)

    def _watch(self) -> None:
        if self._timer is None and (self._ending or any(host.calls for host in self._hosts)):
            assert self._loop is not None
            self._timer = self._loop.call_later(min(1.0, self._step_seconds / 10), self._look)

    def _look(self) -> None:
        """Kill what hangs. A call counts from when those before it were answered, not from when it was asked for."""
        self._timer = None
        for host in list(self._hosts):
            if host.is_overdue and host in self._hosts:
                self._readable(host)  # the answer may be there: perhaps it was this loop that took its time
                if host.is_overdue and host in self._hosts:
                    self._died(host, hung=True)
        self._ending[:] = [process for process in self._ending if not process.has_ended()]
        self._watch()


@cache
def _front(cls: type[AgentEnv]) -> type[WorkerEnv]:
    """With the name and the flags of the env's own class, for people who read logs and flows that ask."""
    flags = {"sees_ground_truth": cls.sees_ground_truth, "deterministic": cls.deterministic}
    return type(cls.__name__, (WorkerEnv,), flags)


def _shut(hosts: list[Host], ending: list[WorkerProcess], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the program does not own them
        return
    for host in hosts:
        host.process.end()
    end_all([*(host.process for host in hosts), *ending])
    hosts.clear()
    ending.clear()
