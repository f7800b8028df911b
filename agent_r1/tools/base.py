"""Tools: what the model may call.

`@tool` on a typed function is the short form, `BaseTool` the long one. All episodes share a tool object, so it must not
hold the state of an episode; values of a row arrive as `FromRow` parameters. Each call of a sync function runs in its
own daemon thread: one that hangs is abandoned and cannot starve the others (Python cannot kill a thread, so untrusted
code belongs in a process that its tool kills). `runner.py` runs the calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
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
from agent_r1.types import check_reward, check_type


class ToolError(Exception):
    """The tool ran but refused the call. The model sees the message; any other exception is a bug in the tool."""

    reward = 0.0  # process reward of this call: what the mistake costs. Subclasses may have an `__init__` of their own

    def __init__(self, message: str = "", *, reward: float = 0.0) -> None:
        super().__init__(message)
        self.reward = reward
        check_reward("ToolError.reward", reward)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A result with more than text."""

    text: str
    reward: float | None = None  # process reward of this call
    info: Mapping[str, Any] = field(default_factory=dict)  # recorded with the trajectory, never shown to the model
    images: Sequence[Any] = ()  # shown after the text: PIL images, arrays, bytes, paths or data URLs

    def __post_init__(self) -> None:
        check_type("ToolResult.text", self.text, str, "a string")
        check_type("ToolResult.images", self.images, list | tuple, "a list of pictures")
        check_type("ToolResult.info", self.info, Mapping, "a dict")
        if self.reward is not None:
            check_reward("ToolResult.reward", self.reward)


Returned = ToolResult | str | float  # what a tool may return; numbers become text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One validated call, as `batch_execute` receives it."""

    args: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)  # the row's values for this tool


class BaseTool(Resource, ABC):
    """A tool with a hand-written schema: a name, a description, parameters and `execute`.

    If you override `batch_execute`, concurrent calls of all episodes are gathered into one batch. It runs when no new
    call has come for some rounds of the event loop, when `max_batch` calls wait, or `max_wait` seconds after the first.
    """

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of type "object"
    timeout: float = 30.0  # seconds per call
    parallel: bool = False  # True: calls of one response may overlap; for tools that do not change the episode's state
    max_batch: int | None = None  # None: no limit
    max_wait: float = 0.0  # seconds; 0: only until no new call has come for some rounds of the event loop

    @abstractmethod
    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        """Run one call. `args` are validated; `context` holds the row's `tools_kwargs` that the signature takes."""

    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        """Run several calls and return a list of results in their order. An exception in it fails only that call.

        If the batch itself raises, each call is run again alone, because any of them may have caused it. Tools whose
        calls must not happen twice should put their exceptions into the list.
        """
        running = (self.execute(call.args, **call.context) for call in calls)
        return await asyncio.gather(*running, return_exceptions=True)

    def for_episode(self, episode: str) -> BaseTool:
        """Return the tool as one episode calls it. Override it, with `end_episode`, for a tool that holds something per
        episode; `episode` is the same for all its tools."""
        return self

    async def end_episode(self) -> None:
        """Release everything that the tool of an episode holds. Called when the episode ends, even after failures; may
        be called twice."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseTool:
        return self  # a copied row shares its tools

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
        """The arguments for `execute`, with defaults filled in. Raises BadArguments."""
        valid: dict[str, Any] = self.arguments.validate(arguments)
        return valid

    @staticmethod
    def register(thing: AnyTool) -> AnyTool:
        """Decorator: make a tool (a class without constructor arguments, or an object) available by its name."""
        _TOOLS.add(thing.name, thing)
        return thing


class BatchTool(BaseTool):
    """A tool that runs calls together in `batch_execute`."""

    parallel = True  # so that the calls of one response form one batch

    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        (result,) = await self.batch_execute([ToolCall(args=args, context=context)])
        if isinstance(result, BaseException):
            raise result
        return result

    @abstractmethod
    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        """See `BaseTool`."""


class ToolSet(ABC):
    """Tools that come together, such as those of a server. Can be listed wherever a tool can."""

    @abstractmethod
    def tools(self) -> Sequence[BaseTool]:
        """The tools, the same objects every time."""

    @property
    def made_of(self) -> object:
        """Identifies this set among others of its class. Unlike connections, it never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ToolSet:
        return self


