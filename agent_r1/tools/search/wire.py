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


class QueryResults(BaseModel):
    query: Any = ""  # not read: servers may send anything
    results: list[Hit]


class SearchAnswer(BaseModel):
    query_results: list[QueryResults]


def write_results(queries: Sequence[str], results: Sequence[list[Hit]]) -> dict[str, Any]:
    pairs = zip(queries, results, strict=True)
    answer = SearchAnswer(query_results=[QueryResults(query=query, results=hits) for query, hits in pairs])
    return answer.model_dump(by_alias=True)


def read_results(body: bytes, num_queries: int) -> list[list[Hit]]:
    """Raise ValueError if the body is not an answer to this many queries."""
    answers = SearchAnswer.model_validate_json(body).query_results
    if len(answers) != num_queries:
        raise ValueError(f"{len(answers)} results for {num_queries} queries")
    return [answer.results for answer in answers]
