"""`EnvPool`: environments that live in worker processes, spoken to from an event loop.

An episode is hosted by the process with the fewest; a process hosts many and calls them one at a time. A process that
dies or hangs takes down the one episode whose call was running. The others it hosted are played again elsewhere where
their class says `deterministic = True`, and fail as `EnvLost` where it does not. Processes are started when they are
needed, replaced when they are missed, and end with the pool or with this process, however it ends.

A process that is full says nothing about who filled it: whoever asks next is refused. So its episodes are played again
elsewhere, the one whose calls have taken most in a process of its own: what fills that as well is the culprit.

Nothing belongs to an event loop but calls under way, so a pool serves one loop after another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from agent_r1.envs.base import AgentEnv, check_settings, make_env
from agent_r1.envs.processes.channel import (
    Answer,
    Close,
    EnvCrashed,
    EnvFault,
    EnvHung,
    EnvLost,
    EnvOutOfMemory,
    EnvStartError,
    Given,
    Play,
    Start,
    dump_env,
    write_message,
)
from agent_r1.envs.processes.front import WorkerEnv, front_class
from agent_r1.envs.processes.hosting import Call, Host, Hosted, out_of_memory, read_reply
from agent_r1.envs.processes.process import WorkerProcess, end_all
from agent_r1.envs.processes.watchdog import Watch
from agent_r1.errors import ConfigError
from agent_r1.guard import describe
from agent_r1.types import Observation, TaskRow, Transition

logger = logging.getLogger(__name__)

MIB = 1 << 20
START_SECONDS = 60.0  # to start Python and import what is ours, or what is the env's, on a busy machine
MAX_BAD_STARTS = 3  # in a row, before no more are tried
MAX_REPLAYS = 3  # of one episode whose process dies of nobody, or fills up: who knows what it does there
MAX_ALIVE = 2  # times `processes`, with those that have outgrown `memory_mb` and those for one episode
HARD_LIMIT = 2  # times memory_mb: beyond it the system refuses memory

Value = TypeVar("Value", Observation, Transition)


class EnvPool:
    """At most `processes` take new episodes; one that has outgrown `memory_mb` only finishes those it has, as long as
    there are not too many of these."""

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
        self._memory_mb = memory_mb
        self._limit = f"{HARD_LIMIT * (memory_mb or 0)} MiB, twice task.workers.memory_mb={memory_mb}"
        self._start = Start(prepare=prepare, max_bytes=None if memory_mb is None else HARD_LIMIT * memory_mb * MIB)
        self._numbers = count()
        self._known: set[tuple[object, ...]] = set()  # kinds of envs that can be made
        self._advised: set[type[AgentEnv]] = set()
        self._bad_starts = 0
        self._start_error: str | None = None
        self.forgotten: deque[Hosted] = deque()
        self._hosts: list[Host] = []
        self._ending: list[WorkerProcess] = []
        self._watch = Watch(self, self._hosts, seconds=min(1.0, step_seconds / 10))
        self._owner = os.getpid()
        # Also at the end of the program. Must not hold `self`.
        self._finalizer = weakref.finalize(self, _shut, self._hosts, self._ending, self._owner)

    def env(self, cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> WorkerEnv:
        """An env of this class and these settings; ConfigError if it cannot be made. Costs no process yet."""
        check_settings(cls, name, kwargs)
        kind = (cls, *sorted(kwargs))
        if kind not in self._known:
            make_env(cls, name, kwargs)  # which costs little: what costs begins in `reset`
            self._known.add(kind)
        hosted = Hosted(number=next(self._numbers), cls=cls, made=dump_env(cls, name, kwargs))
        return front_class(cls)(self, hosted)

    def close(self) -> None:
        """End all processes; who waits for one is told. May be called twice."""
        if os.getpid() != self._owner:
            return
        self._watch.close()
        for host in self._hosts:
            for call in host.calls:
                call.deliver(error=EnvFault("the pool of env processes was closed"))
        self._finalizer()

    # What episodes ask for

    async def play(self, hosted: Hosted, given: Given, kind: type[Value]) -> Value:
        """One `reset` or `step`."""
        if hosted.closed or not self._finalizer.alive:
            raise RuntimeError(f"{hosted} was called after {'it' if hosted.closed else 'its pool'} had been closed")
        if hosted.fault is not None:
            raise hosted.fault
        if hosted.latest is not None and hosted.latest.is_awaited:
            raise RuntimeError(
                f"{hosted} was called while its {hosted.latest} was not answered yet: await one call before the next"
            )
        self._enter()
        while self.forgotten:
            self.leave(self.forgotten.popleft())
        if isinstance(given, TaskRow):
            hosted.row_id = given.row_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = self._call(hosted, given, future=future)
        self._ask(hosted, [call])
        hosted.latest = call
        value = await future
        if not isinstance(value, kind):  # user code runs in the process, so it can send anything
            raise TypeError(f"what {hosted} returned is {type(value).__name__} here, where {kind.__name__} belongs")
        return value

    def leave(self, hosted: Hosted) -> None:
        """The episode is over. If a call of it was cancelled and still runs, nobody waits for that either."""
        host, hosted.host, hosted.closed = hosted.host, None, True
        if host is None or not self._finalizer.alive:
            return
        self._enter()
        del host.hosted[hosted.number]
        if not self._sent(host, Call(message=Close(episode=hosted.number), seconds=self._step_seconds, hosted=hosted)):
            self.on_broken(host)

    def _enter(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                "an EnvPool cannot be used in a fork of the program that made it: make another one there"
            )
        self._watch.enter(asyncio.get_running_loop())

    def _call(
        self, hosted: Hosted, given: Given, *, expected: str = "", future: asyncio.Future[Any] | None = None
    ) -> Call:
        message = Play(episode=hosted.number, given=given, expected=expected)
        return Call(message=message, seconds=self._step_seconds, hosted=hosted, future=future)

    def _ask(self, hosted: Hosted, calls: list[Call]) -> None:
        """All of them of one process. EnvFault: it cannot be played any more."""
        while True:
            host = hosted.host or self._place(apart=hosted.is_apart)
            if hosted.host is None:
                calls[0] = self._making(host, calls[0])
            if self._sent(host, *calls):
                host.take_in(hosted)
                return
            self.on_broken(host)
            if hosted.fault is not None:
                raise hosted.fault

    def _making(self, host: Host, call: Call) -> Call:
        """The first call of an episode to a process, which may have to import the class first."""
        hosted, message = call.hosted, call.message
        assert hosted is not None
        assert isinstance(message, Play)
        imports = hosted.cls not in host.imported
        seconds = self._step_seconds + (START_SECONDS if imports else 0)
        return replace(call, message=replace(message, made=hosted.made), seconds=seconds, imports=imports)

    def _sent(self, host: Host, *calls: Call) -> bool:
        """False if nobody is there. Raises what pickle does where one of them cannot be sent; then none was."""
        frames = b"".join(write_message(call.message) for call in calls)
        try:
            host.process.send(frames)
        except OSError:
            return False
        if not host.calls:
            host.began = time.monotonic()
        host.calls.extend(calls)
        self._watch.attach(host)
        self._watch.look_soon()
        return True

    # Processes: where episodes go, and what comes back

    @property
    def _is_crowded(self) -> bool:
        return len(self._hosts) + len(self._ending) >= MAX_ALIVE * self._processes

    def _place(self, *, apart: bool) -> Host:
        """The process with the fewest episodes, or another one if all have some and there may be more. `apart`: another
        one in any case."""
        shared = [] if apart else [host for host in self._hosts if not host.is_apart]
        least = min(shared, key=lambda host: host.load, default=None)
        if least is not None:
            able = sum(not host.is_retired for host in shared)
            is_free = not least.hosted and not least.is_retired
            if is_free or able >= self._processes or self._is_crowded or self._start_error is not None:
                return least
        if self._start_error is not None:
            raise EnvStartError(self._start_error)
        try:
            host = Host(process=WorkerProcess(), is_apart=apart, is_retired=apart)
        except OSError as error:
            if least is None:
                raise EnvStartError(f"a process for envs cannot be started: {error}") from error
            logger.warning("another process for envs cannot be started, so the others host more: %s", error)
            return least
        self._hosts.append(host)
        self._sent(host, Call(message=self._start, seconds=START_SECONDS))  # if not, the next message finds out
        return host

    def on_readable(self, host: Host) -> None:
        for answer in host.process.receive():
            if answer.number != host.answers or not host.calls:
                host.process.distrust(
                    f"number {answer.number} where {host.answers} of {host.answers + len(host.calls)} have come"
                )
                break
            if answer.failed and not host.has_started:
                host.start_problem = answer.traceback
                host.process.is_open = False
                break
            self._answered(host, answer)
            if host not in self._hosts:  # it was full
                return
        if host.process.is_open:
            self._tidy(host)
        else:
            self._died(host)

    def _answered(self, host: Host, answer: Answer) -> None:
        call, taken_before = host.calls.popleft(), host.data_bytes
        # If half of the memory was free, the failing call itself asked for too much.
        was_full = host.is_half_full(self._start.max_bytes) and not host.is_apart
        host.count(call, answer)
        hosted = call.hosted
        if hosted is None:
            self._bad_starts = 0
            return
        self._weigh(host, hosted, answer.resident_bytes // MIB)
        reply, error = read_reply(answer)
        if answer.out_of_memory and self._memory_mb is not None:
            if was_full and self._overflowed(host, call):
                return
            error = out_of_memory(host, call, error, limit=self._limit, taken_mb=taken_before // MIB)
        hosted.has_past = True
        if error is not None:
            if hosted.fault is None:  # else it was said
                logger.warning("%s of %s failed\n%s", call, hosted, answer.traceback or describe(error))
            hosted.has_failed = True
            if isinstance(error, EnvLost | EnvOutOfMemory):
                hosted.fault = error = hosted.fault or error
        if reply is not None:
            assert isinstance(call.message, Play)
            if hosted.can_replay:
                hosted.history.append((call.message.given, answer.digest))
            if reply.tool_schemas is not None:
                hosted.schemas = reply.tool_schemas
        call.deliver(value=reply.value if reply is not None else None, error=error)

    def _weigh(self, host: Host, hosted: Hosted, resident_mb: int) -> None:
        if self._memory_mb is None or resident_mb <= self._memory_mb or host.is_retired:
            return
        host.is_retired = True
        logger.warning("an env process has grown to %d MiB: no new episodes", resident_mb)
        if host.answers == 2:  # its start and one reset
            logger.warning(
                "%s takes that much for its first reset, so no process will do for long: raise "
                "task.workers.memory_mb=%d",
                hosted.cls.__name__,
                self._memory_mb,
            )

    def _tidy(self, host: Host) -> None:
        if host.hosted or host.calls:
            return
        self._watch.detach(host)
        if host.is_retired:
            self._hosts.remove(host)
            host.process.end()
            self._ending.append(host.process)
            self._watch.look_soon()

    # Faults

    def on_look(self) -> None:
        """Find what has died unheard, and kill what hangs. A call counts from when those before it were answered, not
        from when it was asked for."""
        for host in [host for host in self._hosts if host.calls]:
            # Asked before it is read: what a dead process has answered is all there. Of one that seems to hang the
            # answer may be there, too: perhaps it was this loop that took its time.
            is_dead = host.process.is_dead
            if host in self._hosts and (is_dead or host.is_overdue):
                self.on_readable(host)
                if host in self._hosts and (is_dead or host.is_overdue):
                    self._died(host, hung=not is_dead)
        self._ending[:] = [process for process in self._ending if not process.has_ended()]
        if self._ending or any(host.calls for host in self._hosts):
            self._watch.look_soon()

    def on_broken(self, host: Host) -> None:
        """Nothing can be sent to it. What it answered before its end still counts."""
        self.on_readable(host)
        if host in self._hosts:
            self._died(host)

    def _died(self, host: Host, *, hung: bool = False) -> None:
        """Its answers have all been read, so the oldest call left is the one it died of."""
        self._hosts.remove(host)
        self._watch.detach(host)
        how = host.process.kill(ask_where=hung)
        running = host.calls[0] if host.calls else None
        culprit = running.hosted if running is not None else None
        what = f"{running} of {culprit}" if culprit is not None else "no call" if host.has_started else "its start"
        logger.warning("an env process %s during %s; printed last:\n%s", how, what, host.process.tail)
        if not host.has_started:
            self._started_badly(host.start_problem or f"it {how}\n{host.process.tail}")
        if running is not None and culprit is not None:
            culprit.fault = EnvCrashed(f"the process of the env {how} during {running}")
            if hung:
                also = f", and {START_SECONDS:g} for imports" if running.imports else ""
                limit = f"{running.seconds:g} s (task.workers.step_seconds{also})"
                culprit.fault = EnvHung(f"{running} took longer than {limit}, and its process was killed")
        reason = f"the process of the env {'was killed, because it hung' if hung else how} during {what}"
        # All of them, before one is moved, which may find the next process dead.
        waiting = host.let_go([hosted for hosted in host.hosted.values() if hosted is not culprit])
        if culprit is not None:
            culprit.host = None
        _abandon(host, reason)
        for hosted, calls in waiting.items():
            hosted.replays += culprit is None and hosted.has_past
            self._move(hosted, calls, reason)

    def _overflowed(self, host: Host, call: Call) -> bool:
        """It had no memory left for a call; False if that has to be borne. Else all who can be played again leave, and
        if nobody stays, the process is ended.

        Each time somebody is set apart, for good, or has been played again once more: it comes to an end.
        """
        assert call.hosted is not None
        host.is_retired = True
        if not call.hosted.can_replay or call.hosted.host is not host:
            if not call.hosted.closed:  # else nothing is lost
                self._advise(call.hosted.cls)
            return False
        leaving = [hosted for hosted in host.hosted.values() if hosted.can_replay]
        heaviest = max(host.hosted.values(), key=lambda hosted: hosted.grown_bytes)
        suspect = heaviest if heaviest in leaving else call.hosted
        reason = (
            f"the process of the env was full ({self._limit}), and of those that it hosted {heaviest} had taken most: "
            f"{heaviest.grown_bytes // MIB} MiB"
        )
        logger.warning("%s; %d of %d episodes are played again elsewhere", reason, len(leaving), len(host.hosted))
        waiting = host.let_go(leaving)
        waiting[call.hosted].insert(0, call)
        if host.hosted:
            closes = [Close(episode=hosted.number) for hosted in leaving]
            self._sent(host, *(Call(message=close, seconds=self._step_seconds) for close in closes))
        else:
            self._hosts.remove(host)
            self._watch.detach(host)
            host.process.kill()
            _abandon(host, reason)
        num_apart = sum(host.is_apart for host in self._hosts)
        suspect.is_apart = suspect is heaviest and num_apart < self._processes and not self._is_crowded
        suspect.replays += not suspect.is_apart
        for hosted, calls in waiting.items():
            self._move(hosted, calls, reason)
        return True

    def _advise(self, cls: type[AgentEnv]) -> None:
        """Of what would have saved an episode of it. Once."""
        if not cls.deterministic and cls not in self._advised:
            self._advised.add(cls)
            logger.warning(
                "an episode of %s was lost through no fault of its own. If the same row and actions show the same in "
                "any process, say `deterministic = True` in the class: then such episodes are played again elsewhere",
                cls.__name__,
            )

    def _started_badly(self, problem: str) -> None:
        self._bad_starts += 1
        if self._bad_starts >= MAX_BAD_STARTS:
            self._start_error = f"{self._bad_starts} processes for envs in a row did not start; the last one: {problem}"

    def _move(self, hosted: Hosted, waiting: list[Call], reason: str) -> None:
        """To another process, with the calls that had not begun: also those that nobody waits for any more, or the env
        would not be where its flow believes it is."""
        try:
            calls = self._past(hosted, reason)
            for call in waiting:
                if isinstance(call.message, Play) and not call.message.expected:
                    calls.append(self._call(hosted, call.message.given, future=call.future))
            if calls:
                self._ask(hosted, calls)
        except Exception as error:  # noqa: BLE001 (its neighbours have to be moved, too)
            lost = EnvLost(f"{reason}; {hosted.cls.__name__} cannot be sent to another: {describe(error)}")
            hosted.fault = error if isinstance(error, EnvFault) else lost
            for call in waiting:
                call.deliver(error=hosted.fault)

    def _past(self, hosted: Hosted, reason: str) -> list[Call]:
        """What has to be asked for to have the env where it was. EnvFault: there is no such thing."""
        name = hosted.cls.__name__
        if hosted.fault is not None:
            raise hosted.fault
        if hosted.has_past and not hosted.can_replay:
            self._advise(hosted.cls)
            unsaid = "its class does not say deterministic = True"
            why = "a call of it has failed" if hosted.cls.deterministic else unsaid
            raise EnvLost(f"{reason}; {name} cannot be played again, as {why}")
        if hosted.replays > MAX_REPLAYS:
            raise EnvLost(f"{reason}; {name} was played again {MAX_REPLAYS} times already")
        return [self._call(hosted, given, expected=expected) for given, expected in hosted.history]


def _abandon(host: Host, reason: str) -> None:
    """It has ended: whoever still waits for it is told."""
    for call in host.calls:
        if call.hosted is not None:  # the culprit, or one that was closed while a call was under way
            call.deliver(error=call.hosted.fault or EnvLost(reason))


def _shut(hosts: list[Host], ending: list[WorkerProcess], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the program does not own them
        return
    for host in hosts:
        host.process.end()
    end_all([*(host.process for host in hosts), *ending])
    hosts.clear()
    ending.clear()
