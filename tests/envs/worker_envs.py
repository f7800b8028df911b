"""Environments for tests of worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from agent_r1 import BaseTool, tool
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes import worker
from agent_r1.envs.processes.protocol import HEADER, Answer, write_answer
from agent_r1.types import Action, Observation, StopReason, TaskRow, ToolCallRecord, Transition
from tests.envs.worker_values import Bomb, Custom, Unprintable

MIB = 1 << 20


@tool
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


class Double(BaseTool):
    name = "double"
    description = "Twice a number."
    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}  # noqa: RUF012

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        return str(2 * int(args["number"]))


class Counting(AgentEnv):
    """Adds up numbers, and shows the sum and its process. Words perform one of the `TRICKS`."""

    hoard: list[bytearray] = []  # noqa: RUF012 (a leak)

    def __init__(self, start: int = 0, bad_close: bool = False) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        self.start, self.bad_close = start, bad_close
        self.schemas: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.schemas

    async def reset(self, row: TaskRow) -> Observation:
        self.total, self.row_id = self.start, row.row_id
        question = str(row.prompt[0]["content"])
        if question in TRICKS:
            done: Observation = await TRICKS[question](self)
            return done
        return self.shown()

    async def step(self, action: Action) -> Transition:
        if action.text in TRICKS:
            done: Transition = await TRICKS[action.text](self)
            return done
        if action.text == "end":
            return Transition(terminated=True, reward=float(self.total), info={"pid": os.getpid()})
        self.total += int(action.text)
        return Transition(observation=self.shown(), reward=0.5, info={"pid": os.getpid()})

    def shown(self) -> Observation:
        return Observation(messages=[{"role": "user", "content": f"{self.row_id}: {self.total}"}])

    async def close(self) -> None:
        if self.bad_close:
            raise RuntimeError("stuck door")


class Sure(Counting):
    deterministic = True


class Fickle(Counting):
    """Claims to be deterministic, and is not."""

    deterministic = True

    def shown(self) -> Observation:
        return Observation(messages=[{"role": "user", "content": str(random.random())}])


class Unordered(Sure):
    """Shows a set of words in iteration order."""

    def shown(self) -> Observation:
        words = {f"{self.total} {number}" for number in range(20)}
        return Observation(messages=[{"role": "user", "content": ", ".join(words)}])


class Stalling(Sure):
    """Hangs in every step once a certain file exists."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    async def step(self, action: Action) -> Transition:
        if os.path.exists(self.flag):
            time.sleep(3600)
        return await super().step(action)


class Library(Counting):
    """Loads 100 MiB that all episodes of a process share."""

    async def reset(self, row: TaskRow) -> Observation:
        if not Library.hoard:
            Library.hoard.append(bytearray(b"x") * (100 * MIB))
        return await super().reset(row)


class Knowing(Counting):
    sees_ground_truth = True


async def _die(env: Counting) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def _exit(env: Counting) -> Any:
    os._exit(3)


async def _segfault(env: Counting) -> Any:
    ctypes.string_at(0)


async def _leave(env: Counting) -> Any:
    sys.exit("bye")


async def _hang(env: Counting) -> Any:
    time.sleep(3600)


async def _hang_in_c(env: Counting) -> Any:
    """Holds the interpreter lock, so no thread of the process can interrupt it."""
    ctypes.PyDLL(None).sleep(3600)


async def _leak(env: Counting) -> Any:
    Counting.hoard.append(bytearray(b"x") * (240 * MIB))
    return Transition(observation=env.shown(), info={"pid": os.getpid()})


async def _no_transition(env: Counting) -> Any:
    return {"text": "not a transition"}


async def _function(env: Counting) -> Any:
    return Transition(observation=env.shown(), info={"moves": [{"apply": lambda: None}]})


async def _deep(env: Counting) -> Any:
    info: dict[str, Any] = {}
    for _ in range(5000):
        info = {"inner": info}
    return Transition(observation=env.shown(), info=info)


async def _values(env: Counting) -> Any:
    """Everything that can be sent back."""
    call = ToolCallRecord(name="go", arguments={"to": "north"}, result="ok", text_span=(0, 2), info={"n": np.int64(3)})
    info: Any = {
        "pair": (1, ("a", None)),
        7: "seven",
        "half": "\ud800",
        "array": [np.float32(0.5), np.True_],
    }
    numbers: Any = {"reward": np.float32(0.25), "terminated": np.True_}
    return Transition(
        observation=Observation(messages=[{"role": "user", "content": "\ud800 \u20ac"}]),
        **numbers,
        stop=StopReason.PARSE_LIMIT,
        calls=(call,),
        feedback="fine",
        info=info,
    )


async def _unprintable(env: Counting) -> Any:
    raise Unprintable


