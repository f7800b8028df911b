"""Notice user code that blocks the event loop: no time limit can end it, so all episodes would wait.

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
LIBRARY = "code of a library"
POLL = 0.25  # seconds
LONG = 1.0  # shorter ones are not kept


@dataclass(slots=True)
class Pulse:
    """For how long one piece of user code kept all other episodes waiting."""

    beats: int = 0  # of the event loop
    gaps: list[float] = field(default_factory=list)


@asynccontextmanager
async def watched(seconds: float, end: Callable[[str], None]) -> AsyncIterator[Pulse]:
    """Measure how long user code keeps this thread's event loop busy at a time. After `seconds`, call `end` from
    another thread, with the place in that code; it may end the process."""
    pulse, ended, thread = Pulse(), threading.Event(), threading.get_ident()

    async def beat() -> None:
        while True:
            pulse.beats += 1
            await asyncio.sleep(POLL / 4)

    def watch() -> None:
        last: tuple[int, FrameType | None] | None = None
        since, kept = time.monotonic(), False
        while not ended.wait(min(POLL, seconds / 4)):
            episode, place = _user_code(sys._current_frames().get(thread))
            now, seen = time.monotonic(), (pulse.beats, episode)
            if seen != last:  # between two beats, many episodes may have worked for a short time each
                since, last, kept = now, seen, False
            if episode is None or now - since < min(LONG, seconds):
                continue
            if kept:
                pulse.gaps.pop()
            pulse.gaps.append(now - since)
            kept = True
            if now - since > seconds:
                end(place)
                return

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    watcher = threading.Thread(target=watch, name="watch for blocked episodes", daemon=True)
    watcher.start()
    try:
        yield pulse
    finally:
        beating.cancel()
        ended.set()
        watcher.join()


def _user_code(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The episode that is at work, and where: `task.py:11 (Env.step)`. None if none is, as while demonstrations are
    loaded."""
    place = ""
    while frame is not None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if path == Path(guard.__file__) and code.co_qualname == "guarded.<locals>.contained":
            return frame, place or LIBRARY
        is_ours = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "recipes")
        if not place and not is_ours and not guard.is_library(path):
            place = f"{path.name}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return None, ""
