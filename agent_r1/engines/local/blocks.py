"""Blocks of the cache: who uses them, and what they hold that others could use too.

A block may have several users. A full one is shared as it is, since nobody writes to it again; one that is partly
filled can only be copied. What a block holds is known by a name that stands for all tokens of the sequence up to its
end, so equal names mean equal keys and values. A block that nobody uses is blank: names go with the last user.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Name = bytes
START: Name = b""  # of the empty sequence


def name_after(before: Name, tokens: Sequence[int]) -> Name:
    """The name of a sequence that goes on with `tokens`. Cryptographic, so equal names mean equal tokens."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """A fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A heap, so that the lowest block is taken first and the blocks in use stay close together.
        self._blank = list(range(num_blocks))
        self._users = [0] * num_blocks
        self._held: dict[Name, int] = {}
        self._names: dict[int, list[tuple[Name, int]]] = {}  # block -> what it is known as, with how many of its tokens

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def take(self, count: int) -> list[int]:
        """Blank blocks for one user."""
        taken = [heapq.heappop(self._blank) for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more user."""
        self._users[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._users[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less, of each."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self.rewritten(block)
                heapq.heappush(self._blank, block)

    def publish(self, name: Name, block: int, count: int) -> None:
        """The first `count` tokens of the block end the sequence `name`. Of several holders the first is known."""
        if name not in self._held:
            self._held[name] = block
            self._names.setdefault(block, []).append((name, count))

    def find(self, name: Name) -> int | None:
        return self._held.get(name)

    def rewritten(self, block: int, kept: int = 0) -> None:
        """Only the first `kept` tokens of the block are what they were."""
        names = self._names.pop(block, [])
        for name, count in names:
            if count > kept:
                del self._held[name]
        remaining = [(name, count) for name, count in names if count <= kept]
        if remaining:
            self._names[block] = remaining
