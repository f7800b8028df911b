"""Messages between a pool and its worker processes, and the faults of these processes.

A frame is a length and its bytes. The worker trusts its parent, so messages to it are pickled. The parent does not
trust the worker, which runs user code, so answers are JSON: a line about the call, then the env's return value. The two
are separate, so that an unreadable value fails only its episode.

In a value, numpy numbers become Python numbers, tuples lists, keys of dicts text, and pictures data URLs. Anything else
that is not text, a number, None, a list or a dict is refused in the worker, where the error can still name it. An
exception is sent as its type's name, text, source and place.

A process says with answer 0 that it has started. Then every message is answered once and in order: the oldest message
without an answer is the one that runs. Answers are numbered, because an env or its fork could write to the socket and
forge one.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import pickle
import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import FunctionType
from typing import Any, ClassVar, Literal

from agent_r1.envs.base import AgentEnv
from agent_r1.errors import ConfigError, brief
from agent_r1.guard import Escaped, blame, describe, explain
from agent_r1.tools.base import BaseTool, FunctionTool
from agent_r1.types import Observation, StopReason, ToolCallRecord, Transition
from agent_r1.vision.pictures import Picture, as_picture

HEADER = struct.Struct("!Q")
MAX_BYTES = 64 << 20  # per answer: no model reads an observation of this size


class EnvFault(Exception):
    """An episode failed because of its worker process, not because of the env itself."""


class EnvLost(EnvFault):
    """Another episode took down the process, and this one could not be replayed elsewhere."""


class EnvCrashed(EnvFault):
    """The process ended during a call of this episode."""


class EnvHung(EnvFault):
    """A call of this episode took longer than `step_seconds`, and its process was killed."""


class EnvOutOfMemory(EnvFault):
    """A call of this episode was refused memory."""


class EnvStartError(EnvFault):
    """Worker processes do not start."""


class EnvRaised(Exception):
    """An exception that an env raised in its worker process. Its class has the original name and also derives from the
    original's nearest built-in class."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A call of `reset` or `step`."""

    episode: int
    method: Literal["reset", "step"]
    given: bytes  # the pickled row or action
    made: bytes = b""  # class and settings (`dump_env`), with the first call of an episode to a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    episode: int
    method: ClassVar = "close"


Message = Play | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int  # number of the message, counted by the process from 1
    body: bytes  # JSON: value and tool schemas after a Play, the exception after a failure, else null
    failed: bool = False
    traceback: str = ""  # traceback of a failure, for the log
    digest: str = ""  # digest of the observation, if the env can be replayed
    out_of_memory: bool = False  # the failure is that the system refused memory
    resident_bytes: int = 0  # memory of the process now
    data_bytes: int = 0  # memory of the process as its limit counts it


_HEADER_FIELDS = {each.name: type(each.default) for each in fields(Answer) if each.name != "body"} | {"number": int}


def write_message(message: Message) -> bytes:
    return _write_frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def write_answer(answer: Answer) -> bytes:
    header = {name: getattr(answer, name) for name in _HEADER_FIELDS}
    return _write_frame(json.dumps(header).encode() + b"\n" + answer.body)


def read_answer(data: bytes) -> Answer:
    """Decode an answer. Raises ValueError if it is not one."""
    header, _, body = data.partition(b"\n")
    try:
        found = json.loads(header)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != _HEADER_FIELDS:
        raise ValueError(f"not an answer; it begins with {header[:80]!r}")
    return Answer(body=body, **found)


