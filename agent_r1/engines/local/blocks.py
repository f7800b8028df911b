"""Blocks of the cache: how many requests use each, and which tokens each holds.

A block may have several users. A full block can be shared, since it is not written again; a partly filled one can only
be copied. The contents of a block have a name that stands for all tokens of the sequence up to its end, so equal names
mean equal keys and values. A block without users is blank and has no names.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Name = bytes
BLOCK_SIZE = 32  # tokens of a sequence that are cached, and evicted, together
START: Name = b""  # name of the empty sequence


def name_after(before: Name, tokens: Sequence[int]) -> Name:
    """The name of a sequence continued by `tokens`. A cryptographic hash, so equal names mean equal tokens."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def chain_names(before: Name, tokens: Sequence[int], size: int) -> list[Name]:
    """The names of a sequence continued by 1, 2, ... blocks of these tokens; the last block may not be full."""
    data, names = array("q", tokens).tobytes(), [before]
    for start in range(0, len(data), 8 * size):
        names.append(blake2b(names[-1] + data[start : start + 8 * size], digest_size=16).digest())
    return names[1:]


def num_blocks(length: int, block_size: int) -> int:
    """The number of blocks that hold `length` tokens."""
    return -(-length // block_size)


class BlockPool:
    """A fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A heap: taking the lowest block first keeps the blocks in use close together.
        self._blank = list(range(num_blocks))
        self._users = [0] * num_blocks
        self._held: dict[Name, int] = {}
        self._names: dict[int, list[tuple[Name, int]]] = {}  # block -> (name, tokens of the block it covers)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def take(self, count: int) -> list[int]:
        """Take blank blocks for one user."""
        taken = [heapq.heappop(self._blank) for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a user."""
        self._users[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._users[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Remove a user of each block."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self.rewrite(block)
                heapq.heappush(self._blank, block)

    def publish(self, name: Name, block: int, count: int) -> None:
        """Name the sequence that ends with the first `count` tokens of the block, unless the name is taken."""
        if name not in self._held:
            self._held[name] = block
            self._names.setdefault(block, []).append((name, count))

    def find(self, name: Name) -> int | None:
        return self._held.get(name)

    def find_prefix(self, names: Iterable[Name]) -> list[int]:
        """The blocks of the first names, up to one that is not found."""
        blocks = []
        for name in names:
            block = self.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def rewrite(self, block: int, kept: int = 0) -> None:
        """Forget the names that cover more than the first `kept` tokens of the block."""
        names = self._names.pop(block, ())
        if not names:
            return
        for name, count in names:
            if count > kept:
                del self._held[name]
        remaining = [(name, count) for name, count in names if count <= kept]
        if remaining:
            self._names[block] = remaining
