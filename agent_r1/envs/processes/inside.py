"""The worker process: hosts the envs of many episodes, and calls them one at a time in the order it is asked.

Runs in an interpreter of its own, started from nothing: no torch, no thread of the parent's, no descriptor but the
ones it was given. Envs need not be thread-safe, may block, and may be async: there is one thread and one event loop.
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
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from agent_r1.envs.base import AgentEnv, reset_env, step_env
from agent_r1.envs.processes.channel import (
    MAX_BYTES,
    Answer,
    Close,
    EnvLost,
    EnvReply,
    Message,
    Play,
    Start,
    digest,
    take_frames,
    write_answer,
)
from agent_r1.envs.processes.values import dump, dump_error
from agent_r1.guard import describe, run_through, runner, trace
from agent_r1.types import TaskRow

READ_BYTES = 1 << 18
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RESERVE_BYTES = 64 << 20  # beyond the limit for envs: to say so where one has used up all there is


def main(channel: int, lifeline: int) -> None:
    """Serve until the parent closes the channel, or is gone."""
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    _end_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported by words
    faulthandler.enable()
    with runner() as running:
        loop = running.get_loop()
        run_through(loop, loop.create_task(_serve(socket.socket(fileno=channel))))


def _end_with(lifeline: int) -> None:
    """Let the kernel kill this process, and all it has started, when the parent's end of the pipe closes: also while
    an env hangs in code that no thread of ours could interrupt."""
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))  # the whole group
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked
            os.killpg(0, signal.SIGKILL)


async def _serve(channel: socket.socket) -> None:
    """A fork of this process is no env process, whatever its env does in it: it has no channel, and ends where the
    env's own code does."""
    channel.setblocking(False)
    os.register_at_fork(after_in_child=channel.close)
    owner, loop, envs, buffer = os.getpid(), asyncio.get_running_loop(), _Envs(), bytearray()
    while data := await loop.sock_recv(channel, READ_BYTES):
        buffer += data
        for request in take_frames(buffer):
            answer = write_answer(await envs.answer(request))
            if os.getpid() != owner:
                os._exit(1)
            await loop.sock_sendall(channel, answer)
            await asyncio.sleep(0)  # tasks that envs keep get their turn


class _Envs:
    """Those of this process."""

    def __init__(self) -> None:
        self._numbers = count()
        self._envs: dict[int, AgentEnv] = {}
        self._schemas: dict[int, list[dict[str, Any]]] = {}  # as last told
        self._lost: dict[int, EnvLost] = {}
        self._max_bytes: int | None = None

    async def answer(self, request: bytes) -> Answer:
        number = next(self._numbers)
        try:
            answer = await self._answer(number, request)
        except BaseException as error:  # noqa: BLE001 (an env may raise anything, and its neighbours go on)
            said, is_memory = trace(error), _is_memory(error)
            body = dump_error(error)
            answer = Answer(number=number, body=body, failed=True, traceback=said, out_of_memory=is_memory)
        # Here the failure is forgotten, and with it what its frames held.
        resident_bytes, data_bytes = _memory()
        return replace(answer, resident_bytes=resident_bytes, data_bytes=data_bytes)

    async def _answer(self, number: int, request: bytes) -> Answer:
        message: Message = pickle.loads(request)
        reply = await self._do(message)
        if reply is None:
            return Answer(number=number, body=b"null")
        assert isinstance(message, Play)
        env = type(self._envs[message.episode])
        mark = digest(reply.value) if env.deterministic else ""
        return Answer(number=number, body=_dump(reply, env.__name__), digest=mark)

    async def _do(self, message: Message) -> EnvReply | None:
        match message:
            case Play(expected=""):
                return await self._play(message)
            case Play():
                await self._play_again(message)
            case Close(episode=episode):
                self._lost.pop(episode, None)
                self._schemas.pop(episode, None)
                env = self._envs.pop(episode, None)
                if env is not None:  # else its first call failed
                    await env.close()
            case Start(prepare=prepare, max_bytes=max_bytes):
                if max_bytes is not None:
                    self._max_bytes, most = max_bytes, max_bytes + RESERVE_BYTES
                    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
                if prepare is not None:
                    prepare()
        return None

    async def _play(self, message: Play) -> EnvReply:
        episode = message.episode
        if episode in self._lost:
            raise self._lost[episode]
        lift = _limit(self._max_bytes)
        try:
            if message.made:
                cls, kwargs = pickle.loads(message.made)
                self._envs[episode] = cls(**kwargs)
            env = self._envs.get(episode)
            if env is None:
                raise RuntimeError("the env was never made: see the error of its first call")
            given = message.given
            value = await (reset_env(env, given) if isinstance(given, TaskRow) else step_env(env, given))
            schemas = env.tool_schemas
        finally:
            lift()
        if self._schemas.get(episode) == schemas:
            return EnvReply(value=value, tool_schemas=None)
        self._schemas[episode] = deepcopy(schemas)  # an env may change its list in place
        return EnvReply(value=value, tool_schemas=schemas)

    async def _play_again(self, message: Play) -> None:
        """What fails here is told to whoever asks for the episode next, too."""
        if message.episode in self._lost:
            raise self._lost[message.episode]
        what = "reset" if isinstance(message.given, TaskRow) else "step"
        failed = f"the env lost its process to a neighbour, and playing it again failed at {what}"
        try:
            reply = await self._play(message)
            same = digest(reply.value) == message.expected
            problem = "" if same else "it showed something else, although its class says deterministic = True"
        except BaseException as error:
            problem = describe(error)
            if _is_memory(error):  # which is no fault of playing again, and may be no fault of its own
                self._lost[message.episode] = EnvLost(f"{failed}: {problem}")
                raise
        if problem:
            self._lost[message.episode] = EnvLost(f"{failed}: {problem}")
            raise self._lost[message.episode]


def _limit(max_bytes: int | None) -> Callable[[], object]:
    """Set the limit for a call of an env; what is returned lifts it, to where our own reserve ends. It needs no memory,
    as there may be none."""
    if max_bytes is None:
        return bool
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError):  # an env has set a lower one
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, most))
    return partial(resource.setrlimit, resource.RLIMIT_DATA, (most, most))


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _dump(reply: EnvReply, source: str) -> bytes:
    body = dump(reply.value, reply.tool_schemas, source)
    if len(body) > MAX_BYTES // 2:
        raise ValueError(f"{source} returned {len(body)} bytes; at most {MAX_BYTES // 2} can be sent back")
    return body


def _memory() -> tuple[int, int]:
    """In bytes: what is in use, and what the system has been asked for and is counted against a limit."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
        return int(pages[1]) * PAGE_BYTES, int(pages[5]) * PAGE_BYTES
    except OSError:  # no Linux
        return 0, 0
