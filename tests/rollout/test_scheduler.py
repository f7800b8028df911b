"""Continuous batching as bookkeeping: who runs, who waits, who owns which block. No model involved."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.agent.sampler import Sampling
from agent_r1.rollout.engines.scheduler import Chunk, Request, Scheduler, common_prefix

STOP = 99


def scheduler(num_blocks: int = 16, *, max_running: int = 8, max_batch_tokens: int = 100) -> Scheduler:
    return Scheduler(num_blocks=num_blocks, block_size=4, max_running=max_running, max_batch_tokens=max_batch_tokens)


def request(tokens: list[int], *, max_tokens: int = 3, session: str = "s") -> Request:
    sampling = Sampling(max_tokens=max_tokens, stop_ids=(STOP,))
    return Request(session=session, tokens=list(tokens), sampling=sampling, uniforms=np.zeros(max_tokens))


def step(engine: Scheduler, token: int = 7) -> tuple[list[Chunk], list[Request]]:
    """Plan, pretend every sampling chunk drew `token`, and book it."""
    chunks = engine.plan()
    drawn = sum(chunk.samples for chunk in chunks)
    return chunks, engine.apply(chunks, [token] * drawn, [0.0] * drawn)


def run(engine: Scheduler, token: int = 7) -> list[Request]:
    finished = []
    while engine.has_requests:
        finished += step(engine, token)[1]
    return finished


def test_a_request_is_prefilled_at_once_and_then_decoded_token_by_token() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3]))
    spans = []
    while engine.has_requests:
        (chunk,), _ = step(engine)
        spans.append((chunk.start, chunk.ids, chunk.samples))
    assert spans == [(0, [1, 2, 3], True), (3, [7], True), (4, [7], True)]
    assert (engine.stats.steps, engine.stats.prefilled_tokens, engine.stats.decoded_tokens) == (3, 3, 3)


def test_a_stop_id_ends_a_response_early() -> None:
    engine = scheduler()
    engine.submit(request([1], max_tokens=5))
    assert [r.tokens for r in run(engine, STOP)] == [[1, STOP]]


def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    engine = scheduler(max_batch_tokens=4)
    engine.submit(request([1, 2]))
    step(engine)
    engine.submit(request(list(range(10, 17)), session="long"))
    seen = [[(c.start, len(c.ids), c.samples) for c in step(engine)[0]] for _ in range(2)]
    # 7 prompt tokens in 4 + 3; the other request decodes a token each time
    assert seen == [[(2, 1, True), (0, 4, False)], [(3, 1, True), (4, 3, True)]]


def test_the_next_request_of_a_session_reuses_the_common_prefix() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3, 4, 5]))
    run(engine)
    # cached: the prompt and two of the three sampled tokens; the last was never run
    engine.submit(request([1, 2, 3, 4, 5, 7, 7, 7, 30]))
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.ids) == (7, [7, 30])
    assert engine.stats.reused_tokens == 7


def test_a_rewritten_history_reuses_only_what_still_agrees() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3, 4, 5]))
    run(engine)
    engine.submit(request([1, 2, 60, 61]))
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.ids) == (2, [60, 61])


def test_a_repeated_prompt_still_runs_its_last_token() -> None:
    engine = scheduler()
    for _ in range(2):
        engine.submit(request([1, 2, 3]))
        run(engine)
    assert (engine.stats.reused_tokens, engine.stats.prefilled_tokens) == (2, 3 + 1)


def test_releasing_a_session_frees_its_blocks_now_or_when_its_request_ends() -> None:
    engine = scheduler(num_blocks=8)
    engine.submit(request([1, 2, 3]))
    run(engine)
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
        engine.submit(request([1, 2], max_tokens=1, session=session))
        run(engine)
    engine.submit(request(list(range(8)), max_tokens=1, session="c"))  # 8 tokens and one to come: 3 blocks
    run(engine)
    assert engine.stats.evictions == 1
    reused = engine.stats.reused_tokens
    engine.submit(request([1, 2], max_tokens=1, session="a"))
    run(engine)
    assert engine.stats.reused_tokens == reused + 1  # a was spared


def test_the_youngest_request_gives_way_and_keeps_what_it_has_sampled() -> None:
    engine = scheduler(num_blocks=5)
    old, young = request([1] * 7, max_tokens=8, session="old"), request([2] * 3, max_tokens=8, session="young")
    engine.submit(old)
    engine.submit(young)
    finished = run(engine)
    # old grows to 15 tokens, 4 blocks, and young to 11, 3 blocks: 5 are not enough for both
    assert engine.stats.preemptions > 0
    assert finished == [old, young]
    assert young.tokens == [2] * 3 + [7] * 8


def test_no_more_than_max_running_run_and_the_rest_follow_in_order() -> None:
    engine = scheduler(max_running=2)
    requests = [request([i], session=str(i)) for i in range(5)]
    for each in requests:
        engine.submit(each)
    chunks, _ = step(engine)
    assert [chunk.request for chunk in chunks] == requests[:2]
    assert run(engine) == requests


def test_a_request_cancelled_during_a_step_leaves_without_a_trace() -> None:
    engine = scheduler(num_blocks=8)
    gone, stays = request([1, 2], session="gone"), request([3, 4], session="stays")
    engine.submit(gone)
    engine.submit(stays)
    chunks = engine.plan()
    engine.cancel(gone)
    engine.cancel(gone)
    engine.apply(chunks, [7, 7], [0.0, 0.0])
    assert (gone.tokens, stays.tokens) == ([1, 2], [3, 4, 7])
    assert run(engine) == [stays]
    engine.release("stays")
    assert engine.free_blocks == 8


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest_agreement(first: list[int], second: list[int]) -> None:
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


action = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 14), st.integers(1, 10)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0), st.just(0)),
)


def check_step(chunks: list[Chunk]) -> None:
    """Blocks belong to one request each, cover its tokens, and every chunk continues what is cached."""
    owned = [block for chunk in chunks for block in chunk.blocks]
    assert len(owned) == len(set(owned))
    lengths = [len(chunk.ids) for chunk in chunks]
    assert lengths == sorted(lengths, key=lambda n: n > 1)  # single tokens first
    for chunk in chunks:
        assert chunk.start == chunk.request.cached
        assert len(chunk.blocks) * 4 >= chunk.start + len(chunk.ids)
    assert sum(n for n in lengths if n > 1) <= 6


class Session:
    """A scheduler driven by random actions, checked at every step."""

    def __init__(self) -> None:
        self.engine = scheduler(num_blocks=6, max_running=3, max_batch_tokens=6)  # 24 tokens: 14 + 10 fits alone
        self.submitted: list[Request] = []
        self.finished: list[Request] = []
        self.cancelled: list[Request] = []

    def submit(self, number: int, length: int, max_tokens: int) -> None:
        self.submitted.append(request([number] * length, max_tokens=max_tokens, session=str(number)))
        self.engine.submit(self.submitted[-1])

    def step(self, count: int, *_unused: int) -> None:
        for _ in range(count):
            chunks = self.engine.plan()
            check_step(chunks)
            drawn = sum(chunk.samples for chunk in chunks)
            self.finished += self.engine.apply(chunks, [7] * drawn, [0.0] * drawn)

    def cancel(self, number: int, *_: int) -> None:
        if self.submitted:
            target = self.submitted[number % len(self.submitted)]
            self.cancelled += [target] if target.live else []
            self.engine.cancel(target)

    def release(self, number: int, *_: int) -> None:
        self.engine.release(str(number))

    def forget(self, *_: int) -> None:
        self.engine.forget()


@settings(deadline=None, max_examples=200)
@given(st.lists(action, max_size=40))
def test_whatever_happens_everything_finishes_and_no_block_is_lost(actions: list[tuple[str, int, int, int]]) -> None:
    session = Session()
    for name, *numbers in actions:
        getattr(session, name)(*numbers)
    for _ in range(2000):
        if session.engine.has_requests:
            session.step(1)
    assert sorted(map(id, session.finished + session.cancelled)) == sorted(map(id, session.submitted))
    assert all(len(r.tokens) == r.prompt_length + r.sampling.max_tokens for r in session.finished)
    session.engine.forget()
    assert session.engine.free_blocks == 6
