"""The environment contract: `reset`, `step`, `close`, one object per episode.

An env speaks messages (or text, or ids); tokens, limits and truncation are the flow's business. The row it is reset
with carries no ground truth unless the class says `sees_ground_truth = True`.

What an env is made with and what it returns is other people's code: both are checked here, for all envs alike.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
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
    """A world for one episode. Subclass it, implement `reset` and `step`, and register it by name if rows choose it."""

    sees_ground_truth: ClassVar[bool] = False
    # The same row and actions give the same observations and rewards, in any process: an episode that lost its worker
    # process to a neighbour is then played again in another (`task.workers`).
    deterministic: ClassVar[bool] = False
    # The `task.env_kwargs` it must be given where a context policy leaves earlier messages out: for an env that
    # otherwise does not repeat what stands in the conversation already.
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
        """Free what the episode held. Called once at the end, also after failures; must allow being called twice."""

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


def takes_setting(cls: type[AgentEnv], name: str) -> bool:
    parameters = inspect.signature(cls).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_settings(cls: type[AgentEnv], name: str, kwargs: dict[str, Any]) -> None:
    """ConfigError for settings that the class does not take, or takes as something else."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        unknown = [key for key in kwargs if isinstance(key, str) and key not in signature.parameters]
        hint = f".{did_you_mean(unknown[0], signature.parameters)}" if unknown else ""
        raise ConfigError(f"env {name!r} does not accept these env_kwargs: {error}{hint}") from error
    takes = _simple_settings(cls)
    for key in kwargs.keys() & takes.keys():
        kinds, given = takes[key], type(kwargs[key])
        if given in _SETTINGS and given not in kinds and not (given is int and float in kinds):
            wanted = " or ".join(map(_IN_WORDS.__getitem__, kinds))
            raise ConfigError(
                f"env {name!r}: env_kwargs.{key} of {cls.__name__} must be {wanted}, not {brief(kwargs[key])}"
            )


# What a config or a row spells out; other objects, a row's numpy numbers among them, are their class's to judge.
_SETTINGS = frozenset({bool, int, float, str, NoneType, list, dict})
_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


@cache
def _simple_settings(cls: type[AgentEnv]) -> dict[str, list[type]]:
    """What each setting takes whose annotation is a bool, int, float, str or None, or a union of these. Other
    annotations, and those that cannot be evaluated, promise nothing. A bool is no number: `turns: true` is a mistake.
    """
    try:
        parameters = inspect.signature(cls, eval_str=True).parameters
    except Exception:  # noqa: BLE001 (annotations are any code; those for type checkers alone are common)
        return {}
    simple = {}
    for name, parameter in parameters.items():
        union = get_origin(parameter.annotation) in (Union, UnionType)
        kinds = list(get_args(parameter.annotation) if union else [parameter.annotation])
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # not *args, **kwargs
        if named and all(isinstance(kind, type) and kind in _IN_WORDS for kind in kinds):
            defaults = [type(parameter.default)] if type(parameter.default) in _IN_WORDS else []  # `seed: int = None`
            simple[name] = list(dict.fromkeys([*kinds, *defaults]))
    return simple


def merge_env_kwargs(recipe: dict[str, Any], row: TaskRow) -> dict[str, Any]:
    """The recipe's settings with the row's on top; dictionaries merge key by key, so a row can add one tool setting.

    A row's `tools` may name tools of the recipe.
    """
    merged = _merged(recipe, dict(row.env_kwargs))
    offered, chosen = recipe.get("tools"), row.env_kwargs.get("tools")
    if isinstance(offered, list | tuple) and isinstance(chosen, list | tuple):
        by_name = {getattr(tool, "name", None): tool for tool in offered}
        merged["tools"] = [by_name.get(tool, tool) if isinstance(tool, str) else tool for tool in chosen]
    return merged


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = {key: _copied(value) for key, value in base.items()}
    for key, value in top.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else _copied(value)
    return result


def own_row(row: TaskRow) -> TaskRow:
    """The row for one episode: the same, and what is done to its messages and tables is done to no other's."""
    return replace(row, **{each.name: _copied(getattr(row, each.name)) for each in fields(row) if each.init})


def _copied(value: Any) -> Any:
    """Containers and arrays anew, so that what an episode does to its table stays in the episode. Other objects are
    kept: what they are, and whether they may be copied, only their author knows."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: _copied(item) for key, item in value.items()})
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    if type(value) is tuple:  # which cannot be changed, but a list in it can
        return tuple(map(_copied, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named one
        return value._make(map(_copied, value))
    if isinstance(value, set):
        return value.copy()
    return _copied_array(value) if isinstance(value, bytearray | array) or _is_array(value) else value


def _copied_array(value: Any) -> Any:
    try:
        return deepcopy(value)
    except (TypeError, RuntimeError):  # one of objects that have no copy, or a tensor that gradients run through
        return value


def _is_array(value: Any) -> bool:
    """An array, tensor or table of whatever library, in which an episode could write. Those that do not say how they
    are copied are files."""
    kind, flags = type(value), getattr(value, "flags", None)
    return hasattr(kind, "__array__") and hasattr(kind, "__deepcopy__") and getattr(flags, "writeable", True)
