"""Hash the content of Python objects, to tell whether they are still the same.

Functions and classes of a notebook have no file whose content could be hashed, but cached warm starts depend on them.
So the hash covers compiled code, constants, defaults, closures, and the functions and plain data of the same module
that the code names.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

LENGTH = 8  # hexadecimal digits: they only tell the objects of one run apart
LARGE = 10_000  # items; of longer lists, only some are looked at
_PLAIN = (str, int, float, bool, bytes, type(None))
_DATA = (str, int, float, list, tuple, dict, set, frozenset)
_WRAPPED = ("__func__", "__self__", "__wrapped__", "function", "fget")  # attributes that hold the function
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in a repr; differs between processes
_NOT_HASHED = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__")


def fingerprint(thing: Any) -> str:
    hashed, waiting = hashlib.sha256(), [thing]
    seen: dict[int, Any] = {}  # holds references, so that no other object gets the same id
    while waiting:
        part = waiting.pop()
        if isinstance(part, _PLAIN):
            said = repr(part)
        elif id(part) in seen:
            said = "seen"
        else:
            seen[id(part)] = part
            made_of = next((made_of for kind, made_of in _KINDS if isinstance(part, kind)), _of_object)(part)
            said = f"{type(part).__qualname__} {len(made_of)}"
            waiting += reversed(made_of)
        hashed.update(said.encode("utf-8", "backslashreplace") + b"\0")
    return hashed.hexdigest()[:LENGTH]


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
    if callable(getattr(thing, "tobytes", None)):  # arrays and pictures
        return [_text(thing)]
    inner = [value for name in _WRAPPED if (value := getattr(thing, name, None)) is not None]
    own = {name: value for name, value in getattr(thing, "__dict__", {}).items() if name not in _NOT_HASHED}
    computed = [name for name in own if isinstance(getattr(type(thing), name, None), cached_property)]
    data = {name: value for name, value in own.items() if name not in computed and _is_content(value, thing)}
    return [inner, _text(thing), data]


def _is_content(value: Any, holder: Any) -> bool:
    """Whether an attribute distinguishes versions of its holder. Loggers, clients and the like do not."""
    if isinstance(value, _PLAIN):
        return True
    module = type(holder).__module__
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    return isinstance(value, (*_DATA, FunctionType, partial)) or type(value).__module__ == module


def _text(thing: Any) -> str:
    """Identify an object without attributes, such as a path, by its repr or its bytes."""
    try:
        shown = "" if getattr(type(thing), "__repr__", None) is object.__repr__ else _ADDRESS.sub("", repr(thing))
        return shown + hashlib.sha256(thing.tobytes()).hexdigest() if hasattr(thing, "tobytes") else shown
    except Exception:  # noqa: BLE001 (code of any class)
        return ""


_KINDS: list[tuple[Any, Callable[[Any], list[Any]]]] = [
    (FunctionType, _of_function),
    (CodeType, _of_code),
    (type, _of_class),
    (ModuleType, lambda thing: [thing.__name__]),
    (partial, lambda thing: [thing.func, thing.args, thing.keywords]),
    (Mapping, lambda thing: [part for item in thing.items() for part in item]),
    ((list, tuple), lambda thing: list(thing if len(thing) <= LARGE else _sample(thing))),
    ((set, frozenset), lambda thing: sorted(thing, key=repr)),
]


def _sample(thing: Sequence[Any]) -> list[Any]:
    return [len(thing), *thing[:: len(thing) // LARGE + 1], *thing[-LARGE // 10 :]]


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
