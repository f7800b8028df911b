"""A load test of a search server: many clients, each sending its next request as soon as the last is answered.

Nothing is retried: refused requests are counted, with the first reason. Times are measured by the clients, from the
request to the parsed answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    errors: dict[str, int]  # number of errors by kind
    reasons: dict[str, str]  # the first message of each kind
    seconds: float
    p50: float  # seconds, here and below; of answered requests, nan if there are none
    p95: float
    p99: float
    slowest: float

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
    # A missing server is one error, not thousands.
    await asyncio.to_thread(check_server, url, top_k=top_k, kind=kind)
    remaining, times, errors, reasons = iter(range(requests)), list[float](), Counter[str](), dict[str, str]()

    async def play(client: SearchClient) -> None:
        for number in remaining:  # shared by all clients
            first = number * queries_per_request
            asked = [queries[i % len(queries)] for i in range(first, first + queries_per_request)]
            began = time.perf_counter()
            try:
                await client.search(asked, top_k, kind)
            except SearchError as error:
                errors[type(error).__name__] += 1
                reasons.setdefault(type(error).__name__, str(error))
            else:
                times.append(time.perf_counter() - began)

    async with contextlib.AsyncExitStack() as stack:
        # One connection pool each, like clients in separate processes: one shared pool would be the bottleneck.
        opened = [
            await stack.enter_async_context(
                SearchClient(url, retry_seconds=0, seconds_per_attempt=60.0, max_connections=1)
            )
            for _ in range(clients)
        ]
        began = time.perf_counter()
        await asyncio.gather(*map(play, opened))
        seconds = time.perf_counter() - began
    # Nearest rank: the smallest time that is not exceeded by this many percent of the times.
    p50, p95, p99, slowest = np.percentile(times or [np.nan], [50, 95, 99, 100], method="inverted_cdf").tolist()
    return LoadResult(
        clients=clients, requests=requests, errors=dict(errors), reasons=reasons,
        seconds=seconds, p50=p50, p95=p95, p99=p99, slowest=slowest,
    )  # fmt: skip
