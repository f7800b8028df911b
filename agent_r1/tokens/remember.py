"""Results of pure functions, kept while they are likely to be asked for again. Knows nothing about what they mean."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")

MAX_RECENT = 256  # results kept of each step of the work: members of a group often see, say and are told the same
MAX_KEPT = 65_536  # characters such a result may be made from, an id counting as four: long ones are seldom shared


def remembering(
    function: Callable[..., Result], *, recent: int = MAX_RECENT, longest: int = MAX_KEPT
) -> Callable[..., Result]:
    """`function`, computed once for arguments that come again soon, unless they are long."""
    remembered = lru_cache(recent)(function)

    def call(*arguments: Hashable) -> Result:
        return remembered(*arguments) if sum(map(_size, arguments)) <= longest else function(*arguments)

    return call


def _size(argument: Hashable) -> int:
    """In characters; an id counts as four."""
    if isinstance(argument, str):
        return len(argument)
    if not isinstance(argument, tuple):
        return 0
    return sum(map(len, argument)) if argument and isinstance(argument[0], str) else 4 * len(argument)
