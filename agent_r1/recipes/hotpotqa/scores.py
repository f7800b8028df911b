"""Compare an answer with the accepted ones: exact match, F1 over words, substring. Pure functions of text.

Normalisation and F1 follow the published evaluation (SQuAD's, as used by HotpotQA): lower case, no ASCII punctuation,
no articles, single spaces; if either side is yes or no, F1 counts only if both are equal.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})


def normalized(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """Exact match. An empty answer matches nothing, not even an accepted one that normalises to nothing ("The The")."""
    return float(bool(answer) and normalized(answer) in {normalized(text) for text in accepted})


def substring_match(answer: str, accepted: Iterable[str]) -> float:
    """Return 1 if the answer contains an accepted one. Too lenient to train on; report only."""
    return float(any(contains(answer, text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Return the largest F1 over the accepted answers."""
    return max(_f1(normalized(answer), normalized(text)) for text in accepted)


def contains(text: str, part: str) -> bool:
    """Return whether `text` contains the normalised words of `part` as whole words; never for an empty part."""
    words = normalized(part)
    return bool(words) and f" {words} " in f" {normalized(text)} "


def _f1(answer: str, gold: str) -> float:
    if answer != gold and (answer in _CLOSED or gold in _CLOSED):
        return 0.0
    given, wanted = answer.split(), gold.split()
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0
