"""The messages between a search server and its clients, as JSON.

    POST /search {"queries": ["..."], "top_k": 5, "kind": "lexical"}
    -> {"query_results": [{"query": "...", "results": [{"score": 1.5, "document": {"id", "title", "text"}}]}]}
    GET /health -> see `Health`

The field names are those of the published search API, in which a document is a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Hit, Kind


class SearchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queries: list[str] = Field(min_length=1)
    top_k: int | None = Field(default=None, ge=1)  # None here and below: the server's default
    kind: Kind | None = None


class Health(BaseModel):
    """A server's report about itself."""

    status: Literal["ok"] = "ok"
    num_passages: int
    corpus_sha256: str
    kinds: list[Kind]  # the ways its index can be searched
    waiting: int  # queries that are waiting at this moment
    max_queries: int  # limit per request
    max_top_k: int


class _Document(BaseModel):
    id: str
    title: str
    text: str


class _Result(BaseModel):
    score: float
    document: _Document


class _QueryResults(BaseModel):
    results: list[_Result]


class _Answer(BaseModel):
    query_results: list[_QueryResults]


def write_results(queries: Sequence[str], results: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    return {
        "query_results": [
            {"query": query, "results": [{"score": hit.score, "document": _document(hit.passage)} for hit in hits]}
            for query, hits in zip(queries, results, strict=True)
        ]
    }


def read_results(body: bytes, num_queries: int) -> list[list[Hit]]:
    """Raise ValueError if the body is not an answer to this many queries."""
    answers = _Answer.model_validate_json(body).query_results
    if len(answers) != num_queries:
        raise ValueError(f"{len(answers)} results for {num_queries} queries")
    return [[_hit(result) for result in answer.results] for answer in answers]


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.passage_id, "title": passage.title, "text": passage.text}


def _hit(result: _Result) -> Hit:
    document = result.document
    return Hit(passage=Passage(passage_id=document.id, title=document.title, text=document.text), score=result.score)
