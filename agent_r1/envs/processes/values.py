"""Encode the answers of a worker process as JSON. The trainer never unpickles it, so it cannot run code there.

Numpy numbers become Python numbers, tuples become lists, keys of dicts become text, and pictures become data URLs.
Anything else that is not text, a number, None, a list or a dict is refused in the worker, where the error can still
name it. An exception is sent as its type's name, text, source and place.
"""

from __future__ import annotations

import builtins
import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from agent_r1.errors import brief
from agent_r1.guard import Escaped, blame, describe, explain
from agent_r1.types import Observation, StopReason, ToolCallRecord, Transition
from agent_r1.vision.pictures import Picture, as_picture

_NO_FUTURE_TAKES = (StopIteration, StopAsyncIteration)


class EnvRaised(Exception):
    """An exception that an env raised in its worker process. Its class has the original name and also derives from the
    original's nearest built-in class."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


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
            raise TypeError("an exception is described by texts")
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
    parent = getattr(builtins, base, None)
    if not (isinstance(parent, type) and issubclass(parent, Exception)) or issubclass(parent, _NO_FUTURE_TAKES):
        parent = Exception
    bases = (EnvRaised,) if parent is Exception else (EnvRaised, parent)
    return type(name, bases, {})
