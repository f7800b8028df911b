"""The GPU side of the local engine: bursts, steps launched before the last one is read, shared blocks.

Runs on any machine, with kernels in plain torch and results that are available only after some polls, as from a device
that is still computing. Behaviour of both sides is tested in `test_local_engine.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local import request_engine
from agent_r1.engines.local.gpu import torch_kernels
from agent_r1.engines.local.gpu.gpu_runner import FULL_GPU, MAX_SPLITS, ladder, splits_for
from agent_r1.engines.local.gpu.gpu_state import MAX_STOP_IDS, block_tables, cut, in_order
from agent_r1.engines.local.local_engine import ANSWERS_AT_ONCE, LocalEngine
from agent_r1.engines.local.request import Chunk, Request
from agent_r1.errors import DataError, RolloutError
from tests.engines.engine_sides import CPU, GPU, assert_logprobs_match, engine, generate
from tests.engines.scheduler_steps import has_requests
from tests.engines.tiny_models import prompts, tiny

GREEDY = Sampling(max_tokens=12, temperature=0.0)
ENDLESS = Sampling(max_tokens=100, temperature=0.0)
BLOCKS = 1024 // 4  # of `engine`


@given(st.integers(1, 3000))
def test_every_batch_has_a_graph_that_is_not_much_larger(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max(2, largest)
    # From 16 on, a batch is padded by at most half its size; below, by 4 rows.
    assert all(size <= before * 1.5 for before, size in pairwise(sizes) if before >= 16)
    assert all(size <= before + 4 for before, size in pairwise(sizes) if before < 16)
    assert all(size % 8 == 0 for size in sizes[:-1] if size > 12)


@given(st.integers(1, 5000))
def test_sequences_are_divided_until_the_gpu_is_full(programs: int) -> None:
    splits = splits_for(programs)
    assert splits in (1, 2, 4, 8, 16)
    assert splits == MAX_SPLITS or programs * splits >= FULL_GPU
    assert splits == 1 or programs * splits // 2 < FULL_GPU  # not more than needed


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_block_tables_are_padded_with_zeros(rows: list[list[int]]) -> None:
    def asked() -> Request:
        return Request(session="s", tokens=[1], sampling=Sampling(max_tokens=1), uniforms=np.zeros(1))

    filled = block_tables([Chunk(asked(), [1], 0, blocks, 1) for blocks in rows])
    assert filled.shape == (len(rows), max(map(len, rows), default=0))
    assert [row[: len(given)].tolist() for row, given in zip(filled, rows, strict=True)] == rows
    assert not any(row[len(given) :].any() for row, given in zip(filled, rows, strict=True))


def test_what_was_not_drawn_is_cut_off() -> None:
    drawn, logprobs = np.array([[5, 0, 7], [3, -1, -1], [-1, -1, -1]]), np.array([[-1.0, -2, -3], [-4, 9, 9], [9] * 3])
    assert cut(drawn, logprobs.astype(np.float32)) == ([[5, 0, 7], [3], []], [[-1.0, -2.0, -3.0], [-4.0], []])


def test_rows_that_sample_come_first_and_single_tokens_before_longer_chunks() -> None:
    asked = Request(session="", tokens=[0], sampling=GREEDY, uniforms=np.zeros(12))
    kinds = [([1], 0), ([], 3), ([1, 2], 1), ([1, 2], 0), ([1], 1)]  # ids, tokens to sample
    chunks = [Chunk(asked, ids, 0, [0], count) for ids, count in kinds]
    assert [chunks.index(chunk) for chunk in in_order(chunks)] == [1, 4, 2, 0, 3]


@pytest.mark.parametrize("burst", [1, 2, 3, 8, 20])
def test_bursts_do_not_change_what_is_sampled(burst: int) -> None:
    model, asked = tiny("llama"), prompts(5, 9, 2, 14, 7)
    settings = [Sampling(max_tokens=n, temperature=0.8, seed=n) for n in (1, 2, 4, 7, 12)]  # no multiples, and below
    answers = []
    for side in (CPU, GPU | {"burst": burst}):
        with engine(model, **side) as local:
            answers.append(asyncio.run(mixed(local, asked, settings)))
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]
    assert [len(one.token_ids) for one in answers[1]] == [1, 2, 4, 7, 12]
    for prompt, completion in zip(asked, answers[1], strict=True):
        assert_logprobs_match(model, prompt, completion, temperature=0.8)


async def mixed(local: LocalEngine, asked: list[list[int]], settings: list[Sampling]) -> list[Completion]:
    pairs = enumerate(zip(asked, settings, strict=True))
    runs = [local.generate(Prompt(prompt), sampling, session=str(i)) for i, (prompt, sampling) in pairs]
    return await asyncio.gather(*runs)


def test_a_batch_of_mixed_settings_draws_the_same_as_on_a_cpu() -> None:
    model, asked = tiny("qwen3"), prompts(5, 9, 2, 14, 7, 6)
    settings = [
        Sampling(max_tokens=9, temperature=0.0, top_k=3, top_p=0.5),  # greedy, so top-k and top-p do not matter
        Sampling(max_tokens=9, temperature=1.3, seed=1),
        Sampling(max_tokens=9, temperature=0.7, top_k=5, seed=2),
        Sampling(max_tokens=9, temperature=1.3, top_p=0.6, seed=3),
        Sampling(max_tokens=9, temperature=2.0, top_k=20, top_p=0.9, seed=4),
        Sampling(max_tokens=9, temperature=1.0, top_k=1, seed=5),
    ]
    answers = []
    for side in (CPU, GPU):
        with engine(model, **side) as local:
            answers.append(asyncio.run(mixed(local, asked, settings)))
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 3, "top_p": 0.9}])
def test_uniform_numbers_that_round_to_one_draw_a_valid_token(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Above 1 - 2**-25, one in 33 million, float32 has no other value than 1: no cumulative probability exceeds it.
    monkeypatch.setattr(request_engine, "uniform_stream", lambda seed, count: np.full(count, 1 - 2.0**-40))
    with engine(tiny("llama"), **GPU) as local:
        for completion in generate(local, prompts(5, 9), Sampling(max_tokens=4, **settings)):
            assert all(map(math.isfinite, completion.logprobs))


def read_late(local: LocalEngine, polls: int = 2) -> None:
    """Results are available only after some polls, so that the event loop turns while two steps are in flight."""
    launch = local._runner.launch

    def later(chunks: Any) -> Callable[[], Any]:
        read, waiting = launch(chunks), iter(range(polls))
        return lambda: None if next(waiting, None) is not None else read()

    local._runner.launch = later  # type: ignore[method-assign]


@pytest.mark.parametrize("index", range(4))
def test_a_stop_token_anywhere_in_a_burst_ends_the_response_and_the_session_continues(index: int) -> None:
    model, (prompt, other, addition) = tiny("llama"), prompts(5, 6, 3)
    with engine(model, **CPU) as local:
        (whole,) = generate(local, [prompt], GREEDY)
    end = whole.token_ids.index(whole.token_ids[index]) + 1
    stopping = Sampling(max_tokens=12, temperature=0.0, stop_ids=(96, whole.token_ids[index]))
    with engine(model, **GPU) as local:
        read_late(local)
        first, _ = asyncio.run(mixed(local, [prompt, other], [stopping, GREEDY]))  # the other keeps it running
        assert (first.token_ids, first.stop) == (whole.token_ids[:end], "stop")
        extended = prompt + first.token_ids + addition
        (second,) = generate(local, [extended], GREEDY)
        assert local.stats.reused_tokens == len(prompt) + end - 1
        assert local.stats.decoded_tokens == end + 12 + 12  # tokens in flight for a completed response do not count
    assert_logprobs_match(model, prompt, first)
    assert_logprobs_match(model, extended, second)


def test_too_many_stop_ids_are_refused() -> None:
    with engine(tiny("llama"), **GPU) as local:
        generate(local, [[1, 2]], Sampling(max_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS))))
        with pytest.raises(DataError, match="17 stop ids; on a GPU the engine allows 16"):
            generate(local, [[1, 2]], Sampling(max_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS + 1))))
    with engine(tiny("llama"), **CPU) as local:
        generate(local, [[1, 2]], Sampling(max_tokens=2, stop_ids=tuple(range(MAX_STOP_IDS + 1))))


@pytest.mark.parametrize("turns", range(1, 12, 2))
def test_a_request_cancelled_with_two_steps_in_flight_leaves_nothing_behind(turns: int) -> None:
    model, (gone, stays, follows) = tiny("llama"), prompts(9, 5, 8)
    with engine(model, **GPU) as local:
        expected = [one.token_ids for one in generate(local, [stays, follows], GREEDY)]

    async def main(local: LocalEngine) -> list[Completion]:
        doomed = asyncio.create_task(local.generate(Prompt(gone), ENDLESS, session="gone"))
        other = asyncio.create_task(local.generate(Prompt(stays), GREEDY, session="stays"))
        for _ in range(30 + 2 * turns):
            await asyncio.sleep(0)
        doomed.cancel()
        # Takes blocks that the cancelled request still writes to.
        return [await local.generate(Prompt(follows), GREEDY, session="follows"), await other]

    with engine(model, **GPU, max_cached_tokens=48) as local:
        read_late(local)
        follower, other = asyncio.run(main(local))
        assert [other.token_ids, follower.token_ids] == expected
        for session in ("stays", "follows"):
            local.release(session)
        assert local._scheduler.free_blocks == 48 // 4


def test_a_full_pool_changes_the_work_but_not_the_result_with_steps_in_flight() -> None:
    model, (system, *tails) = tiny("gemma3"), prompts(9, 3, 6, 1, 8, 5)
    asked = [system + tail for tail in tails] + [system + tails[0]]
    (whole, *_) = generated(model, asked, Sampling(max_tokens=20, seed=1), max_cached_tokens=1024)
    sampling = Sampling(max_tokens=20, seed=1, stop_ids=(whole.token_ids[7],))
    roomy = generated(model, asked, sampling, max_cached_tokens=1024)
    assert {one.stop for one in roomy} >= {"stop"}
    # Six sequences of up to 37 tokens in room for 72 or 44, of which they share 8.
    for room in (72, 44):
        tight = generated(model, asked, sampling, max_cached_tokens=room)
        for prompt, one, other in zip(asked, roomy, tight, strict=True):
            assert one.token_ids == other.token_ids
            assert_logprobs_match(model, prompt, other)


def generated(model: Any, asked: list[list[int]], sampling: Sampling, *, max_cached_tokens: int) -> list[Completion]:
    with engine(model, **GPU, max_cached_tokens=max_cached_tokens) as local:
        read_late(local)
        answers = generate(local, asked, sampling)
        assert (local.stats.preemptions > 0) == (max_cached_tokens < 1024)
        return answers


class Breaking:
    """The kernels, one of which raises at a later call."""

    def __init__(self, kernel: str) -> None:
        self.calls_left: int | None = None
        for name in ("write", "tokens_per_tile", "attend", "draw"):
            setattr(self, name, self._breaking if name == kernel else getattr(torch_kernels, name))
        self._kernel = getattr(torch_kernels, kernel)

    def _breaking(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise MemoryError("none left")
        return self._kernel(*args, **kwargs)


@pytest.mark.parametrize("kernel", ["write", "attend", "draw"])
@pytest.mark.parametrize("calls", [0, 7])
def test_a_kernel_that_raises_fails_running_requests_and_loses_nothing(kernel: str, calls: int) -> None:
    model, (system, *tails) = tiny("llama"), prompts(8, 3, 2, 5)
    asked, kernels = [system + tail for tail in tails] * 2, Breaking(kernel)
    with engine(model, kernels=kernels, burst=3, max_running=4) as local:
        read_late(local)
        before = generate(local, asked, GREEDY)
        kernels.calls_left = calls
        failed = asyncio.run(outcomes(local, asked))
        kernels.calls_left = None
        assert all(isinstance(one, RolloutError) and "MemoryError('none left')" in str(one) for one in failed)
        assert not has_requests(local._scheduler)
        assert not local._futures
        again = generate(local, asked, GREEDY)
        assert [one.token_ids for one in again] == [one.token_ids for one in before]
        for index in range(len(asked)):
            local.release(str(index))
        assert local._scheduler.free_blocks == BLOCKS
    for prompt, completion in zip(asked, again, strict=True):
        assert_logprobs_match(model, prompt, completion)


async def outcomes(local: LocalEngine, asked: list[list[int]]) -> list[Any]:
    runs = [local.generate(Prompt(prompt), GREEDY, session=str(index)) for index, prompt in enumerate(asked)]
    return await asyncio.gather(*runs, return_exceptions=True)


def test_a_context_of_few_blocks_is_enough() -> None:
    model, asked = tiny("llama", max_position_embeddings=40), prompts(5, 20)
    with engine(model, **GPU, block_size=32, max_running=1) as local:
        for prompt, completion in zip(asked, generate(local, asked, GREEDY), strict=True):
            assert_logprobs_match(model, prompt, completion)


def test_undelivered_answers_survive_new_weights_cancelled_neighbours_and_the_end() -> None:
    """240 responses complete in one step and are delivered in batches."""
    model = tiny("llama")
    asked = [[1 + index % 40, 2 + index // 40] for index in range(240)]
    sampling = Sampling(max_tokens=1, temperature=0.0)
    weights = {name: parameter.detach() + 0.1 for name, parameter in model.named_parameters()}

    async def main(local: LocalEngine) -> list[Any]:
        runs = [
            asyncio.create_task(local.generate(Prompt(ids), sampling, session=str(i))) for i, ids in enumerate(asked)
        ]
        await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        waiting = [run for run in runs if not run.done()]
        assert len(waiting) >= len(asked) - 2 * ANSWERS_AT_ONCE
        waiting[-1].cancel()
        await local.load_weights(weights.items(), version=1)
        await local.close()
        return await asyncio.gather(*runs, return_exceptions=True)

    with engine(model, **CPU) as local:
        expected = generate(local, asked, sampling)
    with engine(model, **GPU, max_running=240, max_batch_tokens=512, max_cached_tokens=2_048) as local:
        *answers, cancelled = asyncio.run(main(local))
        assert local.num_requests == 0
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected[:-1]]
    assert {one.versions for one in answers} == {((0, 1),)}  # under which they were sampled
