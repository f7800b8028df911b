"""Which rows this process plays: rows of a step, or an endless stream, claimed one at a time.

Rows are numbered by tickets. A ticket is a row's position in the step or stream over all ranks, and every ticket is
claimed once. Does not know how rows are played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from agent_r1.types import TaskRow


@dataclass(kw_only=True)
class RowQueue:
    """Rows to claim. `next_ticket` returns 0, 1, 2, ... and never the same number twice, on whichever rank."""

    row_of: Callable[[int], TaskRow | None]  # None: neither this ticket nor a later one exists
    next_ticket: Callable[[], int]
    share: int | None = None  # rows that a process may hold at once, so that others get some too; None: no limit
    _ended: bool = False

    @classmethod
    def of(
        cls,
        rows: Sequence[TaskRow],
        next_ticket: Callable[[], int] | None = None,
        share: int | None = None,
        *,
        first: int = 0,
    ) -> RowQueue:
        """Return a queue of the rows; by default, this process claims all of them. `first` is the first ticket."""

        def row_of(ticket: int) -> TaskRow | None:
            return rows[ticket - first] if ticket - first < len(rows) else None

        return cls(row_of=row_of, next_ticket=next_ticket or count(first).__next__, share=share)

    def claim(self) -> tuple[int, TaskRow] | None:
        """Return the next ticket and its row, or None if no row is left."""
        if self._ended:
            return None
        ticket = self.next_ticket()
        row = self.row_of(ticket)
        self._ended = row is None
        return None if row is None else (ticket, row)
