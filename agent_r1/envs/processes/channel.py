"""Messages between a pool and its processes, and their errors.

A frame is a length and its bytes. The process trusts its parent, so messages to it are pickled. The parent does not
trust the process, which runs user code, so answers are JSON: a line about the call, then the env's return value
(`values.py`). The two are separate, so that an unreadable value fails only its episode.

Every message is answered once and in order: the oldest message without an answer is the one that is running. Answers
are numbered, because an env or its fork could write to the pipe and forge one.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.values import EnvFault as EnvFault
from agent_r1.envs.processes.values import EnvLost as EnvLost
from agent_r1.errors import ConfigError
from agent_r1.tools.base import BaseTool, FunctionTool
from agent_r1.types import Action, Observation, TaskRow, Transition

HEADER = struct.Struct("!I")
MAX_BYTES = 64 << 20  # of one frame: no model reads an observation of this size

Given = TaskRow | Action  # what `reset` and `step` are called with


class EnvCrashed(EnvFault):
    """The process ended during a call of this episode."""


class EnvHung(EnvFault):
    """A call of this episode took longer than `step_seconds`, and its process was killed."""


class EnvOutOfMemory(EnvFault):
    """A call of this episode was refused memory, and nothing says that it would not be in another process."""


class EnvStartError(EnvFault):
    """Processes do not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a process."""

    prepare: Callable[[], object] | None  # called before any env is made
    max_bytes: int | None  # of private memory: an env that asks for more is refused it by the system


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """`reset` with a row, or `step` with an action. `made` comes with the first of an episode to a process: its class
    and settings, as `dump_env` wrote them."""

    episode: int
    given: Given
    made: bytes = b""
    expected: str = ""  # digest of the answer that another process gave to the same call


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    episode: int


Message = Start | Play | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a message."""

    number: int  # of the message, as the process counts them from 0
    body: bytes  # JSON: value and tool schemas after a Play, the exception of whatever failed, else null
    failed: bool = False
    traceback: str = ""  # of a failure, for the log
    digest: str = ""  # of the observation, if the env can be replayed
    out_of_memory: bool = False  # a failure because the system refused memory
    resident_bytes: int = 0  # memory of the process, now
    data_bytes: int = 0  # and as its limit counts it: all that it has asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReply:
    """What an env showed, and its tools where they are not the ones it had before."""

    value: Observation | Transition
    tool_schemas: list[dict[str, Any]] | None


_FIELDS = {each.name: type(each.default) for each in fields(Answer) if each.name not in ("number", "body")} | {
    "number": int
}


def write_message(message: Message) -> bytes:
    return _frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def write_answer(answer: Answer) -> bytes:
    header = {name: getattr(answer, name) for name in _FIELDS}
    return _frame(json.dumps(header).encode() + b"\n" + answer.body)


def read_answer(data: bytes) -> Answer:
    """Decode an answer. Raises ValueError if it is not one."""
    header, _, body = data.partition(b"\n")
    try:
        found = json.loads(header)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != _FIELDS:
        raise ValueError(f"not an answer; it begins with {header[:80]!r}")
    return Answer(body=body, **found)


def _frame(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are too many for one call of an env process; {MAX_BYTES} are the limit")
    return HEADER.pack(len(data)) + data


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """The complete frames at the front of `buffer`, each taken out of it. ValueError: what comes next is no frame."""
    while len(buffer) >= HEADER.size:
        (size,) = HEADER.unpack_from(buffer)
        if size > MAX_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        end = HEADER.size + size
        if len(buffer) < end:
            return
        data = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        yield data


def digest(value: Observation | Transition) -> str:
    """Of what the policy and its reward depend on; not of `info` and `calls`, which hold times."""
    seen: tuple[object, ...] = (value,)
    if isinstance(value, Transition):
        seen = (value.observation, value.reward, value.terminated, value.stop)
    return hashlib.blake2b(repr(seen).encode("utf-8", errors="surrogatepass"), digest_size=16).hexdigest()


def dump_env(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> bytes:
    """The class by its name and the settings by value; ConfigError where one of them cannot leave this process."""
    written = io.BytesIO()
    try:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump((cls, kwargs))
    except Exception as error:  # a setting's own __reduce__ may raise anything
        raise ConfigError(f"env {name!r} cannot be sent to worker processes (task.workers): {error}") from error
    return written.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionTool):
            # The tool has this name in its module, the function under @tool has none.
            return value.function.__qualname__
        if isinstance(value, BaseTool):
            raise pickle.PicklingError(
                f"tool {value.name!r} is an object that all episodes share, and processes cannot. Functions with @tool "
                "can be sent; tools as such need no worker processes"
            )
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is part of the program itself; move it to a module")
        return NotImplemented
