"""A load test of a search server: many clients at once, each asking again as soon as it is answered.

No attempt is repeated, so whatever the server refuses is counted. Times are those of the clients: from the request to
the parsed answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.errors import ConfigError
from agent_r1.tools.search.client import SearchClient, SearchError

QUERIES = (
    "Which river flows past the town where the painter was born?",
    "Who founded the record label of the band?",
    "Which of the two films came out first?",
    "In which year was the university in the capital founded?",
    "What is the name of the director's first novel?",
    "Which football club did the goalkeeper play for before the war?",
    "Who was king when the cathedral was built?",
    "What county is the village with the old windmill in?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    clients: int
    requests: int  # answered or not
    errors: dict[str, int]  # by kind
    seconds: float
    p50: float  # seconds, here and below; of the requests that were answered
    p95: float
    p99: float
    slowest: float

    @property
    def per_second(self) -> float:
        return (self.requests - sum(self.errors.values())) / self.seconds

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {kind}" for kind, count in self.errors.items()) or "no errors"
        return (
            f"{self.clients} clients, {self.requests:,} requests in {self.seconds:.1f} s, {failed}: "
            f"{self.per_second:.0f} a second; p50 {1000 * self.p50:.0f} ms, p95 {1000 * self.p95:.0f} ms, "
            f"p99 {1000 * self.p99:.0f} ms, slowest {1000 * self.slowest:.0f} ms"
        )


async def load(
    url: str,
    *,
    clients: int,
    requests: int,
    queries: Sequence[str] = QUERIES,
    queries_per_request: int = 1,
    top_k: int = 5,
    kind: str | None = None,
) -> LoadResult:
    if min(clients, requests, queries_per_request) < 1 or not queries:
        raise ConfigError("a load test needs at least one client, one request and one query")
    rest, seconds, errors = iter(range(requests)), list[float](), Counter[str]()

    async def client(asking: SearchClient) -> None:
        for number in rest:  # one list for all: whoever is free takes the next
            asked = [queries[(number * queries_per_request + i) % len(queries)] for i in range(queries_per_request)]
            began = time.perf_counter()
            try:
                await asking.search(asked, top_k, kind)
            except SearchError as error:
                errors[type(error).__name__] += 1
            else:
                seconds.append(time.perf_counter() - began)

    async with contextlib.AsyncExitStack() as opened:
        # A pool each, as clients in different processes have; one pool of 200 connections would itself be the limit.
        asking = [SearchClient(url, attempts=1, seconds_per_attempt=60.0, max_connections=1) for _ in range(clients)]
        for one in asking:
            await opened.enter_async_context(one)
        await asking[0].health()  # a server that is not there is one error, not thousands
        began = time.perf_counter()
        await asyncio.gather(*map(client, asking))
        took = time.perf_counter() - began
    ordered = sorted(seconds) or [float("nan")]
    p50, p95, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95, 0.99))
    return LoadResult(
        clients=clients, requests=requests, errors=dict(errors), seconds=took,
        p50=p50, p95=p95, p99=p99, slowest=ordered[-1],
    )  # fmt: skip
