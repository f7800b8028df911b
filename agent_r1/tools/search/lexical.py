"""Lexical ranking: BM25 as Lucene computes it, over memory-mapped posting lists (the `bm25s` package).

Words are runs of letters and digits in lower case, without stop words, cut to their stems by Porter's rules. Results
are exact and reproducible: equal scores are ordered by place in the corpus, and passages without a word of the query
are never found. A ranking names passages by their place in the corpus.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.errors import ConfigError
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.progress import Report, Reporter

_STOP_WORDS = (  # Lucene's English list
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_IMPORTING = Lock()
MAX_KNOWN_WORDS = 2_000_000
BLOCK = 256  # scores looked at together when the best are picked
_WORD = re.compile(r"\w+")

Ranking = list[tuple[int, float]]  # (place in the corpus, score), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class LexicalSettings:
    k1: float = 1.2  # this and b: Lucene's own
    b: float = 0.75
    title_weight: int = 3  # how often a word of the title counts: whoever searches for a name wants that page
    stem: bool = True  # needs PyStemmer


class Words:
    """Text -> word stems, each looked up once: a corpus has millions of words but few different ones."""

    def __init__(self, *, stem: bool) -> None:
        self._stem = _stemmer() if stem else str
        self._known: dict[str, str] = {}
        self._lock = Lock()  # stemmers are not made for several threads

    def __call__(self, text: str) -> list[str]:
        found = []
        for word in _WORD.findall(text.lower()):
            stem = self._known.get(word)
            if stem is None:
                stem = self._learn(word)
            if stem:
                found.append(stem)
        return found

    def _learn(self, word: str) -> str:
        with self._lock:
            if len(self._known) >= MAX_KNOWN_WORDS:  # whoever writes the queries must not fill the memory
                self._known.clear()
            stem = self._known[word] = "" if word in STOP_WORDS else self._stem(word)
        return stem


class LexicalRanker:
    """The posting lists of one corpus."""

    def __init__(self, bm25: Any, settings: LexicalSettings) -> None:
        self._bm25 = bm25
        self._vocabulary: dict[str, int] = bm25.vocab_dict
        self._words = Words(stem=settings.stem)

    @staticmethod
    def build(
        passages: Iterable[Passage],
        total: int,
        directory: Path,
        settings: LexicalSettings,
        report: Report | None = None,
    ) -> None:
        bm25s = import_bm25s()
        words, vocabulary = Words(stem=settings.stem), dict[str, int]()
        tokens: list[NDArray[np.int32]] = []  # arrays: a fifth of the memory of lists
        progress = Reporter("lexical: reading words", total, report)
        for passage in passages:
            found = words(passage.title) * settings.title_weight + words(passage.text)
            ids = [vocabulary.setdefault(word, len(vocabulary)) for word in found]
            tokens.append(np.asarray(ids, dtype=np.int32))
            progress.at(len(tokens))
        progress.end(len(tokens))
        if not vocabulary:
            raise ConfigError("the corpus has no words that can be searched: only stop words, or no text at all")
        scoring = Reporter("lexical: computing scores", total, report)
        bm25 = bm25s.BM25(method="lucene", k1=settings.k1, b=settings.b)
        bm25.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
        bm25.save(directory, show_progress=False)
        scoring.end(total)

    @classmethod
    def open(cls, directory: Path, settings: LexicalSettings) -> LexicalRanker:
        bm25s = import_bm25s()
        return cls(bm25s.BM25.load(directory, mmap=True, show_progress=False), settings)

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        return [self._rank(query, top_k) for query in queries]

    def _rank(self, query: str, top_k: int) -> Ranking:
        ids = [self._vocabulary[word] for word in self._words(query) if word in self._vocabulary]
        if not ids:
            return []
        return best(self._bm25.get_scores_from_ids(ids), top_k)


def best(scores: NDArray[np.float32], top_k: int) -> Ranking:
    """The `top_k` largest positive scores; equal ones by place, so that the result depends on nothing else."""
    # The k-th largest of the blocks' maxima is no larger than the k-th largest score: whatever lies below it is out.
    # Finding that takes one pass over the scores, a tenth of the time of partitioning them.
    whole = len(scores) - len(scores) % BLOCK
    maxima = scores[:whole].reshape(-1, BLOCK).max(axis=1)
    least = np.partition(maxima, len(maxima) - top_k)[len(maxima) - top_k] if len(maxima) >= top_k else 0.0
    places = np.flatnonzero((scores >= least) & (scores > 0))
    order = np.argsort(-scores[places], kind="stable")[:top_k]
    return [(int(place), float(scores[place])) for place in places[order]]


def import_bm25s() -> Any:
    """The package, without JAX: where that is installed, bm25s starts it on import, though nothing here uses it, and
    JAX at once takes three quarters of the GPU's free memory for itself."""
    with _IMPORTING:
        if "bm25s" in sys.modules:
            return sys.modules["bm25s"]
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "jax"}
        for name in hidden:
            del sys.modules[name]
        sys.modules["jax"] = None  # type: ignore[assignment]  # how Python says that a module cannot be imported
        try:
            return import_module("bm25s")
        except ImportError as error:
            raise ConfigError("lexical search needs the package bm25s: pip install 'agent-r1[search]'") from error
        finally:
            del sys.modules["jax"]
            sys.modules.update(hidden)


def _stemmer() -> Callable[[str], str]:
    try:
        stem: Callable[[str], str] = import_module("Stemmer").Stemmer("porter").stemWord
    except ImportError as error:
        raise ConfigError(
            "cutting words to their stems needs PyStemmer: pip install 'agent-r1[search]', or build the index with "
            "stem=False"
        ) from error
    return stem
