"""A run in a single process: the only rank, and the work that all ranks would do together.

`rank_crew.py` has the same two classes for one rank of several. Every rank must make the same calls in the same order.
Imports no torch, so that a misspelt setting is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import distributed

T = TypeVar("T")


class OneProcess:
    """The only rank."""

    rank: int = 0
    size: int = 1
    objects: distributed.ProcessGroup | None = None  # the group that objects travel through

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and talks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return value


class Crew:
    """The only process of a run."""

    def __init__(self) -> None:
        self.ranks = OneProcess()
        self.run: Path | None = None  # its directory, for messages

    async def all(self, part: Coroutine[Any, Any, T]) -> list[T]:
        """Do this rank's part, and return the results of all ranks in rank order.

        If a rank failed or was asked to stop, every rank raises, so that all of them continue at the same point."""
        return [await part]

    def counter(self) -> Callable[[int], int]:
        """Return a function that adds to a number that all ranks share, and returns the sum."""
        total = 0

        def add(amount: int) -> int:
            nonlocal total
            total += amount
            return total

        return add

    def share(self, rows: int) -> int | None:
        """How many rows a rank may hold at once; None: all of them."""
        return None

    def is_common(self, error: BaseException) -> bool:
        """Whether every rank has raised this error at the same point, so that they can still save together."""
        return True

    def main_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on this rank. Rank 0 goes first, so that others find its files."""
        return make()
