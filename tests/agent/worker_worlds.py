"""Worlds for tests of worker processes: one that does what it is told to, and how to play it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agent_r1.agent import BaseTool, tool
from agent_r1.agent.env import AgentEnv
from agent_r1.types import Action, Observation, TaskRow, Transition

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


class Custom(Exception):
    """Takes two arguments and remembers one, so it cannot be unpickled."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


class Counting(AgentEnv):
    """Adds up numbers, and tells the sum and who it is. A word that is no number is done, see `TRICKS`."""

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
    """Says that it is deterministic, and is not."""

    deterministic = True

    def shown(self) -> Observation:
        return Observation(messages=[{"role": "user", "content": str(random.random())}])


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
    """Holding the lock of the interpreter, so that no thread of the process can do anything about it."""
    ctypes.PyDLL(None).sleep(3600)


async def _leak(env: Counting) -> Any:
    Counting.hoard.append(bytearray(b"x") * (240 * MIB))
    return Transition(observation=env.shown(), info={"pid": os.getpid()})


async def _grab(env: Counting) -> Any:
    return Transition(observation=env.shown(), info={"size": len(bytearray(4096 * MIB))})


async def _no_transition(env: Counting) -> Any:
    return {"text": "not a transition"}


async def _unpicklable(env: Counting) -> Any:
    return Transition(observation=env.shown(), info={"function": lambda: None})


async def _unreadable(env: Counting) -> Any:
    return Transition(observation=env.shown(), info={"value": Unreadable()})


async def _huge(env: Counting) -> Any:
    return Transition(observation=Observation(text="x" * (40 * MIB)))


async def _garbage(env: Counting) -> Any:
    """Write to every socket there is, as code that guesses descriptors would."""
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, b"\xff" * 64)
        except OSError:
            pass
    return Transition(observation=env.shown())


async def _raise(env: Counting) -> Any:
    raise KeyError("no such move")


async def _custom(env: Counting) -> Any:
    raise Custom("odd", 2)


async def _wait(env: Counting) -> Any:
    await asyncio.sleep(0.05)
    return Transition(observation=env.shown(), reward=7.0)


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
    """Start a process of its own, as envs with servers do."""
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
    "grab": _grab,
    "no transition": _no_transition,
    "unpicklable": _unpicklable,
    "unreadable": _unreadable,
    "huge": _huge,
    "garbage": _garbage,
    "raise": _raise,
    "custom": _custom,
    "wait": _wait,
    "slow": _slow,
    "print": _print,
    "new tools": _new_tools,
    "child": _child,
}


def row(row_id: str = "r", question: str = "?") -> TaskRow:
    return TaskRow(prompt=[{"role": "user", "content": question}], row_id=row_id)


def action(text: str) -> Action:
    return Action(text=text, token_ids=[])


async def play(env: AgentEnv, texts: Sequence[str], *, row_id: str = "r") -> list[Observation | Transition]:
    """All that is shown, until the texts run out."""
    try:
        return [await env.reset(row(row_id)), *[await env.step(action(text)) for text in texts]]
    finally:
        await env.close()


def without_info(shown: Sequence[Observation | Transition]) -> list[object]:
    """What can be compared: who answered is no part of the answer."""
    return [
        (item.observation, item.reward, item.terminated) if isinstance(item, Transition) else item for item in shown
    ]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done
