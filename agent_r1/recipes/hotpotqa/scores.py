"""How close an answer is to the accepted ones: exact match, F1 over words, substring. Pure functions of text.

Normalisation and F1 are those of the published evaluation (SQuAD's, as HotpotQA uses them): lower case, no ASCII
punctuation, no articles, single spaces; an F1 with yes or no on either side counts only when both say the same.
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
    """No answer matches nothing, also where nothing is left of an accepted one ("The The")."""
    return float(bool(answer) and normalized(answer) in {normalized(text) for text in accepted})


def substring_match(answer: str, accepted: Iterable[str]) -> float:
    """1 if an accepted answer stands in the given one, among other things perhaps. Easy to please: report only."""
    return float(any(contains(answer, text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """The largest over the accepted answers."""
    return max(_f1(normalized(answer), normalized(text)) for text in accepted)


def contains(text: str, part: str) -> bool:
    """Whether the normalised words of `part` stand in `text`, as whole words; nothing contains the empty text."""
    words = normalized(part)
    return bool(words) and f" {words} " in f" {normalized(text)} "


def _f1(answer: str, gold: str) -> float:
    if answer != gold and (answer in _CLOSED or gold in _CLOSED):
        return 0.0
    given, wanted = answer.split(), gold.split()
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0
