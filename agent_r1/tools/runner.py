"""The one way a tool call is run: arguments checked, timeout kept, errors turned into text, concurrent calls batched.

What the model did wrong and what the tool refuses become text; a bug of the tool propagates, and the flow makes a
failed episode of it. Not known here: call formats, episodes, tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from numbers import Number
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.guard import TimedOut, guarded
from agent_r1.tools.base import BaseTool, ToolCall, ToolError, ToolResult
from agent_r1.tools.schema import BadArguments


class _TimedOut(ToolError):
    """Told apart from the tool's own ToolError, so that a batch which hung is not tried again call by call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of one call."""

    text: str  # for the model
    reward: float = 0.0
    error: str | None = None  # what went wrong, as told to the model
    refused: bool = False  # the arguments were bad, so the tool never ran
    seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


async def run_tool(tool: BaseTool, arguments: Mapping[str, Any], context: Mapping[str, Any]) -> ToolOutcome:
    """Check the arguments, run the call under its timeout, and say what came of it.

    `context` is filled in by the row, never by the model. A bug of the tool (any exception but ToolError) propagates.
    """
    row_values = tool.row_keys.select(tool.name, context)
    try:
        call = ToolCall(args=tool.validate(arguments), context=row_values)
    except BadArguments as error:
        return ToolOutcome(text=str(error), error=str(error), refused=True)
    start = time.perf_counter()
    try:
        if type(tool).batch_execute is BaseTool.batch_execute:
            returned: Any = await _timed(tool, tool.execute, call.args, **call.context)
        else:
            returned = await _batcher(tool).submit(call)
            if isinstance(returned, BaseException):
                raise returned
    except ToolError as error:
        return ToolOutcome(text=str(error), error=str(error), seconds=time.perf_counter() - start)
    result = _as_result(tool.name, returned)
    seconds = time.perf_counter() - start
    return ToolOutcome(text=result.text, reward=result.reward or 0.0, seconds=seconds, info=result.info)


def _as_result(tool: str, returned: Any) -> ToolResult:
    if isinstance(returned, ToolResult):
        return returned
    if isinstance(returned, str | Number):
        return ToolResult(str(returned))
    raise TypeError(
        f"tool {tool!r} returned {type(returned).__name__}; "
        "return a str, a number or a ToolResult (json.dumps makes text of data)"
    )


async def _timed(tool: BaseTool, method: Callable[..., Any], *args: Any, **context: Any) -> Any:
    async def run() -> Any:
        running = method(*args, **context)
        if not isawaitable(running):
            raise TypeError(
                f"tool {tool.name!r}: execute and batch_execute of a class must be `async def`; asyncio.to_thread runs "
                "what blocks"
            )
        return await running

    try:
        return await guarded(run(), seconds=tool.timeout)
    except TimedOut:
        raise _TimedOut(f"tool {tool.name!r} did not answer within {tool.timeout:g} s") from None


IDLE_ROUNDS = 5  # an episode needs a few rounds of the loop from its observation to its next call


class _Batcher:
    """Gathers the concurrent calls of one tool in one event loop into `batch_execute` calls, in the order they came."""

    def __init__(self, tool: BaseTool) -> None:
        self._tool = tool
        self._waiting: list[tuple[ToolCall, asyncio.Future[Any]]] = []
        self._flush_later: asyncio.Handle | None = None

    async def submit(self, call: ToolCall) -> Any:
        """What the tool returned for this call; an exception that is its result is returned, not raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((call, future))
        if len(self._waiting) == self._tool.max_batch:
            self._flush()
        elif len(self._waiting) == 1 and self._tool.max_wait > 0:
            self._flush_later = loop.call_later(self._tool.max_wait, self._flush)
        elif len(self._waiting) == 1:
            self._flush_later = loop.call_soon(self._round, 1, 0)
        return await future

    def _round(self, seen: int, quiet: int) -> None:
        quiet = quiet + 1 if len(self._waiting) == seen else 0
        if quiet == IDLE_ROUNDS:
            self._flush()
        else:
            self._flush_later = asyncio.get_running_loop().call_soon(self._round, len(self._waiting), quiet)

    def _flush(self) -> None:
        if self._flush_later is not None:
            self._flush_later.cancel()
            self._flush_later = None  # it refers to the loop, which must be free to go
        _forget(self._tool)  # nothing waits any more; the next call makes a new batcher
        batch = [(call, future) for call, future in self._waiting if not future.done()]
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            _RUNNING.add(task)
            task.add_done_callback(_RUNNING.discard)

    async def _run(self, batch: list[tuple[ToolCall, asyncio.Future[Any]]]) -> None:
        results = await self._results([call for call, _ in batch])
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _results(self, calls: list[ToolCall]) -> Sequence[Any]:
        try:
            results: Sequence[Any] = await _timed(self._tool, self._tool.batch_execute, calls)
            if not isinstance(results, list | tuple) or len(results) != len(calls):
                raise TypeError(
                    f"batch tool {self._tool.name!r} must return a list of {len(calls)} results, one per call; "
                    f"got {type(results).__name__} {str(results)[:80]}"
                )
        except _TimedOut as error:
            return [error] * len(calls)
        except Exception as error:  # noqa: BLE001 (raised again by the call it belongs to)
            if len(calls) == 1:
                return [error]
            # Which call broke the batch is not known: run each alone, so that one cannot fail the others.
            return [result for part in await asyncio.gather(*(self._results([c]) for c in calls)) for result in part]
        return results


_RUNNING: set[asyncio.Task[None]] = set()  # an event loop itself holds tasks only weakly
_BATCHERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Batcher]] = WeakKeyDictionary()


def _batcher(tool: BaseTool) -> _Batcher:
    of_loop = _BATCHERS.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault(id(tool), _Batcher(tool))  # the batcher holds the tool, so its id stays taken


def _forget(tool: BaseTool) -> None:
    _BATCHERS[asyncio.get_running_loop()].pop(id(tool), None)
