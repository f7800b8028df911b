"""Tell whether Python objects are still the same: a hash of what they are made of.

Functions and classes of a notebook have no file whose content could be hashed, but cached warm starts depend on them.
So the hash covers compiled code, constants, defaults, closures, and the functions and plain data of the same module
that the code names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

LENGTH = 8  # hexadecimal digits: they only tell the objects of one run apart
_PLAIN = (str, int, float, bool, bytes, type(None))
_DATA = (str, int, float, list, tuple, dict, set, frozenset)
_WRAPPED = ("__func__", "__wrapped__", "function", "fget")  # the function in a method, a decorated one, a tool
_NOT_HASHED = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__")


def fingerprint(thing: Any) -> str:
    hashed = hashlib.sha256()
    for part in _parts(thing, {}):
        hashed.update(part.encode("utf-8", "backslashreplace") + b"\0")
    return hashed.hexdigest()[:LENGTH]


def _parts(thing: Any, seen: dict[int, Any]) -> Iterator[str]:
    """`seen` keeps what it has seen alive, so that no other object gets the same id."""
    if isinstance(thing, _PLAIN):
        yield repr(thing)
    elif id(thing) not in seen:
        seen[id(thing)] = thing
        yield type(thing).__qualname__
        made_of = next((made_of for kind, made_of in _KINDS if isinstance(thing, kind)), _of_object)
        for part in made_of(thing):
            yield from _parts(part, seen)


def _of_function(function: FunctionType) -> list[Any]:
    named = {name: function.__globals__.get(name) for name in sorted(_names(function.__code__))}
    used = {
        name: value
        for name, value in named.items()
        if isinstance(value, _DATA) or getattr(value, "__module__", None) == function.__module__
    }
    return [function.__code__, function.__defaults__, function.__kwdefaults__, _cells(function), used]


def _of_code(code: CodeType) -> list[Any]:
    return [code.co_code, code.co_consts, code.co_names, code.co_varnames]


def _of_class(kind: type) -> list[Any]:
    bases = [base for base in kind.__bases__ if base.__module__ == kind.__module__]
    return [kind.__qualname__, bases, {name: item for name, item in vars(kind).items() if name not in _NOT_HASHED}]


def _of_object(thing: Any) -> list[Any]:
    inner = [value for name in _WRAPPED if (value := getattr(thing, name, None)) is not None]
    own = getattr(thing, "__dict__", {})
    return [
        inner,
        {name: value for name, value in own.items() if isinstance(value, _PLAIN) and name not in _NOT_HASHED},
    ]


_KINDS: list[tuple[Any, Callable[[Any], list[Any]]]] = [
    (FunctionType, _of_function),
    (CodeType, _of_code),
    (type, _of_class),
    (Mapping, lambda thing: [part for item in thing.items() for part in item]),
    ((list, tuple), list),
    ((set, frozenset), lambda thing: sorted(thing, key=repr)),
]


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found
