"""The tool `search(query)`, over an index on this machine or a search server.

Concurrent calls of a rollout arrive as one batch; a server gets them in requests as large as it accepts. Ranking runs
in a thread, so searches do not hold up episodes. All tools of a process share one open index. The model sees one
numbered line per passage, cut to keep contexts small.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agent_r1.data.downloads import data_dir
from agent_r1.errors import ConfigError, at_least
from agent_r1.guard import call
from agent_r1.places import anchored
from agent_r1.tools.base import BatchTool, Returned, ToolCall, ToolResult
from agent_r1.tools.search.client import (
    RETRY_SECONDS,
    SECONDS_PER_ATTEMPT,
    SearchClient,
    SearchError,
    check_server,
    check_url,
)
from agent_r1.tools.search.index import MANIFEST, Hit, Index, Kind, Manifest, check_kind

MAX_QUERY_CHARS = 500  # longer queries are cut; rankers gain nothing from the rest
NOTHING_FOUND = "Nothing found. Try other words."


class SearchTool(BatchTool):
    """Searches an index on this machine or a search server. Calls of many episodes are answered together."""

    timeout = 240.0  # with an index on this machine; `__init__` sets it for a server
    name = "search"
    description = "Find passages about something."
    parameters = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}},
        "required": ["query"],
    }

    def __init__(
        self,
        *,
        index: str | Path | None = None,  # a folder; a relative one is looked up here, then in the data directory
        url: str | None = None,  # address of a search server, instead of an index; it must be running now
        kind: Kind | None = None,  # None: hybrid if the index has both rankers, else the one it has
        top_k: int = 3,
        max_chars: int = 450,  # characters shown per passage, without its title: about 75 words
        retry_seconds: float | None = None,  # how long to retry a failing server; None: RETRY_SECONDS
    ) -> None:
        if (index is None) == (url is None):
            raise ConfigError(f"the search tool needs either an index or a url, got index={index!r} and url={url!r}")
        at_least(1, "the search tool", top_k=top_k, max_chars=max_chars)
        if url is None and retry_seconds is not None:
            raise ConfigError("the search tool's retry_seconds needs a server: set url, or remove retry_seconds")
        self._kind, self._top_k, self._max_chars = kind, top_k, max_chars
        self._retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
        if not 0 <= self._retry_seconds < math.inf:
            raise ConfigError(f"the search tool's retry_seconds must be at least 0 and finite, got {retry_seconds}")
        self._directory = None if index is None else _check_index(index, kind)
        self._url = None if url is None else check_url(url)
        if self._url is not None:
            # The call must outlast its client, so that a silent server is a failure and not a result.
            self.timeout = self._retry_seconds + 2 * SECONDS_PER_ATTEMPT
            self.max_batch = check_server(self._url, top_k=top_k, kind=kind).max_queries

    async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
        queries = [" ".join(call.args["query"].split())[:MAX_QUERY_CHARS] for call in calls]
        try:
            results = await self._search(queries)
        except SearchError as error:
            # Returned, not raised: the client has retried already, and searching one by one would not help.
            return [error] * len(calls)
        return [ToolResult(self.show(hits), info={"titles": [hit.passage.title for hit in hits]}) for hits in results]

    def look(self, query: str) -> list[Hit]:
        """Return what an episode would find, for demonstrations. Needs an index on this machine."""
        return self._search_index([query])[0]

    def show(self, hits: Sequence[Hit]) -> str:
        """Return the text that the model sees."""
        lines = [
            f"[{number}] {hit.passage.title}: {_cut(hit.passage.text, self._max_chars)}"
            for number, hit in enumerate(hits, start=1)
        ]
        return "\n".join(lines) or NOTHING_FOUND

    async def _search(self, queries: list[str]) -> list[list[Hit]]:
        if self._url is not None:
            async with SearchClient(self._url, retry_seconds=self._retry_seconds) as client:
                return await client.search(queries, self._top_k, self._kind)
        results: list[list[Hit]] = await call(self._search_index, queries)
        return results

    def _search_index(self, queries: list[str]) -> list[list[Hit]]:
        assert self._directory is not None
        index = _open_index(self._directory, (self._directory / MANIFEST).stat().st_mtime_ns)
        return index.search(queries, self._top_k, self._kind)


def find_index(index: str | Path) -> Path:
    """Return the folder: as given, or NAME/REST in the data directory of NAME."""
    path = Path(index).expanduser()
    if path.is_absolute() or anchored(path).exists():
        return anchored(path)
    name, *rest = path.parts
    return data_dir(name).joinpath(*rest)


def _check_index(index: str | Path, kind: Kind | None) -> Path:
    """Return the folder if it can be searched, without loading anything large."""
    directory = find_index(index)
    manifest = Manifest.read(directory)
    kind = check_kind(kind or manifest.kinds[-1], manifest, directory)
    if kind in ("lexical", "hybrid") and importlib.util.find_spec("bm25s") is None:
        raise ConfigError("lexical search needs the package bm25s: pip install 'agent-r1[search]'")
    return directory


@cache
def _open_index(directory: Path, built_ns: int) -> Index:
    """Open an index once per process, and again after it was rebuilt."""
    return Index.open(directory)


def _cut(text: str, max_chars: int) -> str:
    """Return one line of at most `max_chars` characters that ends with a whole word."""
    line = " ".join(text.split())
    if len(line) <= max_chars:
        return line
    kept, space, _ = line[: max_chars + 1].rpartition(" ")
    return (kept if space else line[:max_chars]) + " ..."
