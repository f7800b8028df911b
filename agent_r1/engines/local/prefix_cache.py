"""Finds the cached prefix of a request: in its session's own blocks, or in blocks that other requests computed.

Attempts at the same row find their common prompt here, and the next step of an episode finds the steps before it.
Blocks are found by the names of their tokens (`blocks.py`). The scheduler decides what becomes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.engines.local.blocks import START, BlockPool, name_after, num_blocks
from agent_r1.engines.local.request import Request


@dataclass(frozen=True, slots=True)
class Idle:
    """The cache of a session between requests."""

    tokens: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The cached prefix of a request."""

    blocks: list[int]
    cached: int  # tokens in the blocks
    own: int  # how many of these are in the session's own cache
    copied: int  # number of blocks, from the end, that must be copied instead of shared


def name_blocks(request: Request, size: int) -> None:
    """Name the full blocks and all tokens, once per admission because it reads the whole prompt."""
    if request.prefill_end == len(request.tokens):
        return
    length, names = len(request.tokens), [START]
    for start in range(0, length - size + 1, size):
        names.append(name_after(names[-1], request.tokens[start : start + size]))
    tail = request.tokens[length // size * size :]
    request.names, request.prefill_end = names[1:], length
    request.whole = name_after(names[-1], tail) if tail else names[-1]


def find_prefix(request: Request, idle: Idle | None, pool: BlockPool, size: int, *, copy_blocks: bool) -> Known:
    """The longest cached prefix of the request, in its session's blocks or in those of others."""
    last = len(request.tokens) - 1  # at least one token must run to give logits
    own = min(common_prefix(idle.tokens, request.tokens), last) if idle is not None else 0
    blocks = pool.find_prefix(request.names)
    shared = len(blocks) * size
    tail = pool.find(request.whole) if len(blocks) == len(request.names) else None
    if tail is not None and shared < len(request.tokens):
        blocks, shared = [*blocks, tail], len(request.tokens)
    cached = max(own, min(shared, last))
    kept = num_blocks(own, size) if own == cached else own // size  # of the session's own blocks
    held = (idle.blocks[:kept] if idle is not None else []) + blocks[kept : num_blocks(cached, size)]
    # Blocks that will be written, or may not be shared, are copied if other requests use them.
    inside, foreign = cached % size, len(held) - kept
    if inside and not foreign:
        foreign = int(pool.is_shared(held[-1]))
    copied = foreign if copy_blocks else min(foreign, int(inside > 0))
    return Known(blocks=held, cached=cached, own=own, copied=copied)


def common_prefix(first: list[int], second: list[int]) -> int:
    """The number of leading tokens that two lists share."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # the usual case: the prompt extends the session
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
