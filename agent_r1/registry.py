"""Envs, flows and tools by name, for recipes and rows."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from agent_r1.errors import ConfigError, did_you_mean

Thing = TypeVar("Thing")


class Registry(Generic[Thing]):
    """Things of one kind by name. Unknown and duplicate names are errors."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._things: dict[str, Thing] = {}

    def add(self, name: str, thing: Thing) -> None:
        """Register a thing. The same one may be registered again, by a module that is imported twice."""
        known = self._things.setdefault(name, thing)
        if _origin(known) != _origin(thing):
            raise ConfigError(f"{self._kind} name {name!r} is taken by {_origin(known)}")
        self._things[name] = thing

    def __getitem__(self, name: str) -> Thing:
        if name not in self._things:
            raise ConfigError(f"unknown {self._kind} {name!r}.{did_you_mean(name, self._things)}")
        return self._things[name]


def _origin(thing: Any) -> str:
    """Return where a class, an object of one or a wrapped function is defined."""
    maker = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{maker.__module__}.{maker.__qualname__}"
