"""The environment contract: `reset`, `step`, `close`, one object per episode.

An env speaks messages (or text, or ids); tokens, limits and truncation are the flow's business. The row it is reset
with carries no ground truth unless the class says `sees_ground_truth = True`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.types import Action, Observation, TaskRow, Transition

EnvClass = TypeVar("EnvClass", bound="type[AgentEnv]")

_REGISTRY: dict[str, type[AgentEnv]] = {}


class AgentEnv(ABC):
    """A world for one episode. Subclass it, implement `reset` and `step`, and register it by name if rows choose it."""

    sees_ground_truth: ClassVar[bool] = False
    # The same row and actions give the same observations and rewards, in any process: an episode that lost its worker
    # process to a neighbour is then played again in another (`task.workers`).
    deterministic: ClassVar[bool] = False

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style function schemas handed to the chat template."""
        return []

    @abstractmethod
    async def reset(self, row: TaskRow) -> Observation:
        """Start the episode and return the first observation."""

    @abstractmethod
    async def step(self, action: Action) -> Transition:
        """Apply the policy's action."""

    async def close(self) -> None:  # noqa: B027 (a default that does nothing, on purpose)
        """Free what the episode held. Called once at the end, also after failures; must allow being called twice."""

    @staticmethod
    def register(name: str) -> Callable[[EnvClass], EnvClass]:
        """Class decorator: make the env available to recipes and rows as `env_type: name`."""

        def add(cls: EnvClass) -> EnvClass:
            known = _REGISTRY.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigError(f"env name {name!r} is taken by {known.__module__}.{known.__qualname__}")
            _REGISTRY[name] = cls
            return cls

        return add

    @staticmethod
    def from_config(env_type: str, **kwargs: Any) -> AgentEnv:
        """Make a registered env; unknown names and unknown keyword arguments are errors."""
        return make_env(env_class(env_type), env_type, kwargs)


def env_class(env_type: str) -> type[AgentEnv]:
    if env_type not in _REGISTRY:
        raise ConfigError(f"unknown env {env_type!r}.{did_you_mean(env_type, _REGISTRY)}")
    return _REGISTRY[env_type]


def make_env(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> AgentEnv:
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"env {name!r} does not accept these env_kwargs: {error}") from error
    return cls(**kwargs)


def merge_env_kwargs(recipe: dict[str, Any], row: TaskRow) -> dict[str, Any]:
    """The recipe's settings with the row's on top; dictionaries merge key by key, so a row can add one tool setting."""
    return _merged(recipe, dict(row.env_kwargs))


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = {key: _copied(value) for key, value in base.items()}
    for key, value in top.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else _copied(value)
    return result


def _copied(value: Any) -> Any:
    """Containers anew, so that what an episode does to its table stays in the episode; the objects in them are kept."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
