"""Scripted agents: the expert of the warm start, and others to compare a policy with.

Each takes a library and a question, and returns its responses, one per step. The expert knows the gold papers but uses
only words that it has read: it tries out many calls and makes those that find missing gold papers. The others know the
question only: `one_search` searches for it once, `reader` searches for its parts and expands what fits best,
`random_calls` makes any calls, `repeat_search` always the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from agent_r1.recipes.paper_search.corpus import LocalPapers
from agent_r1.recipes.paper_search.env import ABSTRACT_CHARS, SHOWN_EXPANDED, SHOWN_NEW, paper_line
from agent_r1.recipes.paper_search.pool import Entry, PaperList, payment
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.recipes.paper_search.selector import LexicalSelector, subject_words
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.search.lexical import STOP_WORDS

MAX_STEPS = 4  # steps with calls; one more step ends the episode
EXPERT_CALLS = 3  # calls at once
WINDOWS = (5, 4, 3, 2)  # words of the question that form a query
PER_SEARCH, PER_EXPAND = 10, 20
DONE = "done"

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Call:
    """A search for a text, or the expansion of a paper by its number."""

    of: str | int

    def __str__(self) -> str:
        if isinstance(self.of, str):
            return FORMATS["hermes"].write_call("search", {"query": self.of})
        return FORMATS["hermes"].write_call("expand", {"paper_id": self.of})


class Visit:
    """Play one episode without an environment; the list and its numbers are the same as with one."""

    def __init__(self, question: str, library: LocalPapers) -> None:
        self.question, self.said = question, list[str]()
        self._library, self._selector = library, LexicalSelector(library.weights)
        self.papers, self._made = PaperList(), set[str]()

    @property
    def shown(self) -> list[Entry]:
        return self.papers.shown(new=SHOWN_NEW, expanded=SHOWN_EXPANDED)

    @property
    def text(self) -> str:
        """Everything that the agent can read at this point."""
        return "\n".join([self.question, *(paper_line(entry, ABSTRACT_CHARS) for entry in self.shown)])

    def try_out(self, call: Call) -> tuple[set[str], float]:
        """Return the papers that a call would add, by key, and what it would earn."""
        preview = PaperList.of(self.papers.entries)
        new = self._call(call, preview)
        return {entry.paper.key for entry in new}, payment(new)

    def make(self, calls: Iterable[Call]) -> None:
        """Make the calls of one step."""
        made = list(calls)
        self.said.append("\n".join(map(str, made)))
        for call in made:
            self._call(call, self.papers)
            if isinstance(call.of, int):
                self.papers.entries[call.of - 1].expanded = True
        self._made.update(str(call).lower() for call in made)

    def is_new(self, call: Call) -> bool:
        return str(call).lower() not in self._made

    def _call(self, call: Call, to: PaperList) -> list[Entry]:
        if isinstance(call.of, str):
            papers = self._library.find(call.of, PER_SEARCH)
        else:
            papers = tuple(self._library.related(to.entries[call.of - 1].paper.paper_id, PER_EXPAND).papers)
        return to.add(papers, self._selector.rate(self.question, papers))


def demonstrate(query: Query, library: LocalPapers) -> list[str] | None:
    """Return the expert's responses, or None if it does not find all gold papers."""
    visit, missing = Visit(query.text, library), set(query.gold)
    _find(visit, missing)
    return [*visit.said, DONE] if not missing else None


def expert(query: Query, library: LocalPapers) -> list[str]:
    """Return the expert's responses, whether it finds all gold papers or not."""
    visit = Visit(query.text, library)
    _find(visit, set(query.gold))
    return [*visit.said, DONE]


def one_search(query: Query, library: LocalPapers) -> list[str]:
    return [str(Call(query.text)), DONE]


def reader(query: Query, library: LocalPapers) -> list[str]:
    visit, words = Visit(query.text, library), subject_words(query.text)
    middle = len(words) // 2
    parts = [query.text, *(" ".join(part) for part in (words, words[:middle], words[middle:]) if part)]
    visit.make(dict.fromkeys(map(Call, parts)))
    for _ in range(MAX_STEPS - 1):
        calls = [Call(entry.number) for entry in visit.shown if not entry.expanded][:2]
        titles = [Call(entry.paper.title) for entry in visit.shown if visit.is_new(Call(entry.paper.title))][:1]
        if not calls:
            break
        visit.make(calls + titles)
    return [*visit.said, DONE]


def random_calls(query: Query, library: LocalPapers, seed: int = 0) -> list[str]:
    rng = random.Random(f"{seed}:{query.digest}")
    words, said = query.text.split(), list[str]()
    for _ in range(MAX_STEPS):
        calls = [
            Call(" ".join(rng.sample(words, min(len(words), 3)))) if rng.random() < 0.5 else Call(rng.randint(1, 30))
            for _ in range(rng.randint(1, 3))
        ]
        said.append("\n".join(map(str, calls)))
    return [*said, DONE]


def repeat_search(query: Query, library: LocalPapers) -> list[str]:
    """Repeat the same search at every step, which must not pay."""
    return [*(["\n".join([str(Call(query.text))] * 2)] * MAX_STEPS), DONE]


def _find(visit: Visit, missing: set[str]) -> None:
    """Make the expert's calls until nothing is missing, and remove from `missing` what they find."""
    titles = sorted(missing)
    for _ in range(MAX_STEPS):
        if not missing:
            return
        tried = {call: visit.try_out(call) for call in _candidates(visit, titles, missing) if visit.is_new(call)}
        chosen: list[Call] = []
        open_gold = set(missing)
        while len(chosen) < EXPERT_CALLS and (open_gold or not chosen):
            left = [call for call in tried if call not in chosen]
            if not left:
                break
            best = max(left, key=lambda call: (len(open_gold & tried[call][0]), tried[call][1]))
            if chosen and not open_gold & tried[best][0]:
                break
            chosen.append(best)
            open_gold -= tried[best][0]
        if not chosen:
            return
        visit.make(chosen)
        missing &= open_gold


def _candidates(visit: Visit, titles: Iterable[str], missing: set[str]) -> Iterator[Call]:
    """Calls that use only what can be read: parts of the question, readable words of missing titles, titles, papers."""
    words = subject_words(visit.question)
    windows = (words[start : start + size] for size in WINDOWS for start in range(0, len(words) - size + 1))
    readable = set(_WORD.findall(visit.text.lower()))
    hinted = (
        [word for word in title.split() if word in readable and word not in STOP_WORDS]
        for title in titles
        if title in missing
    )
    texts = [visit.question, *(" ".join(part) for part in chain([words], hinted, windows) if part)]
    shown = [entry for entry in visit.shown if not entry.expanded]
    texts += [entry.paper.title for entry in shown[:4]]
    yield from (Call(text) for text in {text.lower(): text for text in texts}.values())
    yield from (Call(entry.number) for entry in shown)
