"""Hybrid ranking: several rankings of the same passages made one by the places they give, whatever their scores mean.

Reciprocal rank fusion (Cormack et al., SIGIR 2009): score(p) = sum over rankings of 1 / (60 + rank of p in it), ranks
from 1. A passage that a ranking does not name gets nothing from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from agent_r1.tools.search.lexical import Ranking

RANK_OFFSET = 60  # of the paper: how much the first places count beyond the next ones
DEPTH = 100  # how far each ranking is read; what both place lower than that hardly matters


def fuse(rankings: Iterable[Ranking], top_k: int) -> Ranking:
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            scores[place] += 1 / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]
