"""Questions and their gold papers, and training questions made from the papers themselves.

There are two kinds, named as in the published evaluation sets. A topic asks for all papers whose titles have a phrase
that two to eight titles share. A claim asks for one paper by a statement from its abstract. A question is kept if
searching for it finds all gold papers, but not among the first ten, and if none of them is gold in an evaluation set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby

from agent_r1.recipes.paper_search.papers import Paper
from agent_r1.recipes.paper_search.selector import subject_words
from agent_r1.tools.search.lexical import STOP_WORDS

NUM_VALID, NUM_TRAIN = 300, 6000
MIN_TITLES, MAX_TITLES = 2, 8  # how many titles share the phrase of a topic
PHRASE_WORDS = (4, 3, 2)  # longer phrases first
MIN_SUBJECT_WORDS, MAX_CLAIM_WORDS = 5, 12  # a claim is neither vague nor the whole abstract
EASY, ANSWERABLE = 10, 100  # a search for the question finds all gold papers in the first 100, but not in the first 10

TOPICS = (
    "Which papers study {}?",
    "Could you provide me some works about {}?",
    "What research has been done on {}?",
    "Can you list papers on {}?",
    "Are there any studies that deal with {}?",
)
CLAIMS = (
    "Which work {} {}?",
    "Could you point me to a paper that {} {}?",
    "What paper {} {}?",
    "Is there any research that {} {}?",
)
VERBS = ("propose", "introduce", "present", "develop", "investigate", "explore", "describe")

_CLAIM = re.compile(rf"\b(?:[Ww]e|paper|work|article) (?:also |then |first )?({'|'.join(VERBS)})s? ([^.,;:()?!]+)")
_PART, _WORD = re.compile(r"[.,:;!?()\[\]\"“”/–—]|\s-\s"), re.compile(r"[^\W_]+(?:[-'’][^\W_]+)*")  # noqa: RUF001
_OWN = frozenset({"our", "we", "us", "this", "these", "here"})  # words that only make sense in the paper itself
_GENERIC_WORDS = (  # words that end a phrase, like stop words
    "about across after all analysis and approach approaches based between beyond can case challenge does during "
    "evaluating findings from how improving its language learning method methods model models more natural new novel "
    "on overview paper proceedings processing shared so some study system systems task tasks than through towards "
    "toward two under use using via what when where which while without workshop your"
)
_GENERIC = frozenset(_GENERIC_WORDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    text: str
    gold: tuple[str, ...]  # keys of the gold papers
    kind: str  # topic, claim, or the evaluation set

    @property
    def digest(self) -> str:
        """Hash the text, independently of machine and order. It sets the order of questions."""
        return _hash(self.text)


def training_queries(
    papers: Iterable[Paper],
    held_out: Collection[str],
    search: Callable[[str, int], Sequence[str]],  # returns the keys of the papers found, best first
    *,
    num_valid: int = NUM_VALID,
    num_train: int = NUM_TRAIN,
) -> dict[str, list[Query]]:
    """Return at most this many questions for `valid` and `train`, at most half of them topics. Their gold papers are
    neither in the other split nor in `held_out` (keys of papers). The order of the papers does not matter."""
    described = {paper.key: paper for paper in papers if paper.abstract}
    ordered = sorted(described.values(), key=lambda paper: _hash(paper.key))
    sources = [iter(_topics(ordered)), iter(_claims(ordered))]
    taken: dict[str, set[str]] = {"valid": set(), "train": set()}
    found: dict[str, list[Query]] = {"valid": [], "train": []}
    asked = set[str]()
    for split, count in (("valid", num_valid), ("train", num_train)):
        closed = taken["valid"] if split == "train" else set()
        for number, source in enumerate(sources):
            wanted = count * (number + 1) // len(sources)
            while len(found[split]) < wanted and (query := next(source, None)) is not None:
                gold = set(query.gold)
                if query.text in asked or gold & closed or gold & taken[split] or any(key in held_out for key in gold):
                    continue
                ranked = search(query.text, ANSWERABLE)
                if gold <= set(ranked[:EASY]) or not gold <= set(ranked):
                    continue
                asked.add(query.text)
                taken[split] |= gold
                found[split].append(query)
    return {split: sorted(queries, key=lambda query: query.digest) for split, queries in found.items()}


def _topics(papers: Sequence[Paper]) -> Iterator[Query]:
    titles = _titles_by_phrase(papers)
    for paper in papers:
        phrase = next((each for each in _phrases(paper.title) if MIN_TITLES <= len(titles[each]) <= MAX_TITLES), None)
        if phrase is not None:
            yield Query(text=_pick(TOPICS, phrase).format(phrase), gold=tuple(titles.pop(phrase)), kind="topic")
            titles[phrase] = []


def _titles_by_phrase(papers: Iterable[Paper]) -> dict[str, list[str]]:
    titles: defaultdict[str, list[str]] = defaultdict(list)
    for paper in papers:
        for phrase in dict.fromkeys(_phrases(paper.title)):
            if len(known := titles[phrase]) <= MAX_TITLES:  # one more than allowed, to know that there are too many
                known.append(paper.key)
    return titles


def _phrases(title: str) -> list[str]:
    """Return the phrases of a title in lower case, longest first: the last words before a stop word or a mark."""
    parts: list[list[str]] = []
    for part in _PART.split(title.lower()):
        for stops, words in groupby(_WORD.findall(part), key=lambda word: word in STOP_WORDS or word in _GENERIC):
            if not stops:
                parts.append(list(words))
    return [" ".join(words[-size:]) for size in PHRASE_WORDS for words in parts if len(words) >= size]


def _claims(papers: Iterable[Paper]) -> Iterator[Query]:
    for paper in papers:
        title = set(_WORD.findall(paper.title))
        for verb, rest in _CLAIM.findall(paper.abstract):
            words = rest.split()
            # A name such as BERT, if the title contains it too, would give the paper away.
            named = any(sum(letter.isupper() for letter in word) > 1 and word in title for word in words)
            said = " ".join(words)
            is_clear = len(subject_words(said)) >= MIN_SUBJECT_WORDS and not named and not _OWN & set(words)
            if len(words) <= MAX_CLAIM_WORDS and is_clear:
                done = f"{verb}{'d' if verb.endswith('e') else 'ed'}"
                yield Query(text=_pick(CLAIMS, said).format(done, said), gold=(paper.key,), kind="claim")
                break


def _pick(templates: Sequence[str], text: str) -> str:
    return templates[int(_hash(text)[:8], 16) % len(templates)]


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
