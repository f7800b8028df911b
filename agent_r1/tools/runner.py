"""Run tool calls: validate the arguments, keep the timeout, turn errors into text, batch concurrent calls.

Mistakes of the model and refusals of the tool become text. A bug of the tool propagates and fails the episode. Knows
nothing about call formats, episodes or tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from numbers import Number
from typing import Any

from agent_r1.batching import Batcher
from agent_r1.errors import DataError
from agent_r1.guard import TimedOut, guarded
from agent_r1.tools.base import BaseTool, ToolCall, ToolError, ToolResult
from agent_r1.tools.schema import BadArguments
from agent_r1.types import CallFault
from agent_r1.vision.pictures import MAX_PER_MESSAGE, Picture, as_picture, check_all


class _TimedOut(ToolError):
    """Our timeout, not a ToolError of the tool. A batch that timed out is not retried one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The outcome of one call."""

    text: str  # what the model reads
    reward: float = 0.0
    fault: CallFault | None = None
    seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @property
    def error(self) -> str | None:
        return None if self.fault is None else self.text

    @property
    def refused(self) -> bool:
        """Whether the call was bad, so the tool never ran."""
        return self.fault not in (None, "failed")


async def run_tool(tool: BaseTool, arguments: Mapping[str, Any], context: Mapping[str, Any]) -> ToolOutcome:
    """Validate the arguments and run the call under its timeout. Any exception but ToolError propagates.

    `context` comes from the row, never from the model.
    """
    row_values = tool.row_keys.select(tool.name, context)
    try:
        call = ToolCall(args=tool.validate(arguments), context=row_values)
    except BadArguments as error:
        return ToolOutcome(text=str(error), fault="bad_arguments")
    start = time.perf_counter()
    try:
        if type(tool).batch_execute is BaseTool.batch_execute:
            returned: Any = await _timed(tool, tool.execute, call.args, **call.context)
        else:
            returned = await _run_batched(tool, call)
            if isinstance(returned, BaseException):
                raise returned
    except ToolError as error:
        return ToolOutcome(text=str(error), fault="failed", seconds=time.perf_counter() - start)
    result = _as_result(tool.name, returned)
    try:
        pictures = await asyncio.to_thread(_read_pictures, result.images) if result.images else ()
    except DataError as error:  # a tool may pass on what it found somewhere
        return ToolOutcome(text=str(error), fault="failed", seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return ToolOutcome(
        text=result.text, reward=result.reward or 0.0, seconds=seconds, info=result.info, pictures=pictures
    )


def _read_pictures(images: Sequence[Any]) -> tuple[Picture, ...]:
    if len(images) > MAX_PER_MESSAGE:
        raise DataError(f"the tool returned {len(images)} pictures; at most {MAX_PER_MESSAGE} are accepted")
    pictures = tuple(as_picture(image, what=f"picture {index} of the result") for index, image in enumerate(images))
    check_all(pictures)  # now, so that a damaged file is this call's error
    return pictures


def _as_result(tool: str, returned: Any) -> ToolResult:
    if isinstance(returned, ToolResult):
        return returned
    if isinstance(returned, str | Number):
        return ToolResult(str(returned))
    raise TypeError(
        f"tool {tool!r} returned {type(returned).__name__}; return text (json.dumps for data), a number or a ToolResult"
    )


async def _timed(tool: BaseTool, method: Callable[..., Any], *args: Any, **context: Any) -> Any:
    async def run() -> Any:
        running = method(*args, **context)
        if not isawaitable(running):
            raise TypeError(
                f"tool {tool.name!r}: `execute` and `batch_execute` must be `async def`; use asyncio.to_thread for "
                "blocking code"
            )
        return await running

    try:
        return await guarded(run(), seconds=tool.timeout)
    except TimedOut:
        raise _TimedOut(f"tool {tool.name!r} did not answer within {tool.timeout:g} s") from None


_BATCHERS: dict[tuple[asyncio.AbstractEventLoop, int], Batcher[ToolCall, Any]] = {}  # by loop and id of the tool


async def _run_batched(tool: BaseTool, call: ToolCall) -> Any:
    """Run a call together with the concurrent calls of its tool."""
    key = (asyncio.get_running_loop(), id(tool))  # the batcher holds the tool, so its id stays taken
    batcher = _BATCHERS.get(key)
    if batcher is None:
        run = partial(_run_batch, tool)
        batcher = _BATCHERS[key] = Batcher(run, max_items=tool.max_batch, max_wait=tool.max_wait)
    try:
        return await batcher.submit(call)
    finally:
        if not batcher.num_unanswered:
            _BATCHERS.pop(key, None)


async def _run_batch(tool: BaseTool, calls: list[ToolCall]) -> Sequence[Any]:
    try:
        results: Sequence[Any] = await _timed(tool, tool.batch_execute, calls)
        if not isinstance(results, list | tuple) or len(results) != len(calls):
            raise TypeError(
                f"batch tool {tool.name!r} must return a list of {len(calls)} results, one per call; "
                f"got {type(results).__name__} {str(results)[:80]}"
            )
    except _TimedOut:
        raise
    except Exception:
        if len(calls) == 1:
            raise
        # Any of the calls may have broken the batch: run each alone, so that it fails only itself.
        alone = await asyncio.gather(*(_run_batch(tool, [call]) for call in calls), return_exceptions=True)
        return [result if isinstance(result, BaseException) else result[0] for result in alone]
    return results
