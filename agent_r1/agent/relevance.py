"""How much short texts bear on a query, by the words they share: BM25, in plain Python.

For the few dozen exchanges of one episode. Collections on disk are what `tools/search` is for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

K1, B = 1.5, 0.75  # how fast a repeated word stops counting, and how much long texts are held back: the usual values
MAX_CHARS = 20_000  # of a text; what comes later is not looked at
_WORD = re.compile(r"\w+")


def relevance(query: str, texts: Sequence[str]) -> list[float]:
    """One number per text, 0 where no word is shared. Rare words count more, and a word of the query counts once."""
    counts = [_words(text[:MAX_CHARS]) for text in texts]
    sizes = [sum(count.values()) for count in counts]
    mean = sum(sizes) / len(sizes) if any(sizes) else 1.0
    scores = [0.0] * len(texts)
    for word in sorted(_words(query[:MAX_CHARS])):  # sorted: sums of floats depend on their order
        having = sum(word in count for count in counts)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for index, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            if word in count:
                held_back = K1 * (1 - B + B * size / mean)
                scores[index] += weight * count[word] * (K1 + 1) / (count[word] + held_back)
    return scores


@lru_cache(maxsize=4096)  # every exchange is looked at again in each later step
def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))
