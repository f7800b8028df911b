"""Finds the cached prefix of a request: in its session's own blocks, or in blocks that other requests computed.

Attempts at the same row find their common prompt here, and the next step of an episode finds the steps before it.
Blocks are found by the names of their tokens (`blocks.py`). The scheduler decides what becomes of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from agent_r1.engines.local.blocks import START, BlockPool, Name, chain_names, num_blocks
from agent_r1.engines.local.request import Request


@dataclass(slots=True)
class Idle:
    """The cache of a session between requests."""

    tokens: list[int]  # tokens of its last request; the very last one was sampled but not run, so it is not cached
    blocks: list[int]
    names: list[Name]  # names of the full blocks


@dataclass(slots=True, kw_only=True)
class Known:
    """The cached prefix of a request."""

    blocks: list[int]
    kept: int  # how many of these blocks, from the start, belong to the session
    cached: int  # tokens in the blocks
    own: int  # how many of these tokens are in the session's own cache
    copied: int  # number of blocks, from the end, that must be copied instead of shared


def name_blocks(request: Request, idle: Idle | None, size: int) -> None:
    """Name the full blocks and all tokens, once per admission. Names that the session knows are not computed again."""
    if request.prefill_end == len(request.tokens):
        return
    tokens, full = request.tokens, len(request.tokens) // size
    known = 0 if idle is None else min(own_prefix(request, idle) // size, len(idle.names))
    names = idle.names[:known] if idle is not None else []
    names = names + chain_names(names[-1] if names else START, tokens[known * size :], size)
    request.names, request.prefill_end = names[:full], len(tokens)
    request.whole = names[-1]


def find_prefix(request: Request, idle: Idle | None, pool: BlockPool, size: int, due: Collection[int] | None) -> Known:
    """The longest cached prefix of the request, in its session's blocks or in those of others.

    due: blocks that no step computes yet. They can be shared, but not copied, as copies are made before the step.
    None: nothing may be shared.
    """
    last = len(request.tokens) - 1  # at least one token must run to give logits
    own = min(own_prefix(request, idle), last) if idle is not None else 0
    # Blocks that a session owns need not be looked up, unless other blocks must be copied.
    blocks = [] if idle is None or due is None else idle.blocks[: own // size]
    blocks = blocks + pool.find_prefix(islice(request.names, len(blocks), None))
    shared = len(blocks) * size
    tail = pool.find(request.whole) if len(blocks) == len(request.names) else None
    if tail is not None and shared < len(request.tokens):
        blocks, shared = [*blocks, tail], len(request.tokens)
    usable = min(shared, last)
    if due and usable % size and blocks[usable // size] in due:
        usable -= usable % size
    cached = max(own, usable)
    kept = num_blocks(own, size) if own == cached else own // size  # how many of the session's own blocks
    held = (idle.blocks[:kept] if idle is not None else []) + blocks[kept : num_blocks(cached, size)]
    # Blocks that will be written, or may not be shared, are copied if other requests use them.
    inside, foreign = cached % size, len(held) - kept
    if inside and not foreign:
        foreign = int(pool.is_shared(held[-1]))
    copied = foreign if due is None else min(foreign, int(inside > 0))
    return Known(blocks=held, kept=kept, cached=cached, own=own, copied=copied)


def own_prefix(request: Request, idle: Idle) -> int:
    """Count the leading tokens of the request that its session has cached; each cache is compared once."""
    if request.compared[0] is not idle.tokens:
        request.compared = idle.tokens, common_prefix(idle.tokens, request.tokens)
    return min(request.compared[1], len(idle.tokens) - 1)


def common_prefix(first: list[int], second: list[int]) -> int:
    """The number of leading tokens that two lists share."""
    shorter = min(len(first), len(second))
    if (first if shorter == len(first) else first[:shorter]) == second[:shorter]:  # the prompt extends the session
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
