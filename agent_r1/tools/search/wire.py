"""What a search server and its clients say to each other, as JSON.

    POST /search {"queries": ["..."], "top_k": 5, "kind": "lexical"}
    -> {"query_results": [{"query": "...", "results": [{"score": 1.5, "document": {"id", "title", "text"}}]}]}
    GET /health -> {"status": "ok", and what `Health` has}

The names are those of the published search API; a document is an object here, where it was a string there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Hit

MAX_SHOWN_CHARS = 60  # of a value from a request, in an error


class BadRequest(ValueError):
    """What was asked cannot be understood; the text tells the client why."""


def show(value: Any) -> str:
    """A value from a request, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text):,} characters)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    queries: list[str]
    top_k: int | None = None  # None here and below: the server's default
    kind: str | None = None

    @classmethod
    def read(cls, body: Any) -> SearchRequest:
        if not isinstance(body, Mapping):
            raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
        unknown = sorted(set(body) - {"queries", "top_k", "kind"})
        if unknown:
            raise BadRequest(f"unknown field {show(unknown[0])}; a request has queries, top_k and kind")
        queries, top_k, kind = body.get("queries"), body.get("top_k"), body.get("kind")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise BadRequest("'queries' must be a list of at least one text")
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            raise BadRequest(f"'top_k' must be a whole number of at least 1, got {show(top_k)}")
        if kind is not None and (not isinstance(kind, str) or len(kind) > MAX_SHOWN_CHARS):
            raise BadRequest(f"'kind' must be the name of a kind of search, got {show(kind)}")
        return cls(queries=queries, top_k=top_k, kind=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a server says about itself."""

    num_passages: int
    corpus_sha256: str
    kinds: list[str]  # ways its index can be searched
    waiting: int  # queries, at this moment
    max_queries: int | None = None  # it takes in one request; None here and below: it does not say
    max_top_k: int | None = None

    @classmethod
    def read(cls, body: Any) -> Health:
        """ValueError for what no search server says."""
        if not isinstance(body, Mapping) or not isinstance(kinds := body.get("kinds"), list):
            raise ValueError(f"not the health of a search server: {body!r:.200}")
        if not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(f"not the health of a search server: its kinds are {kinds!r:.200}")
        try:
            return cls(**{name: body[name] for name in cls.__slots__ if name in body})
        except TypeError as error:  # one is missing
            raise ValueError(f"not the health of a search server: {error}") from error

    def write(self) -> dict[str, Any]:
        return {"status": "ok", **asdict(self)}


def write_results(queries: Sequence[str], results: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    return {
        "query_results": [
            {"query": query, "results": [{"score": hit.score, "document": _document(hit.passage)} for hit in hits]}
            for query, hits in zip(queries, results, strict=True)
        ]
    }


def read_results(body: Any, num_queries: int) -> list[list[Hit]]:
    """ValueError for what is not an answer to so many queries."""
    try:
        results = [[_hit(found) for found in answered["results"]] for answered in body["query_results"]]
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"not the answer of a search server: {error!r}") from error
    if len(results) != num_queries:
        raise ValueError(f"{len(results)} results for {num_queries} queries")
    return results


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.passage_id, "title": passage.title, "text": passage.text}


def _hit(found: Any) -> Hit:
    document = found["document"]
    passage = Passage(passage_id=document["id"], title=document["title"], text=document["text"])
    return Hit(passage=passage, score=float(found["score"]))