def _write_frame(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete frames out of a buffer. Raises ValueError if it does not begin with a frame."""
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
    """Hash everything that the policy and its reward depend on; `info` and `calls` hold times and are left out."""
    seen: tuple[object, ...] = (value,)
    if isinstance(value, Transition):
        seen = (value.observation, value.reward, value.terminated, value.stop)
    return hashlib.blake2b(repr(seen).encode("utf-8", errors="surrogatepass"), digest_size=16).hexdigest()


def dump_env(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> bytes:
    """Pickle the class by name and the settings by value. Raises ConfigError if one of them cannot be sent."""
    written = io.BytesIO()
    try:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump((cls, kwargs))
    except Exception as error:  # a setting's own __reduce__ may raise anything
        raise ConfigError(f"env {name!r} cannot be sent to worker processes (task.workers): {error}") from error
    return written.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionTool):
            return value.function.__qualname__  # the name of the tool in its module; the function itself has none
        if isinstance(value, BaseTool):
            raise pickle.PicklingError(
                f"tool {value.name!r} is an object that all episodes share. Use a function with @tool, or leave out "
                "task.workers: tools do not need it"
            )
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__; move it to a module")
        return NotImplemented


def dump(value: Observation | Transition, tool_schemas: list[dict[str, Any]] | None, source: str) -> bytes:
    """Encode a value. Raises TypeError that names the part that is not plain data; `source` names who returned it."""
    try:
        return json.dumps([value, tool_schemas], default=_to_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{source} returned something that cannot be sent from a worker process: {error}") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, Observation | Transition | ToolCallRecord):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Picture):
        return f"data:image/{value.suffix[1:]};base64,{b64encode(value.encoded).decode()}"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy's
        return value.item()
    raise TypeError(f"{brief(value)}; return text, numbers, None, lists or dicts")


def load(data: bytes, kind: type[Observation | Transition]) -> tuple[Any, list[dict[str, Any]] | None]:
    """Decode a value of this kind and tool schemas. Raises ValueError for anything else."""
    try:
        value, schemas = json.loads(data)
        if not isinstance(schemas, list | None):
            raise TypeError("tool schemas must be a list")
        return Observation(**value) if kind is Observation else _load_transition(**value), schemas
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"cannot decode what the env returned: {describe(error)}") from error


def _load_transition(
    *, observation: dict[str, Any] | None, stop: str, calls: list[dict[str, Any]], **others: Any
) -> Transition:
    return Transition(
        observation=None if observation is None else Observation(**observation),
        stop=StopReason(stop),
        calls=tuple(map(_load_call, calls)),
        **others,
    )


def _load_call(call: dict[str, Any]) -> ToolCallRecord:
    pictures = tuple(map(as_picture, call["pictures"]))
    return ToolCallRecord(**{**call, "text_span": tuple(call["text_span"]), "pictures": pictures})


def dump_error(error: BaseException) -> bytes:
    """Encode any exception, even one that fails when printed."""
    kind, failure = type(error), explain(error)
    text = failure.message
    base = next((each.__name__ for each in kind.__mro__ if each.__module__ == "builtins"), "Exception")
    if not isinstance(error, Exception):  # it would have ended the program: see `guard.py`
        base = Escaped.__name__
    else:
        text = text.removeprefix(f"{kind.__name__}: ")
    said = {"type": kind.__name__, "base": base, "text": text, "source": failure.source, "place": failure.place}
    return json.dumps(said).encode()


def load_error(data: bytes) -> Exception:
    """Return the exception that `dump_error` wrote. Raises ValueError for anything else."""
    try:
        said = json.loads(data)
        name, base, text, source, place = (said[key] for key in ("type", "base", "text", "source", "place"))
        if not all(isinstance(each, str) for each in (name, base, text, source, place)):
            raise TypeError("the parts of an exception's description must be text")
        error = _make_error(name, base, text)
    except (ValueError, TypeError, KeyError, RecursionError) as wrong:
        raise ValueError(f"cannot decode what the env raised: {describe(wrong)}") from wrong
    blame(error, source, place)
    return error


def _make_error(name: str, base: str, text: str) -> Exception:
    if base == Escaped.__name__:
        return Escaped(text)
    try:
        return _error_class(name, base)(text)
    except TypeError:  # a built-in class that cannot be created from one string
        return _error_class(name, "Exception")(text)


@lru_cache(maxsize=256)
def _error_class(name: str, base: str) -> type[EnvRaised]:
    parent = getattr(builtins, base, Exception)
    # No future takes a StopIteration.
    usable = isinstance(parent, type) and issubclass(parent, Exception) and "Stop" not in base and base != "Exception"
    return type(name, (EnvRaised, parent) if usable else (EnvRaised,), {})
