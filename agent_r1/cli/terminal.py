"""How the program prints and how it exits.

Control characters in text from outside (rows, tools, replies, file names) are escaped. If the output is closed or full,
further output is dropped and the program continues. Threads that tools leave behind do not keep the program alive.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from agent_r1.text import visible

EXIT_SECONDS = 2.0  # time for threads of tools to finish


class Interrupted(Exception):
    """A signal stopped the run; `kept` says what was saved and how to continue."""

    def __init__(self, number: int, kept: str) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.kept = kept


class Terminal(Console):
    """A console that escapes all text with `visible`. Only rich's own styles reach the terminal unescaped."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(visible(part.text), part.style) for part in buffer
        )


def tell(line: Text) -> None:
    """Print one line on stderr. Takes a Text, because rich would read [brackets] in a str as markup."""
    Terminal(stderr=True).print(line, soft_wrap=True)


def say(line: str) -> None:
    """Print one line on stdout."""
    Terminal().print(Text(line), soft_wrap=True)


def converse(console: Console, answer: Callable[[str], None]) -> None:
    """Read lines and answer them until /quit, Ctrl-D or Ctrl-C, which also works during an answer."""
    try:
        while True:
            text = console.input("[bold blue]you[/]   ").strip()
            if not sys.stdin.isatty():  # unlike a terminal, a pipe does not echo
                console.print(Text(text), soft_wrap=True)
            if text in ("/quit", "/exit"):
                return
            answer(text)
    except (EOFError, KeyboardInterrupt):
        console.print()  # the shell's prompt starts on its own line


class _Steady(io.TextIOWrapper):
    """A standard stream that never raises. After the first failed write, it drops all output."""

    _is_lost = False

    def write(self, text: str) -> int:
        try:
            return len(text) if self._is_lost else super().write(text)
        except (OSError, ValueError):  # ValueError: the underlying stream was closed
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            if not self._is_lost:
                super().flush()
        except (OSError, ValueError):
            self._lose()

    def close(self) -> None:
        """Only flush: a tool must not close our stream."""
        self.flush()

    def _lose(self) -> None:
        self._is_lost = True
        with suppress(OSError, ValueError):  # send the rest of the buffer to the null device
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


def steady_streams() -> None:
    """Make stdout and stderr never raise, for the program and for user code that prints.

    They use their own descriptors: if a tool closes 1 or 2, the next opened file gets that number and would receive
    our output.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed before the program started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # otherwise a test or library captures it
            below = os.fdopen(os.dup(stream.fileno()), "wb")
            lines = stream.line_buffering
            steady = _Steady(below, encoding=stream.encoding, errors="backslashreplace", line_buffering=lines)
            setattr(sys, name, steady)


def exit_despite_threads(code: int) -> None:
    """Exit soon even if threads of tools hang; Python would wait for every non-daemon thread. Call last."""
    if _foreign_threads():
        threading.Thread(target=_exit_soon, args=(code,), daemon=True).start()


def _exit_soon(code: int) -> None:
    time.sleep(EXIT_SECONDS)
    if left := _foreign_threads():
        tell(Text(f"exiting while threads of tools are still running: {', '.join(left)}"))
        sys.stdout.flush()
        os._exit(code)


def _foreign_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
