"""The errors this project raises on purpose. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class AgentR1Error(Exception):
    """Base of everything raised deliberately; the command line prints it without a traceback."""


class ConfigError(AgentR1Error, ValueError):
    """The configuration of a run is wrong. Raised before any model is loaded."""


class UnsupportedModelError(ConfigError):
    """An engine or the learner cannot compute a model exactly."""


class DataError(AgentR1Error, ValueError):
    """A task row, a trajectory file or a checkpoint cannot be read."""


class RolloutError(AgentR1Error, RuntimeError):
    """Sampling failed: too many episodes of one batch failed."""


class TrainingError(AgentR1Error, RuntimeError):
    """Learning failed: several updates in a row were not finite."""


class RankError(AgentR1Error, RuntimeError):
    """Another rank of the run failed, or the ranks did not find each other."""


class DiskError(AgentR1Error, OSError):
    """A run ended because something could not be written or read."""


def import_extra(module: str, what: str, extra: str, otherwise: str = "") -> Any:
    """Import a package that only some runs need. ConfigError says how to install it, and what to do without it."""
    try:
        return import_module(module)
    except ImportError as error:
        how = f"pip install 'agent-r1[{extra}]'{otherwise and f', or {otherwise}'}"
        raise ConfigError(f"{what} needs the package {module}: {how}") from error


def at_least(least: float, owner: str, **values: float) -> None:
    """Raise ConfigError if a value is below the minimum."""
    for name, value in values.items():
        if not value >= least:  # refuses NaN too
            raise ConfigError(f"{owner}: {name}={value} must be at least {least:g}")


def check_limits(limits: Any) -> None:
    """Raise ConfigError unless every field of a dataclass with slots is positive and finite."""
    for name in limits.__slots__:
        if not 0 < getattr(limits, name) < math.inf:
            raise ConfigError(f"{name} must be positive and finite, got {getattr(limits, name)}")


def brief(value: object) -> str:
    """Return the type of a value and the beginning of its repr, for messages."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (nested too deep, or a class whose repr raises)
        text = "(cannot be printed)"
    return f"{type(value).__name__} {text[:80] + '...' if len(text) > 80 else text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an 'unknown name' message: the nearest known name, then all of them."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{hint} Choose one of: {', '.join(names) or '(none)'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant. Swapped letters come first: `gpro` is `grpo`, not `gspo`."""
    names = list(known)
    swapped = [one for one in names if sorted(one) == sorted(name)]
    near = swapped or get_close_matches(name, names, n=1)
    return near[0] if near else None
