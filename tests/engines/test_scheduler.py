"""The scheduler without a model: which requests run or wait, and which blocks they own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.request import Request
from tests.engines.scheduler_steps import (
    GPU,
    STOP,
    drawn,
    draws,
    has_requests,
    play,
    request,
    run,
    scheduler,
    step,
    submit,
)


def test_a_request_is_prefilled_at_once_and_then_decoded_token_by_token() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3]))
    spans = []
    while has_requests(engine):
        (chunk,), _ = step(engine)
        spans.append((chunk.start, chunk.ids, chunk.count > 0))
    assert spans == [(0, [1, 2, 3], True), (3, [7], True), (4, [7], True)]
    assert (engine.stats.steps, engine.stats.prefilled_tokens, engine.stats.decoded_tokens) == (3, 3, 3)


def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    engine = scheduler(max_batch_tokens=4)
    engine.submit(request([1, 2]))
    step(engine)
    engine.submit(request(list(range(10, 17)), session="long"))
    seen = [[(c.start, len(c.ids), c.count > 0) for c in step(engine)[0]] for _ in range(2)]
    # 7 prompt tokens in 4 + 3; the other request decodes a token each time
    assert seen == [[(2, 1, True), (0, 4, False)], [(3, 1, True), (4, 3, True)]]


def test_the_next_request_of_a_session_reuses_the_common_prefix() -> None:
    engine = scheduler()
    play(engine, [1, 2, 3, 4, 5])
    # cached: the prompt and two of the three sampled tokens; the last was never run
    engine.submit(request([1, 2, 3, 4, 5, 7, 7, 7, 30]))
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.ids) == (7, [7, 30])
    assert engine.stats.reused_tokens == 7


def test_a_repeated_prompt_still_runs_its_last_token() -> None:
    engine = scheduler()
    for _ in range(2):
        play(engine, [1, 2, 3])
    assert (engine.stats.reused_tokens, engine.stats.prefilled_tokens) == (2, 3 + 1)


def test_releasing_a_session_frees_its_blocks_now_or_when_its_request_ends() -> None:
    engine = scheduler(num_blocks=8)
    play(engine, [1, 2, 3])
    assert engine.free_blocks < 8
    engine.release("s")
    engine.release("unknown")
    assert engine.free_blocks == 8
    engine.submit(request([1, 2, 3]))
    step(engine)
    engine.release("s")
    run(engine)
    assert engine.free_blocks == 8


def test_idle_sessions_are_evicted_least_recently_used_first() -> None:
    engine = scheduler(num_blocks=4)
    for session in ("a", "b", "a"):  # one block each; a is the fresher one
        play(engine, [1, 2], max_tokens=1, session=session)
    engine.submit(request(list(range(8)), max_tokens=1, session="c"))  # 8 tokens and one to come: 3 blocks
    run(engine)
    assert engine.stats.evictions == 1
    reused = engine.stats.reused_tokens
    play(engine, [1, 2], max_tokens=1, session="a")
    assert engine.stats.reused_tokens == reused + 1  # a was not evicted


def test_the_youngest_request_is_preempted_and_keeps_its_tokens() -> None:
    engine = scheduler(num_blocks=5)
    old, young = request([1] * 7, max_tokens=8, session="old"), request([2] * 3, max_tokens=8, session="young")
    submit(engine, old, young)
    finished = run(engine)
    # old grows to 15 tokens, 4 blocks, and young to 11, 3 blocks: 5 are not enough for both
    assert engine.stats.preemptions > 0
    assert finished == [old, young]
    assert young.tokens == [2] * 3 + [7] * 8


def test_at_most_max_running_run_and_the_rest_follow_in_order() -> None:
    engine = scheduler(max_running=2)
    requests = [request([i], session=str(i)) for i in range(5)]
    submit(engine, *requests)
    chunks, _ = step(engine)
    assert [chunk.request for chunk in chunks] == requests[:2]
    assert run(engine) == requests


def test_a_request_cancelled_during_a_step_leaves_without_a_trace() -> None:
    engine = scheduler(num_blocks=8)
    gone, stays = request([1, 2], session="gone"), request([3, 4], session="stays")
    submit(engine, gone, stays)
    chunks = engine.plan()
    engine.cancel(gone)
    engine.cancel(gone)
    engine.apply(chunks, draws(chunks))
    assert (gone.tokens, stays.tokens) == ([1, 2], [3, 4, 7])
    assert run(engine) == [stays]
    engine.release("stays")
    assert engine.free_blocks == 8


def test_bookkeeping_grows_linearly_with_an_episode() -> None:
    def kept(turns: int) -> int:
        engine = scheduler(num_blocks=1000)
        tokens: list[int] = []
        for turn in range(turns):
            tokens += [1000 + turn] * 20
            play(engine, tokens, max_tokens=1)
        return len(pickle.dumps(engine))

    assert kept(100) < 2.5 * kept(50)  # quadratic growth would give four times


class Watched(list[int]):
    """Tokens that count how often all of them are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


def test_planning_a_step_does_not_read_whole_prompts() -> None:
    engine = scheduler(num_blocks=50, max_batch_tokens=10)
    tokens = Watched(range(100))
    long = Request(session="s", tokens=tokens, sampling=Sampling(max_tokens=1), uniforms=np.zeros(1))
    engine.submit(long)
    reads = tokens.reads
    for _ in range(9):
        step(engine)
    assert long.cached == 90
    assert tokens.reads - reads <= 1


