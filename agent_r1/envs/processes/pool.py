"""`EnvPool`: environments that live in worker processes.

A new episode goes to the process with the fewest episodes. A process hosts many and serves their calls one at a time. A
process that dies or hangs fails the one episode whose call was running. The others are replayed elsewhere if their
class sets `deterministic = True`, and otherwise fail with `EnvLost`. Processes are started when needed, replaced when
they die, and end with the pool or with this process, however it ends.

The episode that is refused memory is not necessarily the one that leaks. So the episodes of a full process are replayed
elsewhere, and the one whose calls took the most memory gets its own process: if it fills that one too, it fails.

A pool belongs to the event loop that uses it first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from agent_r1.envs.base import AgentEnv, check_settings, make_env
from agent_r1.envs.processes.hosts import Call, Host, HostedEnv, Method
from agent_r1.envs.processes.process import WorkerProcess, end_all
from agent_r1.envs.processes.protocol import (
    Answer,
    Close,
    EnvCrashed,
    EnvFault,
    EnvHung,
    EnvLost,
    EnvOutOfMemory,
    EnvStartError,
    Message,
    Play,
    Start,
    dump_env,
)
from agent_r1.envs.processes.values import load, load_error
from agent_r1.envs.processes.worker_env import WorkerEnv, front_class
from agent_r1.errors import ConfigError
from agent_r1.guard import blame, describe, explain
from agent_r1.types import Action, Observation, TaskRow, Transition

logger = logging.getLogger(__name__)

MIB = 1 << 20
START_SECONDS = 60.0  # time to start Python, or to import an env's module, on a busy machine
MAX_BAD_STARTS = 3  # failed starts in a row
MAX_REPLAYS = 3  # for an episode whose process died between calls or was full
MAX_ALIVE = 2  # live processes per `processes`, including retired ones and those with one suspect
HARD_LIMIT = 2  # hard memory limit, in multiples of memory_mb


class EnvPool:
    """At most `processes` take new episodes; one that has outgrown `memory_mb` only finishes those it has."""

    def __init__(
        self,
        *,
        processes: int,
        step_seconds: float,  # time limit of one `reset` or `step`
        memory_mb: int | None = None,
        prepare: Callable[[], object] | None = None,  # called first in every process, so it must be picklable
    ) -> None:
        if memory_mb is not None and not os.path.exists("/proc/self/statm"):
            raise ConfigError(f"memory_mb={memory_mb} needs Linux. Leave it out on this system")
        self._processes = processes
        self._step_seconds = step_seconds
        self._memory_mb = memory_mb
        self._limit = f"{HARD_LIMIT * (memory_mb or 0)} MiB, twice task.workers.memory_mb={memory_mb}"
        self._start = Start(prepare=prepare, max_bytes=None if memory_mb is None else HARD_LIMIT * memory_mb * MIB)
        self._numbers = count()
        self._known: set[tuple[object, ...]] = set()  # kinds of envs that can be created
        self._bad_starts = 0
        self._start_error: str | None = None
        self.forgotten: deque[HostedEnv] = deque()
        self._hosts: list[Host] = []
        self._ending: list[WorkerProcess] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._hosts, self._ending, self._owner)

    def env(self, cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> WorkerEnv:
        """Return an env of this class; ConfigError if it cannot be created. Starts no process yet."""
        check_settings(cls, name, kwargs)
        kind = (cls, *sorted(kwargs))
        if kind not in self._known:
            make_env(cls, name, kwargs)  # cheap: expensive work belongs in `reset`
            self._known.add(kind)
        hosted = HostedEnv(number=next(self._numbers), cls=cls, made=dump_env(cls, name, kwargs))
        return front_class(cls)(self, hosted)

    def close(self) -> None:
        """End all processes and fail pending calls. May be called twice."""
        if os.getpid() != self._owner:
            return
        if self._timer is not None:
            self._timer.cancel()
        for host in self._hosts:
            for call in host.calls:
                call.deliver(error=EnvFault("the pool of env processes was closed"))
        self._finalizer()

    async def play(self, hosted: HostedEnv, method: Method, given: TaskRow | Action) -> Any:
        """Call `reset` or `step` in the process of the env."""
        if hosted.is_closed or not self._finalizer.alive:
            raise RuntimeError(f"{hosted} was called after {'it' if hosted.is_closed else 'its pool'} was closed")
        if hosted.latest is not None and hosted.latest.is_awaited:
            raise RuntimeError(f"{hosted} was called before its last call was answered: await one call at a time")
        self._enter()
        if (host := hosted.host) is not None and host.process.is_dead:
            host.process.read()
            self._on_lost(host)  # moves the episode, or sets its fault
        if hosted.fault is not None:
            raise hosted.fault
        while self.forgotten:
            self.leave(self.forgotten.popleft())
        if isinstance(given, TaskRow):
            hosted.row_id = given.row_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = self._call(hosted, method, pickle.dumps(given, pickle.HIGHEST_PROTOCOL), future=future)
        self._send(hosted, [call])
        hosted.latest = call
        return await future

    def leave(self, hosted: HostedEnv) -> None:
        """Close the env. Returns immediately; the worker closes it after calls that were cancelled but still run."""
        host, hosted.host, hosted.is_closed = hosted.host, None, True
        if host is not None and self._finalizer.alive:
            self._enter()
            del host.hosted[hosted.number]
            host.send(Call(message=Close(episode=hosted.number), seconds=self._step_seconds, hosted=hosted))

    def _enter(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("an EnvPool cannot be used in a fork of the program: create another one there")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("an EnvPool belongs to one event loop, and another one is running")
        self._look_later()

    def _call(
        self,
        hosted: HostedEnv,
        method: Method,
        given: bytes,
        *,
        expected: str = "",
        future: asyncio.Future[Any] | None = None,
    ) -> Call:
        message = Play(episode=hosted.number, method=method, given=given, expected=expected)
        return Call(message=message, seconds=self._step_seconds, hosted=hosted, future=future)

    def _send(self, hosted: HostedEnv, calls: list[Call]) -> None:
        """Send calls to the process of an env, or to a new one for it. Raises `EnvStartError`."""
        host = hosted.host
        if host is None:
            host = self._choose_host(apart=hosted.is_apart)
            first = calls[0]
            assert isinstance(first.message, Play)
            first.message = replace(first.message, made=hosted.made)
            first.imports = hosted.cls not in host.imported
            first.seconds = self._step_seconds + (START_SECONDS if first.imports else 0)
            hosted.host = host
            host.hosted[hosted.number] = hosted
            host.imported.add(hosted.cls)
        for call in calls:
            host.send(call)

    @property
    def _is_crowded(self) -> bool:
        return len(self._hosts) + len(self._ending) >= MAX_ALIVE * self._processes

    def _choose_host(self, *, apart: bool) -> Host:
        """Return the process with the fewest episodes, or start one if all have some and there may be more. With
        `apart`, always start one."""
        shared = [host for host in self._hosts if not (apart or host.is_apart or host.process.is_dead)]
        least = min(shared, key=lambda host: host.load, default=None)
        if least is not None:
            able = sum(not host.is_retired for host in shared)
            is_free = not least.hosted and not least.is_retired
            if is_free or able >= self._processes or self._is_crowded or self._start_error is not None:
                return least
        if self._start_error is not None:
            raise EnvStartError(self._start_error)
        host = Host(max_bytes=self._start.max_bytes, is_apart=apart, is_retired=apart)
        try:
            host.process = WorkerProcess(
                on_answer=partial(_notify, weakref.WeakMethod(self._on_answer), host),
                on_lost=partial(_notify, weakref.WeakMethod(self._on_lost), host),
            )
        except OSError as error:
            if least is None:
                raise EnvStartError(f"a process for envs cannot be started: {error}") from error
            logger.warning("another env process cannot be started, so the others host more: %s", error)
            return least
        self._hosts.append(host)
        host.send(Call(message=self._start, seconds=START_SECONDS, imports=True))
        return host

    # What comes back

    def _on_answer(self, host: Host, answer: Answer) -> None:
        if host not in self._hosts:
            return
        if not host.calls:
            raise ValueError("an answer without a call")
        if not host.has_started and answer.failed:
            host.start_problem = answer.traceback
            self._lose(host)
            return
        call = host.take_answer(answer)
        if not host.has_started:
            host.has_started, self._bad_starts = True, 0
        self._check_size(host, answer.resident_bytes // MIB)
        if call.hosted is not None:
            self._deliver(host, call, call.hosted, answer)
        if host in self._hosts and host.is_retired and not host.hosted and not host.calls:
            self._hosts.remove(host)
            host.process.end()
            self._ending.append(host.process)

    def _check_size(self, host: Host, resident_mb: int) -> None:
        if self._memory_mb is not None and resident_mb > self._memory_mb and not host.is_retired:
            host.is_retired = True
            size = f"{resident_mb} MiB, more than task.workers.memory_mb={self._memory_mb}"
            logger.warning("an env process has grown to %s: no new episodes", size)

    def _deliver(self, host: Host, call: Call, hosted: HostedEnv, answer: Answer) -> None:
        value, error = self._read(hosted, call.message, answer)
        if answer.out_of_memory and self._memory_mb is not None:
            # If half of the memory was free, this call alone asked for too much.
            if host.was_half_full and not host.is_apart and self._empty(host, hosted, call):
                return
            fault = EnvOutOfMemory(
                f"{call.message} got no memory: its process hosts {len(host.hosted)} episodes and may take "
                f"{self._limit}. Raise the limit, or look for what {hosted.cls.__name__} keeps"
            )
            if error is not None:
                failure = explain(error)
                blame(fault, failure.source, failure.place)
            error = fault
        hosted.was_answered = True
        if error is not None:
            if hosted.fault is None:  # otherwise it was logged already
                logger.warning("%s of %s failed\n%s", call.message, hosted, answer.traceback or describe(error))
            hosted.has_failed = True
            if isinstance(error, EnvFault):
                hosted.fault = error = hosted.fault or error
        call.deliver(value=value, error=error)

    def _read(self, hosted: HostedEnv, message: Message, answer: Answer) -> tuple[object, Exception | None]:
        """Return the value or the error of an answer. An answer that cannot be decoded fails only its own episode."""
        try:
            if answer.failed:
                return None, load_error(answer.body)
            if not isinstance(message, Play):
                return None, None
            value, schemas = load(answer.body, Observation if message.method == "reset" else Transition)
        except ValueError as error:
            return None, TypeError(str(error))
        if hosted.can_replay and not message.expected:
            hosted.history.append((message.method, message.given, answer.digest))
        if schemas is not None:
            hosted.schemas = schemas
        return value, None

    def _empty(self, host: Host, hosted: HostedEnv, refused: Call) -> bool:
        """Move replayable episodes off a full process; False if the one that was refused memory cannot move.

        Terminates: each round gives one episode its own process for good, or uses up one replay.
        """
        host.is_retired = True
        if not hosted.can_replay or hosted.host is not host:
            return False
        leaving = [each for each in host.hosted.values() if each.can_replay]
        heaviest = max(host.hosted.values(), key=lambda each: each.grown_bytes)
        suspect = heaviest if heaviest in leaving else hosted
        took = f"{heaviest} had taken the most memory, {heaviest.grown_bytes // MIB} MiB"
        reason = f"the process of the env was full ({self._limit}), and {took}"
        logger.warning("%s; %d of %d episodes are replayed elsewhere", reason, len(leaving), len(host.hosted))
        waiting = host.release(leaving)
        waiting[hosted].insert(0, refused)
        if host.hosted:
            for each in leaving:  # without `hosted`: the episode has moved, so a failure must not reach it
                host.send(Call(message=Close(episode=each.number), seconds=self._step_seconds))
        else:
            self._hosts.remove(host)
            host.process.kill()
        num_apart = sum(each.is_apart for each in self._hosts)
        suspect.is_apart = suspect is heaviest and num_apart < self._processes and not self._is_crowded
        suspect.replays += not suspect.is_apart
        for each, calls in waiting.items():
            self._move(each, calls, reason)
        return True

    # Processes that die or hang

    def _look_later(self) -> None:
        if self._timer is None and self._loop is not None:
            seconds = min(1.0, self._step_seconds / 10)
            self._timer = self._loop.call_later(seconds, _notify, weakref.WeakMethod(self._look))

    def _look(self) -> None:
        """Find processes that hang, and those that died although something keeps their channel open. The time of a call
        starts when all earlier calls have been answered."""
        self._timer = None
        for host in [host for host in self._hosts if host.calls]:
            is_dead = host.process.is_dead  # checked before reading, so that everything a dead process sent has arrived
            if host in self._hosts and (is_dead or host.is_overdue):
                host.process.read()  # perhaps this loop itself was slow
                if host in self._hosts and (is_dead or host.is_overdue):
                    self._lose(host, hung=not is_dead)
        self._ending[:] = [process for process in self._ending if not process.has_ended()]
        if self._ending or any(host.calls for host in self._hosts):
            self._look_later()

    def _on_lost(self, host: Host) -> None:
        if host in self._hosts:
            self._lose(host)

    def _lose(self, host: Host, *, hung: bool = False) -> None:
        """Kill a process and move its episodes, except the one whose call runs: the oldest without an answer."""
        self._hosts.remove(host)
        how = host.process.kill(ask_where=hung)
        running = host.calls[0] if host.calls else None
        culprit = None if running is None else running.hosted
        what = "no call" if running is None else f"{running.message} of {culprit}" if culprit else str(running.message)
        logger.warning("an env process %s during %s; printed last:\n%s", how, what, host.process.tail)
        if not host.has_started:
            self._bad_starts += 1
            if self._bad_starts >= MAX_BAD_STARTS:
                problem = host.start_problem or f"it {how}\n{host.process.tail}"
                self._start_error = f"{self._bad_starts} env processes in a row did not start; the last one: {problem}"
        if running is not None and culprit is not None:
            culprit.host = None
            culprit.fault = EnvCrashed(f"the process of the env {how} during {running.message}")
            if hung:
                also = f", and {START_SECONDS:g} for imports" if running.imports else ""
                limit = f"{running.seconds:g} s (task.workers.step_seconds{also})"
                culprit.fault = EnvHung(f"{running.message} took longer than {limit}, and its process was killed")
        reason = f"the process of the env {'was killed, because it hung' if hung else how} during {what}"
        # All of them before one is moved, which may find the next process dead.
        waiting = host.release([hosted for hosted in host.hosted.values() if hosted is not culprit])
        for call in host.calls:
            if call.hosted is not None:  # the culprit, or an env that was closed during a call
                call.deliver(error=call.hosted.fault or EnvLost(reason))
        for hosted, calls in waiting.items():
            hosted.replays += culprit is None and hosted.was_answered
            self._move(hosted, calls, reason)

    def _move(self, hosted: HostedEnv, waiting: list[Call], reason: str) -> None:
        """Replay an episode in another process, then send the calls that had not begun. Cancelled ones too: the flow
        believes that they were played."""
        waiting = [call for call in waiting if isinstance(call.message, Play) and not call.message.expected]
        try:
            self._check_movable(hosted, reason)
            replayed = [self._call(hosted, method, given, expected=mark) for method, given, mark in hosted.history]
            if calls := replayed + waiting:
                self._send(hosted, calls)
        except EnvFault as fault:
            hosted.fault = fault
            for call in waiting:
                call.deliver(error=fault)

    def _check_movable(self, hosted: HostedEnv, reason: str) -> None:
        name = hosted.cls.__name__
        if hosted.fault is not None:
            raise hosted.fault
        if hosted.was_answered and not hosted.can_replay:
            why = "an earlier call failed" if hosted.cls.deterministic else "set deterministic = True if it can be"
            raise EnvLost(f"{reason}; {name} was not replayed: {why}")
        if hosted.replays > MAX_REPLAYS:
            raise EnvLost(f"{reason}; {name} was replayed {MAX_REPLAYS} times already")


def _notify(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    """Call a method of a pool, if it still exists. A pool that nothing refers to ends its processes."""
    if (bound := method()) is not None:
        bound(*args)


def _end(hosts: list[Host], ending: list[WorkerProcess], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the program does not own the processes
        end_all([*(host.process for host in hosts), *ending])
        hosts.clear()
        ending.clear()
