"""Notice user code that blocks the event loop: no time limit can end it, so doctor would wait forever.

Not covered: C code that holds the interpreter's lock, since no other thread runs either.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from agent_r1 import guard

_PACKAGE = Path(guard.__file__).parent
BEAT = 0.05  # seconds


@dataclass(slots=True)
class Pulse:
    """How long all other episodes were blocked."""

    last: float = field(default_factory=time.monotonic)
    gaps: list[float] = field(default_factory=list)  # of at least a second

    def beat(self) -> None:
        now = time.monotonic()
        if (gap := now - self.last - BEAT) >= 1.0:
            self.gaps.append(gap)
        self.last = now


@asynccontextmanager
async def watched(seconds: float, end: Callable[[str], None]) -> AsyncIterator[Pulse]:
    """Measure how long this thread's event loop is kept busy at a time. If user code does so for longer than `seconds`,
    call `end` from another thread, with the place in that code; it should end the process."""
    pulse, ended, thread = Pulse(), threading.Event(), threading.get_ident()

    async def beat() -> None:
        while True:
            pulse.beat()
            await asyncio.sleep(BEAT)

    def watch() -> None:
        while not ended.wait(min(1.0, seconds / 4)):
            if time.monotonic() - pulse.last > seconds and (place := _user_code(sys._current_frames().get(thread))):
                end(place)
                return

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    watcher = threading.Thread(target=watch, name="watch for blocked episodes", daemon=True)
    watcher.start()
    try:
        yield pulse
    finally:
        await asyncio.sleep(2 * BEAT)  # the last beat
        beating.cancel()
        ended.set()
        watcher.join()


def _user_code(frame: FrameType | None) -> str | None:
    """Where user code is at work, as `task.py:11 (Env.step)`; None if none is, as while demonstrations are loaded."""
    place, is_guarded = "", False
    while frame is not None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        is_guarded |= path == Path(guard.__file__) and code.co_qualname == "guarded.<locals>.contained"
        is_ours = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "recipes")
        if not place and not is_ours and not guard.is_library(path):
            place = f"{path.name}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return (place or "code of a library") if is_guarded else None
