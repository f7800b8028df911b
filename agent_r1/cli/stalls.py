"""Who keeps the event loop waiting: an env that blocks in the process of the run holds up every other episode, and no
time limit can end it there."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from agent_r1.envs.base import AgentEnv, ask

BLOCKED_SECONDS = 20.0


@contextmanager
def blocking_told(
    loop: asyncio.AbstractEventLoop, tell: Callable[[str], None], seconds: float = BLOCKED_SECONDS
) -> Iterator[None]:
    """Around a run of `loop` by this thread. Told once, by another thread: this one is busy."""
    watched, over = threading.get_ident(), threading.Event()
    heard = time.monotonic()

    def beat() -> None:
        nonlocal heard
        heard = time.monotonic()
        loop.call_later(1.0, beat)

    def watch() -> None:
        while not over.wait(min(1.0, seconds / 4)):
            if time.monotonic() - heard > seconds and (place := env_at_work(sys._current_frames().get(watched))):
                tell(
                    f"{place} blocks: nothing else has run for {seconds:.0f} s, and no time limit can end it here. "
                    "task.workers.processes=4 plays envs in processes of their own"
                )
                return

    loop.call_soon(beat)
    watcher = threading.Thread(target=watch, name="watch for blocking envs", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def env_at_work(frame: FrameType | None) -> str | None:
    """The method of an env that this frame was called by, and where in its file it is; None if there is none. Learning
    may take as long, and is no reason to say anything."""
    frames: list[FrameType] = []
    while frame is not None and frame.f_code is not ask.__code__:
        frames.append(frame)
        frame = frame.f_back
    if frame is None:
        return None
    env, method = frame.f_locals.get("env"), frame.f_locals.get("method")
    assert isinstance(env, AgentEnv)  # `ask` has no other
    file = getattr(sys.modules.get(type(env).__module__), "__file__", None)
    lines = [each.f_lineno for each in frames if each.f_code.co_filename == file]
    return f"{type(env).__name__}.{method}" + (f" ({Path(file).name}, line {lines[0]})" if file and lines else "")
