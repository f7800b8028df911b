"""How much short texts bear on a query, by the words they share: BM25, in plain Python.

For the exchanges of one episode, which come one by one. Collections on disk are what `tools/search` is for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.5, 0.75  # how fast a repeated word stops counting, and how much long texts are held back: the usual values
MAX_CHARS, MAX_QUERY_CHARS = 20_000, 4_000  # what comes later is not looked at
_WORD = re.compile(r"\w+")


class Index:
    """The words of some texts, and in which of them they are."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._sizes: list[int] = []  # in words
        self._places: dict[str, list[int]] = {}  # word -> the text it is in, once for each time it occurs

    def hold(self, texts: Sequence[str]) -> None:
        """Be an index of these texts. Only those that came since the last time are read, if the others are the same."""
        if list(texts[: len(self._texts)]) != self._texts:
            self._texts, self._sizes, self._places = [], [], {}
        for text in texts[len(self._texts) :]:
            words = _words(text[:MAX_CHARS])
            for word in words:
                self._places.setdefault(word, []).append(len(self._texts))
            self._texts.append(text)
            self._sizes.append(len(words))

    def scores(self, query: str) -> list[float]:
        """One per text, 0 where no word is shared. Rare words count more, and a word of the query counts once."""
        count = len(self._texts)
        mean = sum(self._sizes) / count if any(self._sizes) else 1.0
        scores = [0.0] * count
        for word in sorted(set(_words(query[:MAX_QUERY_CHARS]))):  # sorted: sums of floats depend on their order
            having = Counter(self._places.get(word, ()))
            weight = math.log(1 + (count - len(having) + 0.5) / (len(having) + 0.5))
            for place, times in having.items():
                held_back = K1 * (1 - B + B * self._sizes[place] / mean)
                scores[place] += weight * times * (K1 + 1) / (times + held_back)
        return scores


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
