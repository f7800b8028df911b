"""The papers that an episode has found: what is in the list, what a call adds to it, and what the call earns.

A call first fetches and scores papers, in parallel with other calls, and then changes the list; changes happen in the
order in which the calls began. So five parallel calls give the same list and rewards as five in sequence.

As published, a call earns the sum of the `REWARD_TOP` best selector scores among the papers that it added, minus
`call_cost`; a query asked before, an unknown number and a paper expanded before cost `BAD_CALL` and change nothing.
If the source fails, the call earns nothing and the policy is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agent_r1.recipes.paper_search.papers import Paper, PaperSource, SourceError
from agent_r1.recipes.paper_search.selector import Selector
from agent_r1.tools.base import ToolError, ToolResult

REWARD_TOP = 3  # new papers that a call is paid for
BAD_CALL = 0.5
MIN_SCORE = 0.01  # papers with a lower score are not kept
MAX_QUERY_CHARS = 300


@dataclass(slots=True, kw_only=True)
class Entry:
    """One paper of the list."""

    number: int  # how the policy refers to the paper
    paper: Paper
    score: float
    expanded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The parts that all episodes share."""

    source: PaperSource
    selector: Selector
    per_search: int = 10  # papers asked for
    per_expand: int = 20
    call_cost: float = 0.0


class PaperList:
    """Numbered papers, each once."""

    __slots__ = ("_known", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._known: set[str] = set()  # keys of papers

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> PaperList:
        """Return a list with these papers, for trying something out."""
        made = cls()
        made.entries, made._known = list(entries), {entry.paper.key for entry in entries}
        return made

    def add(self, papers: Sequence[Paper], scores: Sequence[float]) -> list[Entry]:
        """Append the papers that are new and not irrelevant, and return them."""
        first = len(self.entries)
        for paper, score in zip(papers, scores, strict=True):
            if score >= MIN_SCORE and paper.key not in self._known:
                self._known.add(paper.key)
                self.entries.append(Entry(number=len(self.entries) + 1, paper=paper, score=score))
        return self.entries[first:]

    def shown(self, *, new: int, expanded: int) -> list[Entry]:
        """Return the best papers of each kind, best first."""
        best = sorted(self.entries, key=lambda entry: (-entry.score, entry.number))
        return [
            entry
            for kind, limit in ((False, new), (True, expanded))
            for entry in [entry for entry in best if entry.expanded is kind][:limit]
        ]


def payment(new: Sequence[Entry]) -> float:
    """The reward of a call for the papers that it added, before its cost."""
    return sum(sorted((entry.score for entry in new), reverse=True)[:REWARD_TOP])


class Pool:
    """The list of one episode, and its calls."""

    __slots__ = ("_library", "_queries", "_running", "_shown", "papers", "question")

    def __init__(self, library: Library) -> None:
        self._library = library
        self.begin("")

    def begin(self, question: str) -> None:
        """Start an episode with an empty list."""
        self.question = question
        self.papers = PaperList()
        self._queries: set[str] = set()
        self._running: list[asyncio.Event] = []  # one for each call
        self._shown = 0

    def show(self, *, new: int, expanded: int) -> list[Entry]:
        """Return the best papers. Until it is called again, `expand` accepts only the numbers that exist now."""
        self._shown = len(self.papers.entries)
        return self.papers.shown(new=new, expanded=expanded)

    async def search(self, query: str) -> ToolResult:
        words = " ".join(query.split())[:MAX_QUERY_CHARS]
        if not words:
            return _bad("empty_query", "the query is empty")
        async with self._turn() as my_turn:
            try:
                papers = await self._library.source.search(words, self._library.per_search)
                scores = await self._library.selector.scores(self.question, papers)
            except SourceError as error:
                raise ToolError(f"{error.problem}: {error}. The list is unchanged") from error
            await my_turn()
            if words.lower() in self._queries:
                return _bad("repeated_query", "you searched for this before")
            self._queries.add(words.lower())
            return self._add(papers, scores, f"found {len(papers)} papers")

    async def expand(self, number: int) -> ToolResult:
        async with self._turn() as my_turn:
            # Papers found by parallel calls do not count: the policy has not seen their numbers.
            entry = self.papers.entries[number - 1] if 1 <= number <= self._shown else None
            if entry is None:
                return _bad("unknown_paper", f"there is no paper {number} in the list")
            try:
                related = await self._library.source.expand(entry.paper, self._library.per_expand)
                scores = await self._library.selector.scores(self.question, related.papers)
            except SourceError as error:
                raise ToolError(f"{error.problem}: {error}. The list is unchanged") from error
            await my_turn()
            if entry.expanded:
                return _bad("expanded_before", f"paper {number} was expanded before")
            entry.expanded = True
            return self._add(related.papers, scores, f"{len(related.papers)} papers ({related.how})")

    def _add(self, papers: Sequence[Paper], scores: Sequence[float], said: str) -> ToolResult:
        new = self.papers.add(papers, scores)
        found = [[entry.paper.key, round(entry.score, 4)] for entry in new]
        reward = payment(new) - self._library.call_cost
        return ToolResult(f"{said}, {len(new)} of them new", reward=reward, info={"found": found, "new": len(new)})

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Yield a function that waits until all earlier calls have ended."""
        earlier, mine = tuple(self._running), asyncio.Event()
        self._running.append(mine)

        async def wait() -> None:
            for each in earlier:
                await each.wait()

        try:
            yield wait
        finally:
            mine.set()
            self._running.remove(mine)


def _bad(problem: str, said: str) -> ToolResult:
    return ToolResult(said, reward=-BAD_CALL, info={"problem": problem, "found": [], "new": 0})
