"""Values that are awkward to send back from a worker process."""

from __future__ import annotations

import os
from typing import Any


class Custom(ValueError):
    """Cannot be created from its text: takes two arguments and keeps one."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)


class Bomb:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")
