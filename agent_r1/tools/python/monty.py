"""Workers of `pydantic-monty`: each is a process that interprets a subset of Python without system calls.

Only text leaves the worker, never values: a nested list that takes a kilobyte there could expand to any size here,
where no limit applies. So if the last line is an expression, it is rewritten to print its value.
"""

from __future__ import annotations

import ast
import time
import warnings
from contextlib import ExitStack
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.tools.python.inside.runner import MAX_ERROR_CHARS, MAX_FRAMES
from agent_r1.tools.python.limits import KilledBy, Limits, Outcome
from agent_r1.tools.python.zygote import Wish

MIB = 1 << 20
FILE = "<python>"
LAST = "__last__"
KEEP = f"{LAST} = ("
SHOW = f"if {LAST} is not None: print(repr({LAST}))"
NO_VALUE = "\n\nNone"  # replaces the value that would be sent here; two newlines, as the code may end in a backslash


class MontyBackend:
    def __init__(self, limits: Limits) -> None:
        try:
            import pydantic_monty
        except ImportError:
            raise ConfigError("the package pydantic-monty is not installed") from None
        # Warnings about the model's code do not belong on the terminal.
        warnings.filterwarnings("ignore", module=FILE)
        self._limits = limits
        self._stack = ExitStack()
        pool = pydantic_monty.Monty(max_processes=4096, request_timeout=limits.seconds + 2.0)
        self._pool = self._stack.enter_context(pool)

    def open(self, *, session: bool) -> MontyRun:
        return MontyRun(self._pool, self._limits)

    def close(self) -> None:
        self._stack.close()


class _TooLong(Exception):
    """The code printed more than the limit."""


class _Printed:
    """Collects printed text up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.text = ""
        self.too_long = False

    def __call__(self, stream: str, text: str) -> None:
        room = self._limit - len(self.text)
        self.text += text[:room]
        if len(text) > room:
            self.too_long = True
            raise _TooLong


class MontyRun:
    """A worker. It cannot be killed from here, but never runs longer than the time limit."""

    def __init__(self, pool: Any, limits: Limits) -> None:
        self._limits = limits
        self._usable = True
        self._stack = ExitStack()
        bounds = {
            "max_feed_duration_secs": limits.seconds,
            "max_memory": limits.memory_mb * MIB,
            "max_total_sleep_secs": limits.seconds,
        }
        self._session = self._stack.enter_context(
            pool.checkout(limits=bounds, os_policy={"random_start": {"seed": 0}}, script_name=FILE)
        )

    @property
    def usable(self) -> bool:
        return self._usable

    def call(self, code: str, wish: Wish) -> Outcome:
        import pydantic_monty

        began = time.monotonic()
        printed = _Printed(self._limits.output_chars)
        error: str | None = None
        killed_by: KilledBy | None = None
        try:
            self._session.feed_run(show_last(code), print_callback=printed)
        except _TooLong:
            pass
        except (RecursionError, MemoryError):  # from `show_last`; errors in the worker arrive as monty errors
            error = "SyntaxError: the code is nested too deeply"
        except pydantic_monty.MontyCrashedError as failure:
            killed_by, error = KilledBy.TIME if failure.timed_out else KilledBy.SIGNAL, str(failure)
        except pydantic_monty.MontySyntaxError as failure:
            error = failure.display()[-MAX_ERROR_CHARS:]
        except pydantic_monty.MontyRuntimeError as failure:
            error = explain(failure)
            if "\nTimeoutError" in f"\n{error}":  # from the time limit or raised by the code: both end the run
                killed_by, error = KilledBy.TIME, f"stopped: it ran for more than {self._limits.seconds:g} s"
        if printed.too_long:
            killed_by, error = KilledBy.OUTPUT, f"stopped: it printed more than {self._limits.output_chars} characters"
        self._usable = killed_by is None
        return Outcome(stdout=printed.text, error=error, seconds=time.monotonic() - began, killed_by=killed_by)

    def kill(self) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._usable = False
        self._stack.close()


def show_last(code: str) -> str:
    """Rewrite the program to print the value of a last line that is an expression. Line numbers stay the same."""
    source = code.encode("utf-8", errors="replace").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    text = source.decode()
    try:
        body = ast.parse(text, FILE).body
    except (SyntaxError, ValueError):  # monty reports the error, or supports newer syntax than this Python
        return text + NO_VALUE
    if not body or not isinstance(body[-1], ast.Expr):
        return text + NO_VALUE
    last = body[-1]
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    starts = [0]  # of lines, in bytes, as the parser counts
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    start, end = starts[last.lineno - 1] + last.col_offset, starts[last.end_lineno - 1] + last.end_col_offset
    return f"{source[:start].decode()}{KEEP}{source[start:end].decode()})\n{SHOW}{NO_VALUE}"


def explain(failure: Any) -> str:
    """The last frames of the code and the error, in the format of the other levels."""
    frames = []
    for frame in failure.traceback()[-MAX_FRAMES:]:
        line = (frame.source_line or "").strip()
        if line == SHOW:
            continue
        if KEEP in line:
            line = line.replace(KEEP, "", 1).removesuffix(")")
        frames.append(f'  File "{frame.filename}", line {frame.line}, in {frame.function_name}\n    {line}\n')
    head = "Traceback (most recent call last):\n" if frames else ""
    return f"{head}{''.join(frames)[:MAX_ERROR_CHARS]}{failure.display('type-msg')[:MAX_ERROR_CHARS]}"
