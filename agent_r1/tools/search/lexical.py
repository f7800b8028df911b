"""Lexical ranking: BM25 as in Lucene, over memory-mapped posting lists (the `bm25s` package).

Words are lower-case runs of letters and digits, without stop words, reduced to their stems by Porter's rules. Results
are exact and reproducible: equal scores are ordered by place in the corpus, and passages without a word of the query
are never found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.errors import ConfigError, import_extra
from agent_r1.tools.search.corpus import Passage, Report, track

_STOP_WORDS = (  # Lucene's English list
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_IMPORTING = Lock()
MAX_CACHED_WORDS = 2_000_000  # bounded, because users write the queries
BLOCK = 256  # scores compared at once when the best are selected
_WORD = re.compile(r"\w+")

Ranking = list[tuple[int, float]]  # (place in the corpus, score), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class LexicalSettings:
    k1: float = 1.2  # k1 and b as in Lucene
    b: float = 0.75
    title_weight: int = 3  # weight of a word in the title: a search for a name should find its page
    stem: bool = True  # needs PyStemmer


class Words:
    """Splits text into word stems. Stems are cached: a corpus has millions of words but few different ones."""

    def __init__(self, *, stem: bool) -> None:
        self._stem = _load_stemmer() if stem else str
        self._lock = Lock()  # stemmers are not thread-safe
        self._cached = lru_cache(MAX_CACHED_WORDS)(self._stem_word)

    def __call__(self, text: str) -> list[str]:
        return [self._cached(word) for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]

    def _stem_word(self, word: str) -> str:
        with self._lock:
            return self._stem(word)


class LexicalRanker:
    """The posting lists of one corpus."""

    def __init__(self, directory: Path, settings: LexicalSettings) -> None:
        self._bm25 = import_bm25s().BM25.load(directory, mmap=True, show_progress=False)
        self._vocabulary: dict[str, int] = self._bm25.vocab_dict
        self._words = Words(stem=settings.stem)

    @staticmethod
    def build(
        passages: Iterable[Passage], total: int, directory: Path, settings: LexicalSettings, report: Report | None
    ) -> None:
        bm25s = import_bm25s()
        words, vocabulary = Words(stem=settings.stem), dict[str, int]()
        tokens: list[NDArray[np.int32]] = []  # arrays take a fifth of the memory of lists
        for passage in track(passages, "lexical: reading words", report, total):
            found = words(passage.title) * settings.title_weight + words(passage.text)
            ids = [vocabulary.setdefault(word, len(vocabulary)) for word in found]
            tokens.append(np.asarray(ids, dtype=np.int32))
        if not vocabulary:
            raise ConfigError("the corpus has no words to search for: only stop words, or no text at all")
        if report is not None:
            report("lexical: computing scores")
        bm25 = bm25s.BM25(method="lucene", k1=settings.k1, b=settings.b)
        bm25.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
        bm25.save(directory, show_progress=False)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._rank(query, top_k) for query in queries]

    def _rank(self, query: str, top_k: int) -> Ranking:
        ids = [self._vocabulary[word] for word in self._words(query) if word in self._vocabulary]
        if not ids:
            return []
        return best(self._bm25.get_scores_from_ids(ids), top_k)


def best(scores: NDArray[np.float32], top_k: int) -> Ranking:
    """Return the `top_k` largest positive scores; equal scores are ordered by place."""
    # The k-th largest of the blocks' maxima is at most the k-th largest score, so everything below it can be skipped.
    # Finding it takes one pass over the scores, a tenth of the time of partitioning them.
    whole = len(scores) - len(scores) % BLOCK
    maxima = scores[:whole].reshape(-1, BLOCK).max(axis=1)
    least = np.partition(maxima, len(maxima) - top_k)[len(maxima) - top_k] if len(maxima) >= top_k else 0.0
    places = np.flatnonzero((scores >= least) & (scores > 0))
    order = np.argsort(-scores[places], kind="stable")[:top_k]
    return [(int(place), float(scores[place])) for place in places[order]]


def import_bm25s() -> Any:
    """Import bm25s without JAX, which it would load if installed: JAX takes three quarters of the GPU's memory."""
    with _IMPORTING:
        if "bm25s" in sys.modules:
            return sys.modules["bm25s"]
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "jax"}
        sys.modules["jax"] = None  # type: ignore[assignment]  # makes `import jax` fail
        try:
            return import_extra("bm25s", "lexical search", "search")
        finally:
            del sys.modules["jax"]
            sys.modules.update(hidden)


def _load_stemmer() -> Callable[[str], str]:
    stemmer = import_extra("Stemmer", "stemming", "search", "build the index with stem=False")
    stem: Callable[[str], str] = stemmer.Stemmer("porter").stemWord
    return stem
