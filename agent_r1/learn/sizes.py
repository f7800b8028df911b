"""Memory sizes, shared by the learner, its estimate before the first step and `agent-r1 plan`. Imports no torch."""

from __future__ import annotations

import math

# The most logits that may exist at once (256 MiB in fp32). With a vocabulary of 150k that is 447 tokens at a time.
MAX_LOGITS = 2**26
RESERVE = 0.05  # share of the device's memory that the allocator loses between blocks
BLOCK = 256  # numbers of a row that share a scale, in 8 bits
MIN_ROW = 8  # narrower rows stay in fp32: the scales of their blocks would take as much


def is_compressed(columns: int) -> bool:
    """Whether 8 bits are worthwhile for a parameter with rows of this length; vectors have one column."""
    return columns >= MIN_ROW


def moment_bytes(rows: int, columns: int, *, eight_bit: bool) -> int:
    """Bytes of AdamW's two moments of a parameter between steps."""
    if eight_bit and is_compressed(columns):
        return 2 * rows * (columns + 4 * math.ceil(columns / BLOCK))
    return 2 * 4 * rows * columns
