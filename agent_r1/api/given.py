"""Python objects under names that a config can hold: the way from a notebook into the same builders as recipes.

An object that other processes can import gets its dotted name, such as `coins.reward`. Anything else (what a notebook
or script defines, lists of rows) is kept here and named `agent_r1.api.given.NAME_HASH`; the hash changes with the
object, so caches cannot confuse two versions of it. Names of objects that this process was not given are an error that
says what to do.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

from agent_r1.api.fingerprint import LENGTH, fingerprint
from agent_r1.errors import ConfigError

_MODULE = __name__
_NAMED = re.compile(rf"{re.escape(_MODULE)}\.(\w+)_[0-9a-f]{{{LENGTH}}}")
_objects: dict[str, Any] = {}


def give(thing: Any, name: str | None = None, made_of: Any = None) -> str:
    """Return the dotted name of an object. `made_of` is hashed in place of the object, if given.

    `name` is for objects without a name of their own.
    """
    if name is None and (importable := importable_name(thing)) is not None:
        return importable
    own = getattr(thing, "__name__", None) or getattr(thing, "name", None) or type(thing).__name__
    plain = re.sub(r"\W", "", str(name or own)) or "object"
    attribute = f"{plain}_{fingerprint(thing if made_of is None else made_of)}"
    _objects[attribute] = thing
    return f"{_MODULE}.{attribute}"


def stem(name: str) -> str | None:
    """Return the name of a kept object without its hash, or None for other names."""
    found = _NAMED.fullmatch(name)
    return found and found[1]


def importable_name(thing: Any) -> str | None:
    """Return the name under which any process can import the object, if there is one."""
    function = getattr(thing, "function", thing)  # a tool holds its function
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__name__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not thing:
        return None
    try:
        found = find_spec(module.__name__)
    except (ImportError, ValueError):
        return None
    has_file = found is not None and found.origin is not None and getattr(module, "__file__", None) is not None
    return f"{module.__name__}.{name}" if has_file else None


def __getattr__(name: str) -> Any:
    if name in _objects:
        return _objects[name]
    if what := stem(f"{_MODULE}.{name}"):
        raise ConfigError(
            f"{what!r} was defined in Python (a notebook, a script, or a list), and this process does not have it. "
            "Run the code that defines it, then pass it again: ar.train(resume=RUN, ...) or ar.load_run(RUN, ...) with "
            "the keywords of the first call"
        )
    raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}")
