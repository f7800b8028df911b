"""Import the package of an adapter, and objects that its settings name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from agent_r1.errors import ConfigError


def require(module: str, install: str) -> ModuleType:
    """Return the module. Raises ConfigError that says what to install if it, or what it needs, is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this task needs the package {module} ({error}): pip install '{install}'") from error


def find_function(setting: str, name: str) -> Callable[..., Any]:
    """Import `module:function`."""
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"env_kwargs.{setting}={name!r} is not of the form module:function: {error}") from error
    return found
