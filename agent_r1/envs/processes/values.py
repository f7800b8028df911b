"""Encode what a worker process sends back as JSON. The trainer never unpickles it, so it cannot run code there.

Text, numbers, None, lists, tuples and dicts are sent unchanged, numpy numbers become Python numbers, and the classes
that an env returns are supported. Anything else is refused in the worker, where the error can still name the value. An
exception is sent as the name of its type, its text, its source and its place.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from numbers import Real
from types import NoneType
from typing import Any

from agent_r1.errors import brief
from agent_r1.guard import Escaped, blame, describe, explain
from agent_r1.types import Observation, StopReason, ToolCallRecord, Transition

MAX_DEPTH = 96  # of nested values: enough for calls and `info`, far below the limit of the JSON parser
TAG = "$"  # the key of a JSON object that represents something other than a dict
_PLAIN = frozenset({NoneType, bool, int, float, str})
_CLASSES = {cls.__name__: cls for cls in (Observation, Transition, ToolCallRecord)}
_NO_FUTURE_TAKES = (StopIteration, StopAsyncIteration)


class EnvFault(Exception):
    """An episode failed because of its worker process, not because of the env itself."""


class EnvLost(EnvFault):
    """Another episode crashed the process, and this one could not be replayed elsewhere."""


class EnvRaised(Exception):
    """An exception that an env raised in its worker process. Its class has the original name and also derives from the
    original's nearest built-in class."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def dump(value: object, tool_schemas: list[dict[str, Any]] | None, source: str) -> bytes:
    """Encode a value. Raises TypeError with the part that is not plain data; `source` names who returned it."""
    return _encode([_plain(value, source, "", 0), _plain(tool_schemas, source, ".tool_schemas", 0)])


def load(data: bytes) -> Any:
    """Decode what `dump` wrote. Raises ValueError for anything else."""
    try:
        return json.loads(data.decode("utf-8", errors="surrogatepass"), object_hook=_read_object)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(describe(error)) from error


def dump_error(error: BaseException) -> bytes:
    """Encode any exception, even one that fails when printed. Of its traceback, only the place of the raise is kept."""
    kind, failure = type(error), explain(error)
    text = failure.message
    base = next((each.__name__ for each in kind.__mro__ if each.__module__ == "builtins"), "Exception")
    if isinstance(error, EnvLost):
        base = EnvLost.__name__
    elif not isinstance(error, Exception):  # a BaseException that would have ended the program: see `guard.py`
        base = Escaped.__name__
    else:
        text = text[len(kind.__name__) + 2 :]
    return _encode(
        {"type": kind.__name__, "base": base, "text": text, "source": failure.source, "place": failure.place}
    )


def load_error(data: bytes) -> Exception:
    """Return the exception that `dump_error` wrote. Raises ValueError for anything else."""
    said = load(data)
    try:
        name, base, text, source, place = (said[key] for key in ("type", "base", "text", "source", "place"))
        if not all(isinstance(each, str) for each in (name, base, text, source, place)):
            raise TypeError("an exception is described by texts")
        error = _error(name, base, text)
        blame(error, source, place)
    except (KeyError, TypeError, ValueError) as wrong:
        raise ValueError(f"not an exception: {describe(wrong)}") from wrong
    return error


def _error(name: str, base: str, text: str) -> Exception:
    for ours in (EnvLost, Escaped):
        if base == ours.__name__:
            return ours(text)
    try:
        return _class(name, base)(text)
    except TypeError:  # a built-in class that cannot be created from one string
        return _class(name, "Exception")(text)


@lru_cache(maxsize=256)
def _class(name: str, base: str) -> type[EnvRaised]:
    parent = getattr(builtins, base, None)
    if not (isinstance(parent, type) and issubclass(parent, Exception)) or issubclass(parent, _NO_FUTURE_TAKES):
        parent = Exception
    bases = (EnvRaised,) if parent is Exception else (EnvRaised, parent)
    return type(name, bases, {})


def _encode(plain: Any) -> bytes:
    # An env's text may contain lone surrogates, which are not valid UTF-8. Keep them; `visible` escapes them later.
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="surrogatepass")


def _plain(value: Any, source: str, where: str, depth: int) -> Any:
    """Convert `value` to JSON types. `where` is its path inside the returned value, for errors."""
    if type(value) in _PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise _refused(value, source, f"{where[:40]}...", f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, StopReason):
        return {TAG: "StopReason", "value": value.value}
    if isinstance(value, bool | int | float | str):  # a subclass, such as numpy's float64 or an enum
        return value
    if isinstance(value, list | tuple):
        items = list(value)
        if not _PLAIN.issuperset(map(type, items)):
            items = [_plain(item, source, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        return _plain_dict(value, source, where, depth)
    if type(value) in _CLASSES.values():
        named = {each.name: getattr(value, each.name) for each in fields(value)}
        return {TAG: type(value).__name__} | {
            name: _plain(item, source, f"{where}.{name}", depth + 1) for name, item in named.items()
        }
    return _plain_number(value, source, where)


def _plain_dict(value: Mapping[Any, Any], source: str, where: str, depth: int) -> dict[str, Any]:
    pairs = [(key, _plain(item, source, f"{where}[{key!r:.40}]", depth + 1)) for key, item in value.items()]
    if all(type(key) is str for key, _ in pairs) and TAG not in value:
        return dict(pairs)
    return {TAG: "dict", "items": [[_plain(key, source, f"{where} (a key)", depth + 1), item] for key, item in pairs]}


def _plain_number(value: Any, source: str, where: str) -> Any:
    number = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if type(number) in _PLAIN:
        return number
    if isinstance(number, Real):
        return float(number)
    raise _refused(value, source, where, "return text, numbers, None, lists, tuples or dicts")


def _refused(value: object, source: str, where: str, why: str) -> TypeError:
    inside = f" in {where.lstrip('.')}" if where else ""
    return TypeError(f"{source} returned {brief(value)}{inside}, which cannot be sent from a worker process: {why}")


def _read_object(found: dict[str, Any]) -> Any:
    kind = found.pop(TAG, None)
    if kind is None:
        return found
    if kind == "tuple":
        return tuple(found["items"])
    if kind == "dict":
        return dict(found["items"])
    if kind == "StopReason":
        return StopReason(found["value"])
    return _CLASSES[kind](**found)
