"""The worker process: hosts the envs of many episodes, and calls them one at a time in the order it is asked.

Runs in a fresh interpreter, without torch and with only the descriptors it was given. Envs need not be thread-safe, may
block, and may be async: there is one thread and one event loop.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from agent_r1.envs.base import AgentEnv, reset_env, step_env
from agent_r1.envs.processes.protocol import (
    HEADER,
    MAX_BYTES,
    Answer,
    Close,
    Message,
    Play,
    digest,
    dump,
    dump_error,
    write_answer,
)
from agent_r1.guard import run_through, runner, trace
from agent_r1.types import Observation, Transition

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RESERVE_BYTES = 64 << 20  # memory beyond the limit of envs, to report that one has used all of it


def main(channel: int, lifeline: int, max_bytes: int | None, prepare: str) -> None:
    """Serve until the parent closes the channel or ends. `max_bytes` limits private memory; `prepare` is a pickled
    function to call before any env is created."""
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    _end_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    if max_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes + RESERVE_BYTES,) * 2)
    pickle.loads(bytes.fromhex(prepare))()
    with runner() as running:
        loop = running.get_loop()
        run_through(loop, loop.create_task(_serve(socket.socket(fileno=channel), max_bytes)))


def _end_with(lifeline: int) -> None:
    """Let the kernel kill this process and all it has started when the parent's end of the pipe closes, even while an
    env hangs in code that no thread of ours could interrupt."""
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))  # the whole group
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked
            os.killpg(0, signal.SIGKILL)


async def _serve(channel: socket.socket, max_bytes: int | None) -> None:
    """Answer messages. A forked child must not act as a worker: it has no channel and exits after the env code."""
    os.register_at_fork(after_in_child=channel.close)
    owner, envs = os.getpid(), _Envs(max_bytes)
    reader, writer = await asyncio.open_connection(sock=channel)
    with suppress(asyncio.IncompleteReadError):  # the parent has closed the channel
        answer = _measured(Answer(number=0, body=b"null"))  # tells the parent that this process has started
        while os.getpid() == owner:
            writer.write(write_answer(answer))
            await writer.drain()
            await asyncio.sleep(0)  # tasks that envs keep get their turn
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            answer = await envs.answer(await reader.readexactly(size))
        os._exit(1)


@dataclass(slots=True)
class _Hosted:
    env: AgentEnv | None = None  # None: the env could not be created
    schemas: list[dict[str, Any]] | None = None  # the schemas that were sent last


class _Envs:
    def __init__(self, max_bytes: int | None) -> None:
        self._numbers = count(1)
        self._hosted: dict[int, _Hosted] = {}
        self._max_bytes = max_bytes

    async def answer(self, request: bytes) -> Answer:
        number = next(self._numbers)
        try:
            answer = await self._answer(number, pickle.loads(request))
        except BaseException as error:  # noqa: BLE001 (an env may raise anything, and its neighbours go on)
            answer = Answer(
                number=number,
                body=dump_error(error),
                failed=True,
                traceback=trace(error),
                out_of_memory=_is_memory(error),
            )
        return _measured(answer)  # after the exception is gone, and with it everything that its frames held

    async def _answer(self, number: int, message: Message) -> Answer:
        match message:
            case Play():
                return await self._play(number, message)
            case Close():
                hosted = self._hosted.pop(message.episode, None)
                if hosted is not None and hosted.env is not None:
                    await hosted.env.close()
        return Answer(number=number, body=b"null")

    async def _play(self, number: int, message: Play) -> Answer:
        hosted = self._hosted.setdefault(message.episode, _Hosted())
        lift = _limit(self._max_bytes)
        try:
            value = await _call(hosted, message)
            schemas = None if hosted.env is None else hosted.env.tool_schemas
        finally:
            lift()
        mark = digest(value) if hosted.env is not None and hosted.env.deterministic else ""
        changed = None if schemas == hosted.schemas else schemas
        hosted.schemas = deepcopy(schemas)  # an env may change its list in place
        source = type(hosted.env).__name__
        body = dump(value, changed, source)
        if len(body) > MAX_BYTES // 2:
            raise ValueError(f"{source} returned {len(body)} bytes; at most {MAX_BYTES // 2} can be sent back")
        return Answer(number=number, body=body, digest=mark)


async def _call(hosted: _Hosted, message: Play) -> Observation | Transition:
    if message.made:
        cls, kwargs = pickle.loads(message.made)
        hosted.env = cls(**kwargs)
    if hosted.env is None:
        raise RuntimeError("the env could not be created: see the error of its first call")
    given = pickle.loads(message.given)
    return await (reset_env(hosted.env, given) if message.method == "reset" else step_env(hosted.env, given))


def _limit(max_bytes: int | None) -> Callable[[], object]:
    """Limit the memory of a call. Returns a function that lifts the limit; it allocates nothing."""
    if max_bytes is None:
        return bool
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError):  # an env has set a lower limit
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, most))
    return partial(resource.setrlimit, resource.RLIMIT_DATA, (most, most))


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _measured(answer: Answer) -> Answer:
    """Add the bytes that are resident, and the bytes that count against the limit; none except on Linux."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        pages = file.read().split()
        return replace(answer, resident_bytes=int(pages[1]) * PAGE_BYTES, data_bytes=int(pages[5]) * PAGE_BYTES)
    return answer
