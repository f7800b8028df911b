"""`EnvPool`: environments that live in worker processes.

A new episode goes to the process with the fewest episodes. A process hosts many and serves their calls one at a time. A
process that dies or hangs fails the one episode whose call was running. The others are replayed elsewhere if their
class sets `deterministic = True`, and otherwise fail with `EnvLost`. Processes are started when needed, replaced when
they die, and end with the pool or with this process, however it ends.

The episode that is refused memory is not necessarily the one that leaks. So a process that was full is replaced like
one that died, and the episode whose calls took the most memory fails.

A pool belongs to the event loop that uses it first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from agent_r1.envs.base import AgentEnv, check_settings, make_env
from agent_r1.envs.processes.hosts import Call, Host, Method, WorkerEnv, front_class
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
    Play,
    dump_env,
    load,
    load_error,
)
from agent_r1.errors import ConfigError
from agent_r1.guard import blame, describe, explain
from agent_r1.types import Action, Observation, TaskRow, Transition

logger = logging.getLogger(__name__)

MIB = 1 << 20
START_SECONDS = 60.0  # time to start Python, or to import an env's module, on a busy machine
MAX_BAD_STARTS = 3  # failed starts in a row
MAX_REPLAYS = 3  # for an episode whose process was lost through the fault of no living episode
MAX_ALIVE = 2  # live processes per `processes`, including retired ones
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
        self._max_bytes = None if memory_mb is None else HARD_LIMIT * memory_mb * MIB
        self._prepare = prepare or bool
        self._numbers = count()
        self._known: set[tuple[object, ...]] = set()  # kinds of envs that can be created
        self._bad_starts = 0
        self._start_error: str | None = None
        self._hosts: list[Host] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._owner = os.getpid()
        self._is_closed = False

    def env(self, cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> WorkerEnv:
        """Return an env of this class; ConfigError if it cannot be created. Starts no process yet."""
        check_settings(cls, name, kwargs)
        kind = (cls, *sorted(kwargs))
        if kind not in self._known:
            make_env(cls, name, kwargs)  # cheap: expensive work belongs in `reset`
            self._known.add(kind)
        return front_class(cls)(self, next(self._numbers), cls, dump_env(cls, name, kwargs))

    def close(self) -> None:
        """End all processes and fail pending calls. May be called twice."""
        if os.getpid() != self._owner:  # a fork of the program does not own the processes
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for host in self._hosts:
            for call in host.calls:
                call.deliver(error=EnvFault("the pool of env processes was closed"))
        end_all([host.process for host in self._hosts])
        self._hosts.clear()

    async def play(self, env: WorkerEnv, method: Method, given: TaskRow | Action) -> Any:
        """Call `reset` or `step` in the process of the env."""
        if env.is_closed or self._is_closed:
            raise RuntimeError(f"{env} was called after {'it' if env.is_closed else 'its pool'} was closed")
        if env.latest is not None and env.latest.is_awaited:
            raise RuntimeError(f"{env} was called before its last call was answered: await one call at a time")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError("an EnvPool belongs to one event loop, and another one is running")
        self._look_later()
        if (host := env.host) is not None and host.process.is_dead:
            host.process.read()
            self._on_lost(host)  # moves the episode, or sets its fault
        if env.fault is not None:
            raise env.fault
        future: asyncio.Future[Any] = loop.create_future()
        call = self._call(env, method, pickle.dumps(given, pickle.HIGHEST_PROTOCOL), future=future)
        self._send(env, [call])
        env.latest = call
        return await future

    def leave(self, env: WorkerEnv) -> None:
        """Close the env. Returns immediately; the worker closes it after calls that were cancelled but still run."""
        host, env.host, env.is_closed = env.host, None, True
        if host is not None and not self._is_closed:
            self._look_later()
            del host.envs[env.number]
            host.send(Call(message=Close(episode=env.number), seconds=self._step_seconds, env=env))

    def _call(self, env: WorkerEnv, method: Method, given: bytes, **how: Any) -> Call:
        message = Play(episode=env.number, method=method, given=given)
        return Call(message=message, seconds=self._step_seconds, env=env, **how)

    def _send(self, env: WorkerEnv, calls: list[Call]) -> None:
        """Send calls to the process of an env, or to a new one for it. Raises `EnvStartError`."""
        host = env.host
        if host is None:
            host = self._choose_host()
            first = calls[0]
            assert isinstance(first.message, Play)
            first.message = replace(first.message, made=env.made)
            first.imports = env.cls not in host.imported
            first.seconds = self._step_seconds + (START_SECONDS if first.imports else 0)
            env.host = host
            host.envs[env.number] = env
            host.imported.add(env.cls)
        for call in calls:
            host.send(call)

    def _choose_host(self) -> Host:
        """Return the process with the fewest episodes, or start one if all have some and there may be more."""
        hosts = [host for host in self._hosts if not (host.process.is_dead or host.process.is_ending)]
        least = min(hosts, key=lambda host: host.load, default=None)
        if least is not None:
            able = sum(not host.is_retired for host in hosts)
            is_free = not least.envs and not least.is_retired
            is_crowded = able >= self._processes or len(self._hosts) >= MAX_ALIVE * self._processes
            if is_free or is_crowded or self._start_error is not None:
                return least
        if self._start_error is not None:
            raise EnvStartError(self._start_error)
        host = Host()
        try:
            host.process = WorkerProcess(
                max_bytes=self._max_bytes,
                prepare=self._prepare,
                on_answer=partial(self._on_answer, host),
                on_lost=partial(self._on_lost, host),
            )
        except OSError as error:
            if least is None:
                raise EnvStartError(f"a process for envs cannot be started: {error}") from error
            logger.warning("another env process cannot be started, so the others host more: %s", error)
            return least
        self._hosts.append(host)
        return host

    # What comes back

    def _on_answer(self, host: Host, answer: Answer) -> None:
        if host not in self._hosts:
            return
        if not host.has_started:
            self._bad_starts = 0
            host.start(answer)
            return
        if not host.calls:
            raise ValueError("an answer without a call")
        # If half of the memory was free, this call alone asked for too much.
        if answer.out_of_memory and self._max_bytes and 2 * host.taken_bytes > self._max_bytes - host.base_bytes:
            self._replace_full(host)
            return
        call = host.take_answer(answer)
        self._check_size(host, answer.resident_bytes // MIB)
        self._deliver(call, call.env, answer)
        if host.is_retired and not host.envs and not host.calls:
            host.process.end()
            self._look_later()

    def _check_size(self, host: Host, resident_mb: int) -> None:
        if self._memory_mb is not None and resident_mb > self._memory_mb and not host.is_retired:
            host.is_retired = True
            size = f"{resident_mb} MiB, more than task.workers.memory_mb={self._memory_mb}"
            logger.warning("an env process has grown to %s: no new episodes", size)

    def _deliver(self, call: Call, env: WorkerEnv, answer: Answer) -> None:
        value, error = self._read(env, call, answer)
        env.was_answered = True
        if env.fault is not None:  # logged already
            error = env.fault
        elif error is not None:
            logger.warning("%s of %s failed\n%s", call, env, answer.traceback or describe(error))
            env.can_replay = False
            env.fault = error if isinstance(error, EnvFault) else None
        call.deliver(value=value, error=error)

    def _read(self, env: WorkerEnv, call: Call, answer: Answer) -> tuple[object, Exception | None]:
        """Return the value or the error of an answer. An answer that cannot be decoded fails only its own episode."""
        try:
            if answer.failed:
                return None, self._explain_failure(env, call, answer, load_error(answer.body))
            if not isinstance(call.message, Play):
                return None, None
            value, schemas = load(answer.body, Observation if call.message.method == "reset" else Transition)
        except ValueError as error:
            return None, TypeError(str(error))
        if schemas is not None:
            env.schemas = schemas
        if call.expected and answer.digest != call.expected:
            return None, _not_replayed(call, "it showed something else, although its class sets deterministic = True")
        if env.can_replay and not call.expected:
            env.history.append((call.message.method, call.message.given, answer.digest))
        return value, None

    def _explain_failure(self, env: WorkerEnv, call: Call, answer: Answer, error: Exception) -> Exception:
        if answer.out_of_memory and self._memory_mb is not None:
            fault: EnvFault = EnvOutOfMemory(
                f"{call} got no memory: its process may take {self._limit}. Raise the limit, or look for what "
                f"{env.cls.__name__} keeps"
            )
        elif call.expected:
            fault = _not_replayed(call, describe(error))
        else:
            return error
        failure = explain(error)
        blame(fault, failure.source, failure.place)
        return fault

    # Processes that are full, die or hang

    def _replace_full(self, host: Host) -> None:
        """Fail the episode whose calls took the most memory, unless episodes that have ended left most of it."""
        heaviest = max(host.envs.values(), key=lambda env: env.grown_bytes, default=None)
        reason = f"the process of the env was full ({self._limit})"
        fault = None
        if heaviest is not None and 2 * sum(env.grown_bytes for env in host.envs.values()) >= host.taken_bytes:
            reason += f", and {heaviest} had taken the most memory, {heaviest.grown_bytes // MIB} MiB"
            fault = EnvOutOfMemory(f"{reason}. Raise the limit, or look for what {heaviest.cls.__name__} keeps")
        logger.warning("%s; its %d episodes are replayed elsewhere if they can be", reason, len(host.envs))
        host.process.kill()
        self._vacate(host, reason, culprit=heaviest if fault else None, fault=fault)

    def _look_later(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(min(1.0, self._step_seconds / 10), self._look)

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
        self._hosts = [host for host in self._hosts if not (host.process.is_ending and host.process.has_ended())]
        if any(host.calls or host.process.is_ending for host in self._hosts):
            self._look_later()

    def _on_lost(self, host: Host) -> None:
        if host in self._hosts:
            self._lose(host)

    def _lose(self, host: Host, *, hung: bool = False) -> None:
        """Kill a process and move its episodes, except the one whose call runs: the oldest without an answer."""
        how = host.process.kill(ask_where=hung)
        running = host.calls[0] if host.calls else None
        culprit = running.env if running is not None and host.has_started else None
        what = f"{running} of {culprit}" if culprit else "no call" if host.has_started else "start"
        logger.warning("an env process %s during %s; printed last:\n%s", how, what, host.process.tail)
        if not host.has_started:
            self._bad_starts += 1
            if self._bad_starts >= MAX_BAD_STARTS:
                problem = f"the last one {how}\n{host.process.tail}"
                self._start_error = f"{self._bad_starts} env processes in a row did not start; {problem}"
        fault: EnvFault = EnvCrashed(f"the process of the env {how} during {running}")
        if hung and running is not None:
            also = f", and {START_SECONDS:g} for imports" if running.imports else ""
            limit = f"{running.seconds:g} s (task.workers.step_seconds{also})"
            fault = EnvHung(f"{running} took longer than {limit}, and its process was killed")
        reason = f"the process of the env {'was killed, because it hung' if hung else how} during {what}"
        self._vacate(host, reason, culprit=culprit, fault=fault)

    def _vacate(self, host: Host, reason: str, *, culprit: WorkerEnv | None, fault: EnvFault | None) -> None:
        """Move the episodes of a process that has been killed, except the one that is to blame."""
        self._hosts.remove(host)
        if culprit is not None:
            culprit.host, culprit.fault = None, fault
        waiting: dict[WorkerEnv, list[Call]] = {env: [] for env in host.envs.values() if env is not culprit}
        for call in host.calls:
            if call.env in waiting:
                waiting[call.env].append(call)
            else:  # the culprit's, or of an env that was closed during a call
                call.deliver(error=call.env.fault or EnvLost(reason))
        for env in waiting:  # all of them before one is moved, which may find the next process dead
            env.host, env.grown_bytes = None, 0
            env.replays += culprit is None and env.was_answered
        for env, calls in waiting.items():
            self._move(env, calls, reason)

    def _move(self, env: WorkerEnv, waiting: list[Call], reason: str) -> None:
        """Replay an episode in another process, then send the calls that had not begun. Cancelled ones too: the flow
        believes that they were played."""
        waiting = [call for call in waiting if not call.expected]
        try:
            self._check_movable(env, reason)
            replayed = [self._call(env, method, given, expected=mark) for method, given, mark in env.history]
            if calls := replayed + waiting:
                self._send(env, calls)
        except EnvFault as fault:
            env.fault = fault
            for call in waiting:
                call.deliver(error=fault)

    def _check_movable(self, env: WorkerEnv, reason: str) -> None:
        name = env.cls.__name__
        if env.fault is not None:
            raise env.fault
        if env.was_answered and not env.can_replay:
            why = "an earlier call failed" if env.cls.deterministic else "set deterministic = True if it can be"
            raise EnvLost(f"{reason}; {name} was not replayed: {why}")
        if env.replays > MAX_REPLAYS:
            raise EnvLost(f"{reason}; {name} was replayed {MAX_REPLAYS} times already")


def _not_replayed(call: Call, problem: str) -> EnvLost:
    return EnvLost(f"another episode took down the process; {call} failed: {problem}")
