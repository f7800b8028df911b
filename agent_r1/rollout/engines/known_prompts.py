"""Which blocks hold the keys and values of which prompts, so that an equal prompt need not be computed again.

Only whole prompts are known, each by its length, a digest of its tokens and its last block: a session adds one with
every turn, so keeping the tokens would cost the square of what it holds. The digest is a cryptographic one, so equal
digests mean equal tokens. A prompt is forgotten when its last block is given back or rewritten; the blocks before it
are never given back earlier. Nothing here owns a block or keeps one from being freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Prompt:
    """What stands for a prompt; equal ones stand for equal tokens."""

    length: int
    digest: bytes

    @staticmethod
    def of(tokens: Sequence[int]) -> Prompt:
        return Prompt(len(tokens), blake2b(array("q", tokens).tobytes(), digest_size=32).digest())


class KnownPrompts:
    """Prompts whose keys and values can be copied."""

    def __init__(self) -> None:
        self._last_block: dict[Prompt, int] = {}
        self._ending: dict[int, list[Prompt]] = {}  # block -> the prompts whose last one it is
        self._before: dict[int, int | None] = {}  # block -> the one before it, where a prompt uses it

    def add(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """`blocks` hold this prompt and nothing more. Of several holders the first is known."""
        if prompt not in self._last_block:
            self._last_block[prompt] = blocks[-1]
            self._ending.setdefault(blocks[-1], []).append(prompt)
            self._before.update(zip(blocks, (None, *blocks[:-1]), strict=True))

    def find(self, prompt: Prompt) -> list[int] | None:
        """The blocks that hold it, in order."""
        block = self._last_block.get(prompt)
        blocks: list[int] = []
        while block is not None:
            blocks.append(block)
            block = self._before[block]
        return blocks[::-1] or None

    def rewritten(self, block: int, kept: int = 0) -> None:
        """Of the sequence that the block belongs to, it holds only the first `kept` tokens any more."""
        for prompt in self._ending.pop(block, []):
            if prompt.length <= kept:
                self._ending.setdefault(block, []).append(prompt)
            else:
                del self._last_block[prompt]
