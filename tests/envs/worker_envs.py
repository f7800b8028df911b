"""Environments for tests of worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
            observation: Observation = self.after(TRICKS[question](self))
            return observation
        return self.shown()

    async def step(self, action: Action) -> Transition:
        if action.text in TRICKS:
            transition: Transition = self.after(TRICKS[action.text](self))
            return transition
        if action.text == "end":
            return Transition(terminated=True, reward=float(self.total), info={"pid": os.getpid()})
        self.total += int(action.text)
        return Transition(observation=self.shown(), reward=0.5, info={"pid": os.getpid()})

    def after(self, done: object) -> Any:
        """Return what a trick returned. If it is nothing or a dict, the env shows its sum, with that as info."""
        if done is None or isinstance(done, dict):
            return Transition(observation=self.shown(), info={"pid": os.getpid(), **(done or {})})
        return done

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


def _segfault() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    time.sleep(3600)


def _hang_in_c() -> None:
    """Holds the interpreter lock, so no thread of the process can interrupt it."""
    ctypes.PyDLL(None).sleep(3600)


def _write_to_sockets(data: bytes) -> None:
    """Write to all sockets, as code that guesses descriptors would."""
    for fd in map(int, os.listdir("/proc/self/fd")):  # the number may be high: it is that of the parent
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)
        except OSError:
            pass


def _fork_and_stay() -> int:
    """Fork without Python noticing, so the child keeps all descriptors."""
    child: int = ctypes.PyDLL(None).fork()
    if child == 0:
        time.sleep(3600)
    return child


def _nested(levels: int) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for _ in range(levels):
        info = {"inner": info}
    return info


def _values() -> Transition:
    """Everything that can be sent back."""
    call = ToolCallRecord(name="go", arguments={"to": "north"}, result="ok", text_span=(0, 2), info={"n": np.int64(3)})
    info: Any = {"pair": (1, ("a", None)), 7: "seven", "half": "\ud800", "array": [np.float32(0.5), np.True_]}
    numbers: Any = {"reward": np.float32(0.25), "terminated": np.True_}
    return Transition(
        observation=Observation(messages=[{"role": "user", "content": "\ud800 \u20ac"}]),
        **numbers,
        stop=StopReason.PARSE_LIMIT,
        calls=(call,),
        feedback="fine",
        info=info,
    )


TRICKS: dict[str, Callable[[Counting], object]] = {
    # ways to end, or not to
    "die": lambda env: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda env: os._exit(3),
    "segfault": lambda env: _segfault(),
    "leave": lambda env: sys.exit("bye"),
    "hang": lambda env: _hang(),
    "hang in c": lambda env: _hang_in_c(),
    "slow": lambda env: time.sleep(0.2),
    "stop loop": lambda env: asyncio.get_running_loop().stop(),
    "exit later": lambda env: _forget(asyncio.get_running_loop().call_soon(sys.exit, 3)),
    # fork; in C, Python does not notice
    "fork": lambda env: _forget(os.fork()),
    "fork in c": lambda env: _forget(ctypes.PyDLL(None).fork()),
    "fork and leave": lambda env: None if os.fork() else sys.exit(0),
    "fork and stay": lambda env: {"child": _fork_and_stay()},
    "fork and die": lambda env: (_fork_and_stay(), os.abort()),
    # raise something
    "raise": lambda env: _raise(KeyError("no such move")),
    "custom": lambda env: _raise(Custom("odd", 2)),
    "unprintable": lambda env: _raise(Unprintable()),
    "interrupt": lambda env: _raise(KeyboardInterrupt()),
    # answer with something else
    "no transition": lambda env: "not a transition",
    "function": lambda env: {"moves": [{"apply": lambda: None}]},
    "deep": lambda env: _nested(5000),
    "values": lambda env: _values(),
    "huge": lambda env: Transition(observation=Observation(text="x" * (40 * MIB))),
    # write to the socket: a frame of many bytes, an answer, a pickle that creates a directory
    "garbage": lambda env: _write_to_sockets(b"\xff" * 64),
    "forge": lambda env: _write_to_sockets(write_answer(Answer(number=0, body=b"null"))),
    "bomb": lambda env: _write_to_sockets(_framed(pickle.dumps(Bomb(env.row_id)))),
    # send, as the returned value: a pickle; JSON that is not a transition
    "bomb inside": lambda env: vars(worker).update(dump=lambda *_: pickle.dumps(Bomb(env.row_id))),
    "liar": lambda env: vars(worker).update(dump=lambda *_: b'[{"$": "Popen", "args": ["true"]}, null]'),
    # the rest
    "leak": lambda env: Counting.hoard.append(bytearray(b"x") * (240 * MIB)),
    "print": lambda env: print("a line from an env" * 10_000),  # noqa: T201 (this is what it is about)
    "new tools": lambda env: env.schemas.append({"type": "function", "function": {"name": "subtract"}}),
    "child": lambda env: {"child": subprocess.Popen(["sleep", "3600"]).pid},  # as envs with servers do
}


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def _forget(value: object) -> None:
    pass


def _raise(error: BaseException) -> None:
    raise error


def row(row_id: str = "r", question: str = "?") -> TaskRow:
    return TaskRow(prompt=[{"role": "user", "content": question}], row_id=row_id)


def action(text: str) -> Action:
    return Action(text=text, token_ids=[])
