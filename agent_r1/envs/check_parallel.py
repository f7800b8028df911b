"""Check that tools declared `parallel` are safe to overlap (part of `check_env`).

The calls of an episode are played in order and then overlapping; the results and the row's values must be the same.
Threads of sync tools alternate after every instruction, so that an update that could be lost is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.guard import is_library
from agent_r1.types import ToolCallRecord

QUIET_SECONDS = 0.1  # wait for further threads before the first one continues
STALL_SECONDS = 0.05  # a thread without progress for this long waits for a lock or is inside a library
MAX_STEPS = 2000  # interleaved instructions per thread, so that a long computation does not hit the tool's timeout
_PACKAGE = Path(__file__).parents[1]
_OURS = [_PACKAGE / part for part in ("envs", "flows", "tokens", "tools/base.py", "tools/runner.py", "guard.py")]

State = dict[str, Any]  # the row's values; keys describe a value and its tool
Calls = Sequence[Sequence[ToolCallRecord]]  # the calls of each step


class _Turns:
    """Runs threads in lockstep: each executes one instruction, then waits for the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: dict[int, int] = {}  # instructions executed, by thread
        self._stalled: set[int] = set()  # the others do not wait for these until they make progress
        self._last_arrival = 0.0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For `threading.settrace`: called with every new frame of a thread."""
        file = frame.f_code.co_filename
        if is_library(file) or any(map(Path(file).is_relative_to, _OURS)):
            return None
        me, outermost = threading.get_ident(), threading.get_ident() not in self._steps
        if outermost:
            self._arrive(me)

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and self._steps[me] < MAX_STEPS:
                self._step(me)
            if event == "return" and outermost:
                self._leave(me)
            return step

        frame.f_trace_opcodes = True
        return step

    def _arrive(self, me: int) -> None:
        with self._changed:
            self._steps[me], self._last_arrival = 0, time.monotonic()
            while (left := self._last_arrival + QUIET_SECONDS - time.monotonic()) > 0:
                self._changed.wait(left)

    def _step(self, me: int) -> None:
        with self._changed:
            self._steps[me] = max(self._steps.values()) if me in self._stalled else self._steps[me] + 1
            self._stalled.discard(me)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._behind(me), STALL_SECONDS):
                self._stalled |= self._behind(me)

    def _behind(self, me: int) -> set[int]:
        return {each for each, steps in self._steps.items() if steps < self._steps[me]} - self._stalled

    def _leave(self, me: int) -> None:
        with self._changed:
            del self._steps[me]
            self._stalled.discard(me)
            self._changed.notify_all()


@contextmanager
def interleave_threads() -> Iterator[None]:
    """Let threads started in this context alternate after every instruction of the tools' own code."""
    before = threading.gettrace()
    threading.settrace(_Turns().trace)
    try:
        yield
    finally:
        threading.settrace(before)


def find_overlapping(calls: Calls, parallel: frozenset[str]) -> list[str]:
    """Return the parallel tools whose calls could overlap: two or more such calls in one step."""
    steps = [[call.name for call in step if call.name in parallel] for step in calls]
    return sorted({name for step in steps if len(step) > 1 for name in step})


def find_difference(
    calls: Calls, parallel_calls: Calls, states: Sequence[State], parallel_states: Sequence[State]
) -> str | None:
    """Compare a sequential play with a parallel one: results of calls, then the tool states at the end."""
    for index, (one, other) in enumerate(zip(calls, parallel_calls, strict=False)):
        for place, (first, second) in enumerate(zip(one, other, strict=False)):
            if first.result != second.result:
                results = f"{second.result[:100]!r} in parallel and {first.result[:100]!r} in order"
                return f"call {place} of step {index} ({first.name}) returns {results}"
    begin, end = states
    parallel_begin, parallel_end = parallel_states
    for key, value in end.items():
        if begin[key] == value and parallel_begin[key] == parallel_end[key]:
            continue  # neither play changed it, so the plays may differ, for example in the name of a session
        if begin[key] != parallel_begin[key]:
            return f"{key} is shared by episodes: create a new one for each env"
        if value != parallel_end[key]:
            return f"{key} ends as {str(parallel_end[key])[:100]} in parallel and as {str(value)[:100]} in order"
    return None


def copy_state(env: AgentEnv) -> State:
    """Copy the row's values of a ToolEnv into comparable ones."""
    state = env.state if isinstance(env, ToolEnv) else {}
    return {
        f"{key!r} of tool {tool!r}": _to_plain(value) for tool, values in state.items() for key, value in values.items()
    }


def _to_plain(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Copy a value; objects become their attributes, if they have any."""
    if id(value) in inside:
        return "..."
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {key: _to_plain(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, inside) for item in value]
    if isinstance(value, set | frozenset):
        return set(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return (
        {type(value).__name__: _to_plain(vars(value), inside)} if hasattr(value, "__dict__") else type(value).__name__
    )
