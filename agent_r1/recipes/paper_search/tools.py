"""The tools `search(query)` and `expand(paper_id)`. They change the list of the episode (`pool.py`).

`search` holds the settings of both: where papers come from, and who scores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.recipes.paper_search.corpus import open_library
from agent_r1.recipes.paper_search.pool import Library, Pool
from agent_r1.recipes.paper_search.selector import make_selector
from agent_r1.recipes.paper_search.service import ServicePapers
from agent_r1.tools.base import BaseTool, ToolResult
from agent_r1.tools.search.index import Kind


class Search(BaseTool):
    name = "search"
    description = "Find papers by words."
    parameters = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"query": {"type": "string", "description": "words of a title or abstract"}},
        "required": ["query"],
    }
    parallel = True
    timeout = 600.0  # a service has its own, shorter limits, after which the policy is told what is wrong

    def __init__(  # noqa: PLR0913 (all settings of where papers come from and who scores them)
        self,
        *,
        library: str | Path | None = None,  # a folder; a relative one is looked up here, then in the data directory
        url: str | None = None,  # address of a service, instead of a library
        kind: Kind | None = None,  # kind of search in a library
        selector: str = "lexical",  # or embedding, cross_encoder
        selector_model: str | None = None,  # a Hugging Face directory or hub id
        per_search: int = 10,
        per_expand: int = 20,
        call_cost: float = 0.0,
        service: dict[str, Any] | None = None,  # settings of `ServicePapers`
    ) -> None:
        if (library is None) == (url is None):
            raise ConfigError(f"search needs either a library or a url, got library={library!r} and url={url!r}")
        if url is None and service is not None:
            raise ConfigError("search: `service` has settings for a service: set url, or remove it")
        if url is not None and kind is not None:
            raise ConfigError(f"search: kind={kind!r} is for a library; a service chooses itself")
        if per_search < 1 or per_expand < 1 or not call_cost >= 0:
            raise ConfigError(
                "search needs per_search and per_expand of at least 1 and call_cost of at least 0, got "
                f"{per_search}, {per_expand} and {call_cost}"
            )
        source = open_library(library, kind) if library is not None else ServicePapers(str(url), **(service or {}))
        self.library = Library(
            source=source,
            selector=make_selector(selector, source, selector_model),
            per_search=per_search,
            per_expand=per_expand,
            call_cost=call_cost,
        )

    async def open(self) -> None:
        await self.library.source.open()
        await self.library.selector.open()

    async def close(self) -> None:
        await self.library.selector.close()
        await self.library.source.close()

    async def execute(self, args: dict[str, Any], *, pool: Pool) -> ToolResult:  # type: ignore[override]  # the env gives it
        return await pool.search(args["query"])


class Expand(BaseTool):
    name = "expand"
    description = "Find papers related to one of the list."
    parameters = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"paper_id": {"type": "integer", "description": "its number in the list"}},
        "required": ["paper_id"],
    }
    parallel = True
    timeout = Search.timeout

    async def execute(self, args: dict[str, Any], *, pool: Pool) -> ToolResult:  # type: ignore[override]  # the env gives it
        return await pool.expand(args["paper_id"])
