"""How relevant short texts are to a query, by the words they share (BM25).

For the exchanges of one episode; collections on disk are searched by `tools/search`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

K1, B = 1.5, 0.75  # the usual values: how fast a repeated word stops counting, and how much long texts are held back
MAX_CHARS, MAX_QUERY_CHARS = 20_000, 4_000  # the rest is ignored
_WORD = re.compile(r"\w+")


@lru_cache(4096)  # every later step of an episode counts the same words
def count_words(text: str) -> Counter[str]:
    return Counter(_words(text[:MAX_CHARS]))


def score_texts(query: str, texts: Sequence[Counter[str]]) -> list[float]:
    """One score per text, 0 if it shares no word with the query. A repeated word of the query counts once."""
    sizes = [text.total() for text in texts]
    mean = sum(sizes) / len(sizes) if any(sizes) else 1.0
    scores = [0.0] * len(texts)
    for word in sorted(set(_words(query[:MAX_QUERY_CHARS]))):  # sorted: sums of floats depend on their order
        places = [place for place, text in enumerate(texts) if word in text]
        weight = math.log(1 + (len(texts) - len(places) + 0.5) / (len(places) + 0.5))
        for place in places:
            times = texts[place][word]
            damping = K1 * (1 - B + B * sizes[place] / mean)
            scores[place] += weight * times * (K1 + 1) / (times + damping)
    return scores


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
