"""Import a package that an adapter needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from agent_r1.errors import ConfigError


def require(module: str, install: str) -> ModuleType:
    """Return the module. Raises ConfigError that says what to install if it, or what it needs, is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this task needs the package {module} ({error}): pip install '{install}'") from error
