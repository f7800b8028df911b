"""Helpers that drive a scheduler with small blocks and given tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.request import Chunk, Draw, Request
from agent_r1.engines.local.scheduler import Scheduler

STOP = 99


def scheduler(num_blocks: int = 16, *, max_running: int = 8, max_batch_tokens: int = 100, **settings: Any) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=4,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        **settings,
    )


CPU: dict[str, Any] = {"share_decoding": True}
GPU: dict[str, Any] = {"share_decoding": False}
both = pytest.mark.parametrize("side", [CPU, GPU], ids=["cpu", "gpu"])


def request(tokens: list[int], *, max_tokens: int = 3, session: str = "s") -> Request:
    sampling = Sampling(max_tokens=max_tokens, stop_ids=(STOP,))
    return Request(session=session, tokens=list(tokens), sampling=sampling, uniforms=np.zeros(max_tokens))


def drawn(*tokens: list[int]) -> list[Draw]:
    """The results of a step, with log-probs of 0."""
    return [(new, [0.0] * len(new), None) for new in tokens]


def draws(chunks: list[Chunk], token: int = 7) -> list[Draw]:
    """Every request drew `token`, up to its count, or once if it ends the response."""
    counts = [1 if token == STOP else chunk.count for chunk in chunks for _ in chunk.draws]
    return drawn(*([token] * count for count in counts))


def has_requests(engine: Scheduler) -> bool:
    return bool(engine._waiting or engine._running)


def step(engine: Scheduler, token: int = 7) -> tuple[list[Chunk], list[Request]]:
    """Plan a step and record `token` for every sampling chunk."""
    chunks = engine.plan()
    return chunks, engine.apply(chunks, draws(chunks, token))


def run(engine: Scheduler, token: int = 7) -> list[Request]:
    """Run until all requests are complete. Each plan must have something to run."""
    finished = []
    while has_requests(engine):
        chunks, done = step(engine, token)
        assert chunks
        finished += done
    return finished


def submit(engine: Scheduler, *requests: Request) -> None:
    for each in requests:
        engine.submit(each)


def play(engine: Scheduler, tokens: list[int], *, max_tokens: int = 3, session: str = "s") -> None:
    """Submit a request, and run until all are complete."""
    engine.submit(request(tokens, max_tokens=max_tokens, session=session))
    run(engine)
