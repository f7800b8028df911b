"""A small corpus, an index of it, and a real server for it on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from agent_r1.serve.search_server import ServerLimits, make_config
from agent_r1.tools.search.client import SearchClient
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Hit, Index, Kind
from agent_r1.tools.search.lexical import LexicalSettings

TEXTS = {
    "Otter": "An otter swims in the river and eats fish.",
    "Heron": "A heron stands in the river and eats fish and frogs.",
    "Mill": "The old mill stands on the river bank.",
    "Baker": "The baker buys flour at the mill.",
    "Moon": "Nobody lives on the moon.",
}


def passages() -> list[Passage]:
    return [Passage(passage_id=title.lower(), title=title, text=text) for title, text in TEXTS.items()]


def build(directory: Path) -> Index:
    return Index.build(passages(), directory, lexical=LexicalSettings())


async def search(url: str, queries: list[str], **settings: float) -> list[list[Hit]]:
    quick = {"backoff_seconds": 0.01, "seconds_per_attempt": 10.0}
    async with SearchClient(url, **(quick | settings)) as client:  # type: ignore[arg-type]
        return await client.search(queries, 3)


def titles(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.title for hit in hits]


class HeldIndex(Index):
    """An index whose searches wait for `go`, as on a server that is too slow."""

    go = threading.Event()
    begun = threading.Event()

    def search(self, queries: Sequence[str], top_k: int, kind: Kind | None = None) -> list[list[Hit]]:
        self.begun.set()
        assert self.go.wait(timeout=30)
        return super().search(queries, top_k, kind)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def serving(index: Index, limits: ServerLimits | None = None, port: int | None = None) -> Iterator[str]:
    """Yield the address of a running server, and stop it as SIGTERM does."""
    port = port or free_port()
    config = make_config(index, limits or ServerLimits())
    config.port = port
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait = threading.Event()
    while not server.started and thread.is_alive():
        wait.wait(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"
