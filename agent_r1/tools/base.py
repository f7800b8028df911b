"""Tools: what the model may call, and how one is written.

`@tool` on a typed function is the short form, `BaseTool` the long one. A tool object is shared by all episodes, so it
keeps no state of an episode; what belongs to a row arrives as `FromRow` parameters. A sync function runs in a daemon
thread of its own: one that hangs is abandoned, never waited for, and cannot starve the others (Python cannot kill a
thread, so untrusted code belongs in a process that its tool kills). How calls are run: `tool_run.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
from numbers import Real
from typing import Any, TypeVar, get_args, get_origin, get_type_hints, overload

from pydantic import BaseModel

from agent_r1.errors import ConfigError
from agent_r1.guard import call
from agent_r1.registry import Registry
from agent_r1.resources import Resource
from agent_r1.tools.schema import (
    Arguments,
    RowKeys,
    arguments_from_model,
    arguments_from_schema,
    arguments_from_signature,
)
from agent_r1.tools.schema import FromRow as FromRow


class ToolError(Exception):
    """The tool ran and has to say no. The text goes to the model; anything else a tool raises is a bug of the tool."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers when text alone is not enough."""

    text: str
    reward: float | None = None  # process reward of this call
    info: Mapping[str, Any] = field(default_factory=dict)  # kept with the trajectory, never shown to the model

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"ToolResult.text must be a str, got {type(self.text).__name__}")
        if self.reward is not None and not isinstance(self.reward, Real):
            raise TypeError(f"ToolResult.reward must be a number, got {self.reward!r:.80}")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"ToolResult.reward must be finite, got {self.reward}")
        if not isinstance(self.info, Mapping):
            raise TypeError(f"ToolResult.info must be a dict, got {self.info!r:.80}")


Returned = ToolResult | str | float  # what a tool may return; numbers become text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One validated call, as `batch_execute` receives it."""

    args: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)  # the row's values for this tool