def test_a_burst_ends_with_the_response_and_its_blocks_hold_all_but_the_last_token() -> None:
    engine = scheduler(burst=4, **GPU)
    engine.submit(request([1, 2, 3], max_tokens=6))
    seen = []
    while has_requests(engine):
        (chunk,), _ = step(engine)
        seen.append((chunk.start, chunk.ids, chunk.count, chunk.drawn, len(chunk.blocks)))
    # 3 prompt tokens and 3 of the 4 sampled in the first step: 6 tokens, 2 blocks; then the fourth and the fifth, 8.
    assert seen == [(0, [1, 2, 3], 4, 0, 2), (6, [7], 2, 4, 2)]
    assert (engine.stats.steps, engine.stats.decoded_tokens) == (2, 6)


def test_bursts_are_short_while_prompts_wait_for_the_next_step() -> None:
    engine = scheduler(burst=4, max_batch_tokens=4, **GPU)
    engine.submit(request([1, 2], max_tokens=20))
    step(engine)
    engine.submit(request(list(range(10, 20)), max_tokens=20, session="long"))
    engine.submit(request(list(range(10, 20)), max_tokens=20, session="equal"))
    seen = [[(c.request.session, c.length, c.count) for c in step(engine)[0]] for _ in range(4)]
    # 10 prompt tokens in 4 + 4 + 2; the equal prompt shares 2 blocks and computes the 2 tokens after them. Then no
    # request waits, already in the third step: 2 + 2 are within its 4.
    assert seen[:2] == [[("s", 1, 1), ("long", 4, 0)]] * 2
    assert seen[2] == [("s", 1, 4), ("long", 2, 4), ("equal", 2, 4)]
    assert seen[3] == [("s", 1, 4), ("long", 1, 4), ("equal", 1, 4)]


def test_bursts_follow_the_length_of_recent_responses() -> None:
    engine = scheduler(num_blocks=400, max_running=400, burst=16, **GPU)

    def burst_after(responses: int, length: int) -> int:
        """The burst once this many requests have stopped after `length` tokens."""
        for number in range(responses):
            asked = request([1], max_tokens=40, session=str(number))
            engine.submit(asked)
            while asked.live:
                chunks = engine.plan()
                left = length - len(asked.logprobs)
                engine.apply(chunks, drawn(([7] * (left - 1) + [STOP])[: chunks[0].count]))
            engine.release(str(number))
        engine.submit(request([1], max_tokens=40, session="next"))
        (chunk,) = engine.plan()
        engine.cancel(chunk.request)
        return chunk.count

    assert burst_after(0, 1) == 16  # before any response is known
    assert burst_after(300, 12) == 6
    assert burst_after(300, 2) == 4  # not shorter
    assert burst_after(300, 39) == 16  # not longer than the setting


def test_the_next_step_continues_from_tokens_that_are_not_known_yet() -> None:
    engine = scheduler(burst=2, **GPU)
    asked = request([1, 2, 3], max_tokens=5)
    engine.submit(asked)
    first = engine.plan()
    second = engine.plan()
    third = engine.plan()
    spans = [(c.start, c.ids, c.count, c.drawn) for (c,) in (first, second, third)]
    # 3 + 1 run and 2 sampled, the second of which is run next, and so on: 2 + 2 + 1 are 5.
    assert spans == [(0, [1, 2, 3], 2, 0), (4, [], 2, 2), (6, [], 1, 4)]
    assert engine.plan() == []  # all remaining work is in flight
    for chunks, tokens in ((first, [5, 6]), (second, [7, 8]), (third, [9])):
        finished = engine.apply(chunks, drawn(tokens))
    assert (finished, asked.tokens) == ([asked], [1, 2, 3, 5, 6, 7, 8, 9])


def test_results_in_flight_for_a_completed_response_are_dropped() -> None:
    engine = scheduler(num_blocks=4, burst=2, **GPU)
    asked = request([1, 2, 3], max_tokens=9)
    engine.submit(asked)
    first, second = engine.plan(), engine.plan()
    assert engine.apply(first, drawn([5, STOP])) == [asked]
    assert engine.apply(second, drawn([])) == []
    assert asked.tokens == [1, 2, 3, 5, STOP]
    # 4 tokens were run: one block is kept for the session.
    assert engine.free_blocks == 3


def test_a_request_preempted_with_tokens_in_flight_waits_for_them() -> None:
    engine = scheduler(burst=2, **GPU)
    asked = request([1, 2, 3], max_tokens=5)
    engine.submit(asked)
    first = engine.plan()
    engine.forget()
    assert engine.plan() == []
    engine.apply(first, drawn([5, 6]))
    (chunk,) = engine.plan()
    assert (chunk.start, chunk.ids, chunk.drawn) == (0, [1, 2, 3, 5, 6], 2)


def test_results_from_before_a_preemption_are_not_published() -> None:
    engine = scheduler(max_batch_tokens=4, **GPU)
    asked = request(list(range(10)), session="asked")
    engine.submit(asked)
    before = engine.plan()
    engine.forget()
    engine.plan()  # the same four tokens, in blocks that another step fills
    engine.apply(before, [])
    assert asked.published == 0
    engine.submit(request(list(range(10)), session="late"))
    assert [chunk.request for chunk in engine.plan()] == [asked]
