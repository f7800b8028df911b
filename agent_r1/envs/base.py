"""The environment contract: `reset`, `step`, `close`, one object per episode.

An env speaks messages (or text, or ids); the flow handles tokens, limits and truncation. The row carries no ground
truth unless the class sets `sees_ground_truth = True`.

Envs are user code, so their settings and what they return are checked here.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

from agent_r1.errors import ConfigError, brief, did_you_mean
from agent_r1.registry import Registry
from agent_r1.types import Action, Observation, TaskRow, Transition

EnvClass = TypeVar("EnvClass", bound="type[AgentEnv]")
Answer = TypeVar("Answer", Observation, Transition)

_ENVS: Registry[type[AgentEnv]] = Registry("env")


class AgentEnv(ABC):
    """An environment for one episode. Implement `reset` and `step`; register it by name if rows choose it."""

    sees_ground_truth: ClassVar[bool] = False
    # The same row and actions give the same observations and rewards in any process. An episode that loses its worker
    # process to another episode is then replayed (`task.workers`).
    deterministic: ClassVar[bool] = False
    # The `task.env_kwargs` that are required if a context policy leaves out earlier messages, for an env that does not
    # repeat earlier information by default.
    if_forgotten: ClassVar[Mapping[str, Any]] = MappingProxyType({})

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
        """Free what the episode holds. Called at the end, even after failures; may be called twice."""

    @staticmethod
    def register(name: str) -> Callable[[EnvClass], EnvClass]:
        """Class decorator: make the env available to recipes and rows as `env_type: name`."""

        def add(cls: EnvClass) -> EnvClass:
            _ENVS.add(name, cls)
            return cls

        return add


def env_class(env_type: str) -> type[AgentEnv]:
    return _ENVS[env_type]


def make_env(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> AgentEnv:
    check_settings(cls, name, kwargs)
    return cls(**kwargs)


async def reset_env(env: AgentEnv, row: TaskRow) -> Observation:
    """Call `reset`, which is user code, and check what it returns."""
    observation = await call_env(env, "reset", row, Observation)
    _check_last_message(env, observation)
    return observation


async def step_env(env: AgentEnv, action: Action) -> Transition:
    """Call `step`, which is user code, and check what it returns."""
    transition = await call_env(env, "step", action, Transition)
    if not transition.terminated and transition.observation is not None:
        _check_last_message(env, transition.observation)
    return transition


async def call_env(env: AgentEnv, method: str, given: TaskRow | Action, kind: type[Answer]) -> Answer:
    source = f"{type(env).__name__}.{method}"
    pending: object = getattr(env, method)(given)
    if not inspect.isawaitable(pending):
        raise TypeError(f"{source} returned {brief(pending)}, which cannot be awaited: write `async def {method}`")
    answer: object = await pending
    if not isinstance(answer, kind):
        raise TypeError(f"{source} returned {brief(answer)} instead of {kind.__name__}")
    return answer


def _check_last_message(env: AgentEnv, observation: Observation) -> None:
    if observation.messages and observation.messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{type(env).__name__} returned an Observation that ends with a message from the assistant: "
            f"{brief(observation.messages[-1])}. The model replies next, so end with another role"
        )


_signature = cache(inspect.signature)  # an env is made for every episode


def takes_setting(cls: type[AgentEnv], name: str) -> bool:
    parameters = _signature(cls).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_settings(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for settings that the class does not accept, or not with this type."""
    signature = _signature(cls)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        unknown = [key for key in kwargs if isinstance(key, str) and key not in signature.parameters]
        hint = f".{did_you_mean(unknown[0], signature.parameters)}" if unknown else ""
        raise ConfigError(f"env {name!r} does not accept these env_kwargs: {error}{hint}") from error
    simple = _simple_settings(cls)
    for key in kwargs.keys() & simple.keys():
        kinds, given = simple[key], type(kwargs[key])
        if given in _CHECKED and given not in kinds and not (given is int and float in kinds):
            wanted = " or ".join(map(_IN_WORDS.__getitem__, kinds))
            raise ConfigError(
                f"env {name!r}: env_kwargs.{key} of {cls.__name__} must be {wanted}, not {brief(kwargs[key])}"
            )


_CHECKED = frozenset({bool, int, float, str, NoneType, list, dict})  # numpy's numbers, for example, are not
_IN_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "null"}


@cache
def _simple_settings(cls: type[AgentEnv]) -> dict[str, list[type]]:
    """Return the types of each setting that is annotated with bool, int, float, str, None or a union of these. A bool
    does not count as a number: `turns: true` is a mistake."""
    try:
        parameters = inspect.signature(cls, eval_str=True).parameters
    except Exception:  # noqa: BLE001 (annotations are any code, often meant for type checkers only)
        return {}
    simple = {}
    for name, parameter in parameters.items():
        union = get_origin(parameter.annotation) in (Union, UnionType)
        kinds = list(get_args(parameter.annotation) if union else [parameter.annotation])
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # no *args, no **kwargs
        if named and all(isinstance(kind, type) and kind in _IN_WORDS for kind in kinds):
            defaults = [type(parameter.default)] if type(parameter.default) in _IN_WORDS else []  # `seed: int = None`
            simple[name] = list(dict.fromkeys([*kinds, *defaults]))
    return simple


def merge_env_kwargs(recipe: dict[str, Any], row: TaskRow) -> dict[str, Any]:
    """Return a copy of the recipe's settings with the row's on top. Dictionaries merge key by key, so that a row can
    add one setting of a tool. A row's `tools` may name tools of the recipe."""
    merged = _merge(recipe, dict(row.env_kwargs))
    offered, chosen = recipe.get("tools"), row.env_kwargs.get("tools")
    if isinstance(offered, list | tuple) and isinstance(chosen, list | tuple):
        by_name = {getattr(tool, "name", None): tool for tool in offered}
        merged["tools"] = [by_name.get(tool, tool) if isinstance(tool, str) else tool for tool in chosen]
    return merged


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = {key: _copy(value) for key, value in base.items()}
    for key, value in top.items():
        below = result.get(key)
        result[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else _copy(value)
    return result


def copy_row(row: TaskRow) -> TaskRow:
    """Per-episode copy of the row; changes do not leak."""
    return replace(row, **{each.name: _copy(getattr(row, each.name)) for each in fields(row)})


def _copy(value: Any) -> Any:
    """Copy containers and arrays. Objects of other classes are shared: only their author knows how to copy them."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if type(value) is tuple:  # cannot be changed, but a list in it can
        return tuple(map(_copy, value))
    if isinstance(value, set):
        return value.copy()  # keeps the order, unlike deepcopy
    if isinstance(value, bytearray | array) or _is_writable_array(value):
        with suppress(TypeError, RuntimeError):  # holds objects that cannot be copied, or a tensor with gradients
            return deepcopy(value)
    return value


def _is_writable_array(value: Any) -> bool:
    """Whether it is an array, tensor or table in memory. Arrays in files do not define `__deepcopy__`."""
    kind, flags = type(value), getattr(value, "flags", None)
    return hasattr(kind, "__array__") and hasattr(kind, "__deepcopy__") and getattr(flags, "writeable", True)
