"""The worker process: hosts the envs of many episodes, and calls them one at a time in the order it is asked.

Runs in an interpreter of its own, started from nothing: no torch, no thread of the parent's, no descriptor but the
ones it was given. Envs need not be thread-safe, may block, and may be async: there is one thread and one event loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import sys
from copy import deepcopy
from typing import Any

from agent_r1.agent.env import AgentEnv
from agent_r1.agent.guard import Escaped, describe, trace
from agent_r1.agent.workers.wire import (
    MAX_BYTES,
    Answer,
    Close,
    EnvLost,
    Given,
    Message,
    Play,
    Replay,
    Shown,
    Start,
    digest,
    frame,
    take_frames,
)
from agent_r1.types import Observation, TaskRow, Transition

READ_BYTES = 1 << 18
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(channel: int, lifeline: int) -> None:
    """Serve until the parent closes the channel, or is gone."""
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    _end_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported by words
    faulthandler.enable()
    asyncio.run(_serve(socket.socket(fileno=channel)))


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
    channel.setblocking(False)
    loop, host, buffer = asyncio.get_running_loop(), _Host(), bytearray()
    while data := await loop.sock_recv(channel, READ_BYTES):
        buffer += data
        for request in take_frames(buffer):
            await loop.sock_sendall(channel, frame(await host.answer(request)))
            await asyncio.sleep(0)  # tasks that envs keep get their turn


class _Host:
    """The envs of this process."""

    def __init__(self) -> None:
        self._envs: dict[int, AgentEnv] = {}
        self._schemas: dict[int, list[dict[str, Any]]] = {}  # as last told
        self._lost: dict[int, EnvLost] = {}

    async def answer(self, request: bytes) -> Answer:
        try:
            message: Message = pickle.loads(request)
            shown = await self._do(message)
            if not isinstance(message, Play):
                return Answer(body=pickle.dumps(None), resident_bytes=_resident_bytes())
            assert shown is not None
            env = type(self._envs[message.episode])
            mark = digest(shown.value) if env.deterministic else b""
            return Answer(body=_dumped(shown, env.__name__), digest=mark, resident_bytes=_resident_bytes())
        except BaseException as error:  # noqa: BLE001 (an env may raise anything, and its neighbours go on)
            return Answer(
                body=_dumped_error(error), failed=True, traceback=trace(error), resident_bytes=_resident_bytes()
            )

    async def _do(self, message: Message) -> Shown | None:
        match message:
            case Play(episode=episode, given=given, made=made):
                return await self._play(episode, given, made)
            case Replay():
                await self._replay(message)
            case Close(episode=episode):
                self._lost.pop(episode, None)
                self._schemas.pop(episode, None)
                env = self._envs.pop(episode, None)
                if env is not None:  # else its first call failed
                    await env.close()
            case Start(prepare=prepare, max_bytes=max_bytes):
                if max_bytes is not None:
                    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
                if prepare is not None:
                    prepare()
        return None

    async def _play(self, episode: int, given: Given, made: bytes) -> Shown:
        if episode in self._lost:
            raise self._lost[episode]
        if made:
            cls, kwargs = pickle.loads(made)
            self._envs[episode] = cls(**kwargs)
        env = self._envs.get(episode)
        if env is None:
            raise RuntimeError("the env was never made: see the error of its first call")
        value = await _call(env, given)
        schemas = env.tool_schemas
        if self._schemas.get(episode) == schemas:
            return Shown(value=value, tool_schemas=None)
        self._schemas[episode] = deepcopy(schemas)  # an env may change its list in place
        return Shown(value=value, tool_schemas=schemas)

    async def _replay(self, message: Replay) -> None:
        """What fails here is kept, and told to whoever asks for the episode next."""
        made = message.made
        for number, (given, expected) in enumerate(message.history):
            try:
                shown = await self._play(message.episode, given, made)
                same = digest(shown.value) == expected
                problem = "" if same else "it showed something else, although its class says deterministic = True"
            except BaseException as error:  # noqa: BLE001 (as above)
                problem = describe(error)
            made = b""
            if problem:
                what = "reset" if isinstance(given, TaskRow) else "step"
                self._lost[message.episode] = EnvLost(
                    f"the env lost its process to a neighbour, and playing it again failed at call {number} ({what}): "
                    f"{problem}"
                )
                return


async def _call(env: AgentEnv, given: Given) -> Observation | Transition:
    """Checked here, where a wrong value can still be named."""
    value: object = await (env.reset(given) if isinstance(given, TaskRow) else env.step(given))
    method, wanted = ("reset", Observation) if isinstance(given, TaskRow) else ("step", Transition)
    if isinstance(value, wanted):
        return value
    text = repr(value)
    shown = text[:80] + "..." if len(text) > 80 else text
    raise TypeError(
        f"{type(env).__name__}.{method} returned {type(value).__name__} {shown} where {wanted.__name__} belongs"
    )


def _dumped(shown: Shown, name: str) -> bytes:
    try:
        body = pickle.dumps(shown, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"what {name} returned cannot be pickled: {error}") from error
    if len(body) > MAX_BYTES // 2:
        raise ValueError(f"{name} returned {len(body)} bytes; {MAX_BYTES // 2} at most can be sent back")
    return body


def _dumped_error(error: BaseException) -> bytes:
    """The exception itself where it survives being sent, so that episodes fail with what their env raised; else what it
    said. One that would end a program is what it would be anywhere (`guard.py`)."""
    if isinstance(error, Exception):
        try:
            body = pickle.dumps(error)
            if len(body) < MAX_BYTES // 2 and describe(pickle.loads(body)) == describe(error):
                return body
        except Exception:  # noqa: BLE001 (said below)
            pass
        return pickle.dumps(RuntimeError(describe(error)))
    return pickle.dumps(Escaped(describe(error)))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:  # no Linux
        return 0
