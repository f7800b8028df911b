"""What the program prints, and how it ends.

Text from outside (rows, tools, replies, file names) is shown and never obeyed. Output that nobody takes any more (a
closed pipe, a full disk) is dropped and stops nothing. Threads that tools leave behind do not keep the program alive.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

EXIT_SECONDS = 2.0  # for threads of tools to end by themselves
# Control characters but tab and newline, marks that reorder or break lines, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Text fit for a terminal: what would move the cursor, change colours or fool the eye is shown as `\x1b`."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


class Terminal(Console):
    """A console that makes all text it prints `visible`. Only rich's own styles reach the terminal as they are."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(visible(part.text), part.style) for part in buffer
        )


def tell(line: Text) -> None:
    """One line on stderr. A Text, because rich would read [brackets] in a str as markup."""
    Terminal(stderr=True).print(line, soft_wrap=True)


class _Steady(io.TextIOWrapper):
    """A standard stream that never raises. Once something cannot be written, nothing more is."""

    _is_lost = False

    def write(self, text: str) -> int:
        try:
            return len(text) if self._is_lost else super().write(text)
        except (OSError, ValueError):  # ValueError: somebody closed what is below
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            if not self._is_lost:
                super().flush()
        except (OSError, ValueError):
            self._lose()

    def close(self) -> None:
        """Ours to close, not a tool's."""
        self.flush()

    def _lose(self) -> None:
        self._is_lost = True
        with suppress(OSError, ValueError):  # what is still buffered goes where it fails no more
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


def steady_streams() -> None:
    """Let nothing that happens to stdout and stderr fail the program, or whoever prints in it.

    They write to descriptors of their own: after a tool has closed 1 or 2, the next file that is opened gets that
    number, and would get our lines.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # it was closed when the program started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # else somebody captures it
            below = os.fdopen(os.dup(stream.fileno()), "wb")
            lines = stream.line_buffering
            steady = _Steady(below, encoding=stream.encoding, errors="backslashreplace", line_buffering=lines)
            setattr(sys, name, steady)


def exit_despite_threads(code: int) -> None:
    """Call last. Python waits for every thread that is not a daemon; after a moment the program ends all the same."""
    if _foreign_threads():
        threading.Thread(target=_exit_soon, args=(code,), daemon=True).start()


def _exit_soon(code: int) -> None:
    time.sleep(EXIT_SECONDS)
    if left := _foreign_threads():
        tell(Text(f"exiting although threads of tools still run: {', '.join(left)}"))
        sys.stdout.flush()
        os._exit(code)


def _foreign_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
