"""What is awkward to send to another process, or to have back from one."""

from __future__ import annotations

from typing import Any

from agent_r1.types import Transition


class Custom(Exception):
    """Takes two arguments and remembers one, so it cannot be unpickled."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)


class Unreadable:
    """Can be pickled, and not be read again."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _refuse, (self.error,)


def _refuse(error: BaseException) -> None:
    raise error


class Disguised(Transition):
    """Read again as something else."""

    def __reduce__(self) -> Any:
        return str, ("a word",)


class Twin(Exception):
    """Read again as what looks like it and is no exception."""

    def __reduce__(self) -> Any:
        return _twin, ()


def _twin() -> object:
    return type("Twin", (), {"__str__": lambda self: ""})()


class Once(str):
    """Can be sent once, and then no more."""

    __slots__ = ("was_sent",)

    def __reduce__(self) -> Any:
        if hasattr(self, "was_sent"):
            raise TypeError("once is enough")
        self.was_sent = True
        return str, (str(self),)