async def _stop_loop(env: Counting) -> Any:
    asyncio.get_running_loop().stop()
    return Transition(observation=env.shown(), info={"pid": os.getpid()})


async def _exit_later(env: Counting) -> Any:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    return Transition(observation=env.shown(), info={"pid": os.getpid()})


async def _interrupt(env: Counting) -> Any:
    raise KeyboardInterrupt


async def _huge(env: Counting) -> Any:
    return Transition(observation=Observation(text="x" * (40 * MIB)))


async def _garbage(env: Counting) -> Any:
    _write_to_sockets(b"\xff" * 64)
    return Transition(observation=env.shown())


async def _forge(env: Counting) -> Any:
    """Write an answer to the socket, as a fork could."""
    _write_to_sockets(write_answer(Answer(number=0, body=b"null")))
    return Transition(observation=env.shown())


async def _bomb(env: Counting) -> Any:
    """Send a pickle instead of an answer. It creates a directory when it is loaded."""
    data = pickle.dumps(Bomb(env.row_id))
    _write_to_sockets(HEADER.pack(len(data)) + data)
    return Transition(observation=env.shown())


async def _bomb_inside(env: Counting) -> Any:
    """Send a pickle as the returned value."""
    vars(worker)["dump"] = lambda *_: pickle.dumps(Bomb(env.row_id))
    return Transition(observation=env.shown())


async def _liar(env: Counting) -> Any:
    """Send JSON that is not a transition."""
    vars(worker)["dump"] = lambda *_: b'[{"$": "Popen", "args": ["true"]}, null]'
    return Transition(observation=env.shown())


def _write_to_sockets(data: bytes) -> None:
    """Write to all sockets, as code that guesses descriptors would."""
    for fd in map(int, os.listdir("/proc/self/fd")):  # the number may be high: it is that of the parent
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)
        except OSError:
            pass


async def _fork(env: Counting) -> Any:
    """Let both processes continue."""
    os.fork()
    return Transition(observation=env.shown())


async def _fork_in_c(env: Counting) -> Any:
    """Fork without Python noticing."""
    ctypes.PyDLL(None).fork()
    return Transition(observation=env.shown())


async def _fork_and_leave(env: Counting) -> Any:
    if os.fork() == 0:
        sys.exit(0)
    return Transition(observation=env.shown())


async def _fork_and_stay(env: Counting) -> Any:
    """Fork without Python noticing, so the child keeps all descriptors."""
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        time.sleep(3600)
    return Transition(observation=env.shown(), info={"pid": os.getpid(), "child": child})


async def _fork_and_die(env: Counting) -> Any:
    await _fork_and_stay(env)
    await _die(env)


async def _raise(env: Counting) -> Any:
    raise KeyError("no such move")


async def _custom(env: Counting) -> Any:
    raise Custom("odd", 2)


async def _slow(env: Counting) -> Any:
    time.sleep(0.2)
    return Transition(observation=env.shown(), info={"pid": os.getpid()})


async def _print(env: Counting) -> Any:
    print("a line from an env" * 10_000)  # noqa: T201 (this is what it is about)
    return Transition(observation=env.shown())


async def _new_tools(env: Counting) -> Any:
    env.schemas = [*env.schemas, {"type": "function", "function": {"name": "subtract"}}]
    return Transition(observation=env.shown())


async def _child(env: Counting) -> Any:
    """Start a process, as envs with servers do."""
    child = await asyncio.create_subprocess_exec("sleep", "3600")
    return Transition(observation=env.shown(), info={"pid": os.getpid(), "child": child.pid})


TRICKS: dict[str, Callable[[Counting], Awaitable[Any]]] = {
    "die": _die,
    "exit": _exit,
    "segfault": _segfault,
    "leave": _leave,
    "hang": _hang,
    "hang in c": _hang_in_c,
    "leak": _leak,
    "no transition": _no_transition,
    "function": _function,
    "deep": _deep,
    "values": _values,
    "unprintable": _unprintable,
    "stop loop": _stop_loop,
    "exit later": _exit_later,
    "interrupt": _interrupt,
    "bomb": _bomb,
    "bomb inside": _bomb_inside,
    "liar": _liar,
    "huge": _huge,
    "garbage": _garbage,
    "forge": _forge,
    "fork": _fork,
    "fork in c": _fork_in_c,
    "fork and leave": _fork_and_leave,
    "fork and stay": _fork_and_stay,
    "fork and die": _fork_and_die,
    "raise": _raise,
    "custom": _custom,
    "slow": _slow,
    "print": _print,
    "new tools": _new_tools,
    "child": _child,
}


def row(row_id: str = "r", question: str = "?") -> TaskRow:
    return TaskRow(prompt=[{"role": "user", "content": question}], row_id=row_id)


def action(text: str) -> Action:
    return Action(text=text, token_ids=[])
