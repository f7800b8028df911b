"""What is awkward to send to another process, or to have back from one."""

from __future__ import annotations

import os
from typing import Any

from agent_r1.types import Transition


class Custom(ValueError):
    """Takes two arguments and remembers one, so it cannot be made again of what it says."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Longer(Transition):
    """More than a transition."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Once(str):
    """Can be sent once, and then no more."""

    __slots__ = ("was_sent",)

    def __reduce__(self) -> Any:
        if hasattr(self, "was_sent"):
            raise TypeError("once is enough")
        self.was_sent = True
        return str, (str(self),)
