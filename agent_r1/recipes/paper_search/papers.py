"""Papers, and what a source of papers can do. `corpus.py` and `service.py` implement it."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agent_r1.errors import AgentR1Error
from agent_r1.resources import Resource

_NOT_A_WORD = re.compile(r"[\W_]+")

Problem = Literal["unavailable", "unreadable", "refused", "unknown_paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    paper_id: str  # unique in its source
    title: str
    abstract: str = ""
    year: int | None = None
    authors: tuple[str, ...] = ()
    venue: str = ""
    references: tuple[str, ...] = ()  # ids of cited papers, if the source knows them

    @property
    def key(self) -> str:
        """The words of the title, which identify a paper across sources."""
        return title_key(self.title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """The papers that belong to one paper."""

    papers: Sequence[Paper]
    how: str  # tells the policy how they are related to the paper


class SourceError(AgentR1Error, RuntimeError):
    """The source gave no papers. The policy reads the message; the run goes on."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class PaperSource(Resource):
    """Where papers come from. Both methods raise `SourceError`, and nothing else, if the source fails."""

    @abstractmethod
    async def search(self, query: str, limit: int) -> Sequence[Paper]:
        """Return the best matches, best first."""

    @abstractmethod
    async def expand(self, paper: Paper, limit: int) -> Related:
        """Return papers that belong to `paper`: cited and citing ones, or else similar ones."""

    def weights(self, words: Sequence[str]) -> list[float] | None:
        """Return how well each stem distinguishes papers, from 0 to 1; None if the source cannot tell."""
        return None


def title_key(title: str) -> str:
    return _NOT_A_WORD.sub(" ", title.lower()).strip()