def list_tools(listed: Iterable[str | BaseTool | ToolSet]) -> list[BaseTool]:
    """Return the tools of a list of names, tools and sets of tools."""
    found: list[BaseTool] = []
    for each in listed:
        found += map(get_tool, each.tools()) if isinstance(each, ToolSet) else [get_tool(each)]
    return found


AnyTool = TypeVar("AnyTool", bound=BaseTool | type[BaseTool])

_TOOLS: Registry[BaseTool | type[BaseTool]] = Registry("tool")


def get_tool(tool: str | BaseTool) -> BaseTool:
    """Return the tool with this name, one object per process, or check a tool object and return it."""
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
            raise ConfigError(f"tool {type(tool).__qualname__} has no {attribute!r}, which the model reads")
    for attribute, kind, lowest, wanted in (
        ("timeout", int | float, math.ulp(0), "positive seconds"),
        ("max_batch", int | None, 1, "an integer of at least 1, or None"),
        ("max_wait", int | float, 0, "seconds, 0 or more"),
    ):
        value = getattr(tool, attribute)
        if not isinstance(value, kind) or (value is not None and not value >= lowest):
            raise ConfigError(f"tool {tool.name!r}: {attribute} must be {wanted}, got {value!r}")
    _ = tool.arguments  # a wrong schema fails here, not in the middle of an episode
    return tool


class FunctionTool(BaseTool):
    """Made by `@tool` from a typed function. Calling the object calls the function."""

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

    async def execute(self, args: dict[str, Any], **context: Any) -> Returned:
        result: Returned = await call(self.function, **args, **context)
        return result


class BatchFunctionTool(BatchTool, FunctionTool):
    """Made by `@tool(batch=True)` from `f(calls: list[Query]) -> list[result]`; Query is a pydantic model."""

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
        return arguments_from_model(self.name, item), RowKeys()

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"item": self.arguments.validate(arguments)}

    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        items = [call.args["item"] for call in calls]
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
    name: str | None = None,  # None: the function's
    timeout: float | None = None,  # None, here and below: the default of BaseTool or BatchTool
    parallel: bool | None = None,
    batch: bool = False,
    max_batch: int | None = None,
    max_wait: float | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool from a typed function: its signature becomes the schema, its docstring the description.

    The calls of one response run one after another; with `parallel=True` consecutive ones may overlap.
    With `batch=True` the function takes a list of a pydantic model, whose fields are the arguments of one call, and
    returns one result per call; a ToolError in the list is the answer to that call.
    """

    def create(function: Callable[..., Any]) -> FunctionTool:
        if not inspect.isroutine(function):  # a partial or an object has no docstring for the model
            raise ConfigError(f"@tool takes a function, got {function!r:.80}. Wrap it in one, or write a BaseTool")
        if _is_method(function):
            raise ConfigError(
                f"@tool needs a function, but {function.__qualname__} is a method. Write a function with FromRow "
                f"parameters, make the class a BaseTool, or use tool(thing.{function.__name__}) on an object"
            )
        if not batch and (max_batch is not None or max_wait is not None):
            raise ConfigError(f"tool {function.__name__!r}: max_batch and max_wait do nothing without batch=True")
        created = (BatchFunctionTool if batch else FunctionTool)(function, name or function.__name__)
        settings = {"timeout": timeout, "parallel": parallel, "max_batch": max_batch, "max_wait": max_wait}
        for attribute, value in settings.items():
            if value is not None:
                setattr(created, attribute, value)
        return created

    return create if function is None else create(function)


def _is_method(function: Callable[..., Any]) -> bool:
    """Whether the function is defined in a class and not bound to an object."""
    owner = function.__qualname__.rpartition(".")[0]
    if not owner or owner.endswith("<locals>"):
        return False
    return next(iter(inspect.signature(function).parameters), None) in ("self", "cls")
