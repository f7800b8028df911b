"""Which blocks hold the keys and values of which prompts, so that an equal prompt need not be computed again.

Only whole prompts are known, by all their tokens. A prompt is forgotten when its last block is given back or rewritten;
the blocks before it are never given back earlier. Nothing here owns a block or keeps one from being freed.
"""

from __future__ import annotations

Prompt = tuple[int, ...]


class KnownPrompts:
    """Prompts whose keys and values can be copied."""

    def __init__(self) -> None:
        self._blocks: dict[Prompt, list[int]] = {}
        self._ending: dict[int, list[Prompt]] = {}  # block -> the prompts whose last one it is

    def add(self, prompt: Prompt, blocks: list[int]) -> None:
        """`blocks` hold this prompt and nothing more. Of several holders the first is known."""
        if prompt not in self._blocks:
            self._blocks[prompt] = blocks
            self._ending.setdefault(blocks[-1], []).append(prompt)

    def find(self, prompt: Prompt) -> list[int] | None:
        return self._blocks.get(prompt)

    def rewritten(self, block: int, kept: int = 0) -> None:
        """Of the sequence that the block belongs to, it holds only the first `kept` tokens any more."""
        for prompt in self._ending.pop(block, []):
            if len(prompt) <= kept:
                self._ending.setdefault(block, []).append(prompt)
            else:
                del self._blocks[prompt]
