"""Search like the original: BM25 with Lucene's English analyser and Anserini's k1 and b, through `bm25s`.

Words are split like the analyser does: a dot, colon or apostrophe between letters and a dot or comma between digits
join, a final 's is dropped, and the rest is lower-cased, filtered for stop words and stemmed by Porter's rules. Lucene
also rounds the length of long texts and adds up scores in another order; both can swap neighbours with almost equal
scores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agent_r1.errors import ConfigError
from agent_r1.tools.search.lexical import STOP_WORDS, best, import_bm25s

K1, B = 0.9, 0.4
MAX_KNOWN_QUERIES = 4096
_LETTER, _DIGIT = r"[^\W\d_]", r"\d"
_JOINED = rf"(?<={_LETTER})[.:'’](?={_LETTER})|(?<={_DIGIT})[.,;'’](?={_DIGIT})"  # noqa: RUF001 (an apostrophe)
_WORD = re.compile(rf"\w(?:\w|{_JOINED})*")
_POSSESSIVE = re.compile(r"['’]s$")  # noqa: RUF001 (an apostrophe)


def split_words(text: str) -> list[str]:
    """Split into lower-case words without stop words, not stemmed."""
    words = (_POSSESSIVE.sub("", word) for word in _WORD.findall(text.lower()))
    return [word for word in words if word not in STOP_WORDS]


class ProductSearch:
    """The index of a shop. Immutable, so all episodes and threads share it."""

    def __init__(self, texts: Sequence[str]) -> None:
        bm25s = import_bm25s()
        self._stems: dict[str, int] = {}  # stem -> id
        split = [split_words(text) for text in texts]
        stem_of = {word: _stem(word) for word in sorted({word for words in split for word in words})}
        tokens = [
            np.asarray([self._stems.setdefault(stem_of[word], len(self._stems)) for word in words], dtype=np.int32)
            for words in split
        ]
        if not self._stems:
            raise ConfigError("no product of the shop has a word that can be searched")
        self._known = {word: self._stems[stem] for word, stem in stem_of.items()}
        self._bm25 = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._bm25.index((tokens, self._stems), create_empty_token=False, show_progress=False)
        self.rank = lru_cache(MAX_KNOWN_QUERIES)(self._rank)  # attempts of a group repeat queries, and turn pages

    def _rank(self, query: str, top_k: int) -> tuple[int, ...]:
        """Return positions of matching texts, best first, ties by position."""
        ids = [known for word in split_words(query) if (known := self._id_of(word)) is not None]
        if not ids:
            return ()
        return tuple(place for place, _ in best(self._bm25.get_scores_from_ids(ids), top_k))

    def _id_of(self, word: str) -> int | None:
        known = self._known.get(word)
        return known if known is not None else self._stems.get(_stem(word))


def _stem(word: str) -> str:
    """Lucene does not stem two-letter words. A stemmer is not thread-safe, but takes only microseconds to create."""
    import Stemmer

    if len(word) <= 2:
        return word
    stem: str = Stemmer.Stemmer("porter").stemWord(word)
    return stem