class BaseTool(Resource, ABC):
    """A tool with a hand-written schema. Give it a name, a description, parameters and `execute`.

    Override `batch_execute` too, and concurrent calls of all episodes are gathered into one: when no new call has come
    for some rounds of the event loop, when `max_batch` are waiting, or `max_wait` seconds after the first.
    """

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of type "object"
    timeout: float = 30.0  # seconds per call
    parallel: bool = False  # True: calls of one response may overlap. For tools that change no state of the episode
    max_batch: int | None = None  # None: no limit
    max_wait: float = 0.0  # seconds; 0: only until the event loop has nothing new

    @abstractmethod
    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        """Run one call. `args` are validated; `context` holds the row's `tools_kwargs` that the signature takes."""

    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        """Run several calls: a list with one result per call, in order. An exception in it fails that call alone.

        When the batch itself raises, which call broke it is not known, and each is run again alone: calls that must not
        happen twice should put their exceptions into the list.
        """
        running = (self.execute(call.args, **call.context) for call in calls)
        return await asyncio.gather(*running, return_exceptions=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseTool:
        return self  # shared by all episodes, so the tools of a copied row are the row's own

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @cached_property
    def arguments(self) -> Arguments:
        return arguments_from_schema(self.name, self.parameters)

    @cached_property
    def row_keys(self) -> RowKeys:
        return RowKeys.of(list(inspect.signature(self.execute).parameters.values())[1:])

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as `execute` takes them, the schema's defaults filled in; BadArguments otherwise."""
        sent = self.arguments.validate(arguments).model_dump(by_alias=True, exclude_unset=True)
        properties = self.arguments.parameters["properties"]
        return {name: deepcopy(s["default"]) for name, s in properties.items() if "default" in s} | sent

    @staticmethod
    def register(thing: AnyTool) -> AnyTool:
        """Decorator: make a tool (a class without constructor arguments, or an object) available by its name."""
        _TOOLS.add(thing.name, thing)
        return thing


class BatchTool(BaseTool):
    """A tool that runs calls together. Give it `batch_execute`; a call alone is a batch of one."""

    parallel = True  # so that the calls of one response form one batch

    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        (result,) = await self.batch_execute([ToolCall(args=args, context=context)])
        if isinstance(result, BaseException):
            raise result
        return result

    @abstractmethod
    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        """As in `BaseTool`."""


AnyTool = TypeVar("AnyTool", bound=BaseTool | type[BaseTool])

_TOOLS: Registry[BaseTool | type[BaseTool]] = Registry("tool")


def get_tool(tool: str | BaseTool) -> BaseTool:
    """The tool object of that name, one per process; a tool object is handed back checked."""
    if isinstance(tool, str):
        found = _TOOLS[tool]
        if isinstance(found, type):
            found = found()
            _TOOLS.add(tool, found)
        tool = found
    if not isinstance(tool, BaseTool):
        raise ConfigError(f"a tool is a name or a BaseTool, got {tool!r}. Decorate a function with @tool.")
    for attribute in ("name", "description", "parameters"):
        if not getattr(tool, attribute, None):
            raise ConfigError(f"tool {type(tool).__qualname__} has no {attribute!r}; the model is shown it")
    if not (isinstance(tool.timeout, int | float) and tool.timeout > 0):
        raise ConfigError(f"tool {tool.name!r}: timeout must be positive seconds, got {tool.timeout!r}")
    if not isinstance(tool.parallel, bool):
        raise ConfigError(f"tool {tool.name!r}: parallel must be True or False, got {tool.parallel!r}")
    if tool.max_batch is not None and not (isinstance(tool.max_batch, int) and tool.max_batch >= 1):
        raise ConfigError(
            f"tool {tool.name!r}: max_batch must be a whole number from 1 on, or None for no limit, "
            f"got {tool.max_batch!r}"
        )
    if not (isinstance(tool.max_wait, int | float) and tool.max_wait >= 0):
        raise ConfigError(f"tool {tool.name!r}: max_wait must be seconds, 0 or more, got {tool.max_wait!r}")
    _ = tool.arguments  # a schema that cannot be checked fails here, not in the middle of an episode
    return tool


class FunctionTool(BaseTool):
    """A tool made from a typed function by `@tool`. Calling the object calls the function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.description = inspect.cleandoc(function.__doc__ or "")
        if not self.description:
            raise ConfigError(f"tool {name!r} has no docstring; the model reads it to decide when to call the tool")
        update_wrapper(self, function)
        self.arguments, self.row_keys = self._signature()
        self.parameters = self.arguments.parameters

    def _signature(self) -> tuple[Arguments, RowKeys]:
        return arguments_from_signature(self.name, self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return self.arguments.values(self.arguments.validate(arguments))

    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        result: Returned = await call(self.function, **args, **context)
        return result


class BatchFunctionTool(BatchTool, FunctionTool):
    """Made by `@tool(batch=True)` from `f(calls: list[Query]) -> list[result]`; Query is a pydantic model."""

    _item: type[BaseModel]

    def _signature(self) -> tuple[Arguments, RowKeys]:
        hints = get_type_hints(self.function)
        hints.pop("return", None)
        taken = next(iter(hints.values()), None)
        item = get_args(taken)[0] if get_origin(taken) is list else None
        if len(hints) != 1 or not (isinstance(item, type) and issubclass(item, BaseModel)):
            raise ConfigError(
                f"tool {self.name!r}: batch=True needs one parameter, a list of a pydantic model whose fields are the "
                f"arguments of one call, got {inspect.signature(self.function)}"
            )
        self._item = item
        return arguments_from_model(self.name, item), RowKeys()

    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        items = [self._item.model_construct(**call.args) for call in calls]
        results: Sequence[Returned | BaseException] = await call(self.function, items)
        return results


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, timeout: float | None = None, parallel: bool | None = None, batch: bool = False,
    max_batch: int | None = None, max_wait: float | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...  # fmt: skip
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,  # the function's
    timeout: float | None = None,  # BaseTool.timeout
    parallel: bool | None = None,  # None: the default of BaseTool, or with batch=True of BatchTool
    batch: bool = False,
    max_batch: int | None = None,
    max_wait: float | None = None,  # BaseTool.max_wait
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool from a typed function: signature -> schema, docstring -> description.

    The calls of one response run one after another. With `parallel=True` consecutive ones may overlap.
    With `batch=True` the function takes a list of a pydantic model, whose fields are the arguments of one call, and
    returns one result per call; a ToolError in the list is the answer to that call.
    """

    def make(function: Callable[..., Any]) -> FunctionTool:
        if not inspect.isroutine(function):  # a partial or an object has no docstring of its own, perhaps no name
            raise ConfigError(f"@tool takes a function, got {function!r:.80}. Wrap it in one, or write a BaseTool")
        if _is_method(function):
            raise ConfigError(
                f"@tool needs a function, but {function.__qualname__} is a method. Write a function at module level "
                "with FromRow parameters, make the class a BaseTool, or create the tool from "
                f"an object: tool(thing.{function.__name__})"
            )
        if not batch and (max_batch is not None or max_wait is not None):
            raise ConfigError(f"tool {function.__name__!r}: max_batch and max_wait do nothing without batch=True")
        made = (BatchFunctionTool if batch else FunctionTool)(function, name or function.__name__)
        made.max_batch = max_batch
        made.parallel = type(made).parallel if parallel is None else parallel
        made.timeout = BaseTool.timeout if timeout is None else timeout
        made.max_wait = BaseTool.max_wait if max_wait is None else max_wait
        return made

    return make if function is None else make(function)


def _is_method(function: Callable[..., Any]) -> bool:
    """Whether the function is defined in a class and not bound to an object."""
    owner = function.__qualname__.rpartition(".")[0]
    if not owner or owner.endswith("<locals>"):
        return False
    return next(iter(inspect.signature(function).parameters), None) in ("self", "cls")
