"""Engines report tokens before a response is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agent_r1.engines.base import Completion, Prompt, Sampling, Streamer
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.transformers_engine import TransformersEngine
from tests.engines.tiny_models import tiny

SAMPLING = Sampling(max_tokens=12, seed=3)
PROMPT = Prompt([5, 6, 7])


def local() -> LocalEngine:
    return LocalEngine(
        tiny("llama"), seed=0, max_running=4, max_batch_tokens=64, max_cached_tokens=256, burst=1, threads=1
    )


def plain() -> TransformersEngine:
    return TransformersEngine(tiny("llama"), seed=0, max_running=4, max_cached_tokens=256, threads=1)


class Heard:
    """What was reported, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.logprobs: list[float] = []

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.pieces.append(list(ids))
        self.logprobs.extend(logprobs)

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


@pytest.mark.parametrize("make", [local, plain], ids=["local", "transformers"])
def test_the_pieces_are_the_completion(make: Any) -> None:
    heard = Heard()

    async def run() -> tuple[Completion, Completion]:
        engine = make()
        streamer: Streamer = engine
        streamed = await streamer.stream(PROMPT, SAMPLING, session="a", on_tokens=heard)
        whole = await engine.generate(PROMPT, SAMPLING, session="b")
        await engine.close()
        return streamed, whole

    streamed, whole = asyncio.run(run())
    assert (heard.ids, heard.logprobs) == (streamed.token_ids, streamed.logprobs)
    assert streamed.token_ids == whole.token_ids
    assert len(heard.pieces) == 12  # one per step on a CPU


def test_a_listener_may_abort_its_request_and_other_requests_go_on() -> None:
    engine, heard = local(), Heard()

    def until_three(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        heard(ids, logprobs)
        if len(heard.ids) == 3:
            engine.abort("a")

    async def run() -> tuple[Completion, Completion]:
        aborted = engine.stream(PROMPT, SAMPLING, session="a", on_tokens=until_three)
        both = await asyncio.gather(aborted, engine.generate(PROMPT, SAMPLING, session="b"))
        await engine.close()
        return both

    aborted, whole = asyncio.run(run())
    assert (aborted.stop, aborted.token_ids) == ("abort", heard.ids)
    assert len(heard.ids) == 3
    assert len(whole.token_ids) == 12


def test_a_listener_that_raises_fails_only_its_own_request() -> None:
    engine = local()

    def broken(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        raise ValueError("listener")

    async def run() -> tuple[Any, Any]:
        failing = engine.stream(PROMPT, SAMPLING, session="a", on_tokens=broken)
        both = await asyncio.gather(failing, engine.generate(PROMPT, SAMPLING, session="b"), return_exceptions=True)
        await engine.close()
        return both

    failed, whole = asyncio.run(run())
    assert isinstance(failed, ValueError)
    assert len(whole.token_ids) == 12
