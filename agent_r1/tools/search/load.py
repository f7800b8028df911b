"""A load test of a search server: many clients at once, each asking again as soon as it is answered.

No attempt is repeated, so whatever the server refuses is counted, and the first of its reasons kept. Times are those of
the clients: from the request to the parsed answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.errors import ConfigError
from agent_r1.tools.search.client import SearchClient, SearchError, check_server

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
    reasons: dict[str, str]  # the first message of each kind
    seconds: float
    p50: float  # seconds, here and below; of the requests that were answered, nan where none was
    p95: float
    p99: float
    slowest: float

    @classmethod
    def of(
        cls, times: Sequence[float], *, clients: int, seconds: float, errors: dict[str, int], reasons: dict[str, str]
    ) -> LoadResult:
        ordered = sorted(times)
        p50, p95, p99, slowest = (_percentile(ordered, percent) for percent in (50, 95, 99, 100))
        return cls(
            clients=clients, requests=len(ordered) + sum(errors.values()), errors=errors, reasons=reasons,
            seconds=seconds, p50=p50, p95=p95, p99=p99, slowest=slowest,
        )  # fmt: skip

    @property
    def answered(self) -> int:
        return self.requests - sum(self.errors.values())

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {kind}" for kind, count in self.errors.items()) or "no errors"
        counts = f"{self.clients} clients, {self.requests:,} requests in {self.seconds:.1f} s, {failed}"
        times = (
            f": {self.per_second:.0f} a second; p50 {1000 * self.p50:.0f} ms, p95 {1000 * self.p95:.0f} ms, "
            f"p99 {1000 * self.p99:.0f} ms, slowest {1000 * self.slowest:.0f} ms"
        )
        reasons = (f"\nthe first {kind}: {reason}" for kind, reason in self.reasons.items())
        return "".join([counts, times if self.answered else "; none was answered", *reasons])


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
    # A server that is not there, or cannot be searched so, is one error and not thousands.
    await asyncio.to_thread(check_server, url, top_k=top_k, kind=kind)
    rest, times, errors, reasons = iter(range(requests)), list[float](), Counter[str](), dict[str, str]()

    async def client(asking: SearchClient) -> None:
        for number in rest:  # one list for all: whoever is free takes the next
            asked = [queries[(number * queries_per_request + i) % len(queries)] for i in range(queries_per_request)]
            began = time.perf_counter()
            try:
                await asking.search(asked, top_k, kind)
            except SearchError as error:
                errors[type(error).__name__] += 1
                reasons.setdefault(type(error).__name__, str(error))
            else:
                times.append(time.perf_counter() - began)

    async with contextlib.AsyncExitStack() as opened:
        # A pool each, as clients in different processes have; one pool of 200 connections would itself be the limit.
        asking = [
            SearchClient(url, retry_seconds=0, seconds_per_attempt=60.0, max_connections=1) for _ in range(clients)
        ]
        for one in asking:
            await opened.enter_async_context(one)
        began = time.perf_counter()
        await asyncio.gather(*map(client, asking))
        took = time.perf_counter() - began
    return LoadResult.of(times, clients=clients, seconds=took, errors=dict(errors), reasons=reasons)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest rank: the smallest time that so many percent of all do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else math.nan
