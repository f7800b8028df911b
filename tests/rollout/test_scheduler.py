"""Continuous batching as bookkeeping: who runs, who waits, who owns which block. No model involved."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

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
    drawn = sum(len(chunk.draws) for chunk in chunks)
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


def test_requests_with_equal_tokens_run_once_until_they_sample_different_ones() -> None:
    engine = scheduler()
    group = [request([1, 2, 3, 4, 5], max_tokens=4, session=str(i)) for i in range(3)]
    for each in group:
        engine.submit(each)
    (chunk,) = engine.plan()
    assert (chunk.request, chunk.ids, chunk.draws) == (group[0], [1, 2, 3, 4, 5], group)
    engine.apply([chunk], [7, 7, 8], [-1.0, -2.0, -3.0])
    pair, single = engine.plan()
    assert (pair.ids, pair.draws, single.ids, single.draws) == ([7], group[:2], [8], [group[2]])
    engine.apply([pair, single], [9, 9, 9], [0.0] * 3)
    pair, single = engine.plan()  # the last token is the same, the one before it is not
    assert (pair.draws, single.draws) == (group[:2], [group[2]])
    assert [each.logprobs[0] for each in group] == [-1.0, -2.0, -3.0]
    # 5 prompt tokens of two twins, then one sampled token of one
    assert (engine.stats.prefilled_tokens, engine.stats.shared_tokens, engine.stats.decoded_tokens) == (5, 11, 6)


def test_equal_prompts_that_take_several_steps_stay_together() -> None:
    engine = scheduler(max_batch_tokens=4)
    for session in ("a", "b"):
        engine.submit(request(list(range(10)), max_tokens=1, session=session))
    seen = [[(c.start, len(c.ids), len(c.draws)) for c in step(engine)[0]] for _ in range(3)]
    assert seen == [[(0, 4, 0)], [(4, 4, 0)], [(8, 2, 2)]]
    assert not engine.has_requests


def test_when_the_request_that_runs_for_the_others_is_cancelled_they_go_on() -> None:
    engine = scheduler(num_blocks=8)
    gone, stays = request([1, 2], session="gone"), request([1, 2], session="stays")
    engine.submit(gone)
    engine.submit(stays)
    chunks = engine.plan()
    engine.cancel(gone)
    engine.apply(chunks, [7, 7], [0.0, 0.0])
    (chunk,) = engine.plan()
    assert (chunk.request, chunk.start, chunk.ids) == (stays, 2, [7])


def test_a_prompt_that_another_session_holds_is_copied_and_only_its_last_token_runs() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3, 4, 5, 6], session="first"))
    run(engine)
    late = [request([1, 2, 3, 4, 5, 6], session=session) for session in ("late", "too")]
    for each in late:
        engine.submit(each)
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.ids, chunk.draws) == (5, [6], late)
    assert chunk.copies == [(i, each.blocks[i]) for each in late for i in range(2)]  # 6 tokens in blocks of 4
    # 5 tokens for each of the late ones, and the sixth for the second of them
    assert (engine.stats.prefilled_tokens, engine.stats.shared_tokens) == (6 + 1, 5 + 5 + 1)


def test_a_prompt_is_not_copied_from_blocks_that_were_given_back_or_rewritten() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3, 4, 5, 6], session="first"))
    run(engine)
    engine.submit(
        request([1, 2, 3, 4, 5, 60], session="first")
    )  # the same blocks, from the sixth token on another text
    run(engine)
    engine.submit(request([1, 2, 3, 4, 5, 6], session="late"))
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.copies) == (0, [])
    run(engine)
    for session in ("first", "late"):
        engine.release(session)
    engine.submit(request([1, 2, 3, 4, 5, 60], session="later"))
    (chunk,), _ = step(engine)
    assert (chunk.start, chunk.copies) == (0, [])


def test_every_prompt_of_an_episode_can_be_copied_from_the_blocks_it_has_grown_into() -> None:
    engine = scheduler(num_blocks=64)
    turns = [list(range(10, 10 + length)) for length in (3, 9, 10, 22)]
    for turn in turns:
        engine.submit(request(turn, max_tokens=1, session="early"))
        run(engine, turns[-1][len(turn)] if turn != turns[-1] else STOP)
    for index, turn in enumerate(turns):
        engine.submit(request(turn, max_tokens=1, session=f"late{index}"))
        (chunk,), _ = step(engine)
        assert (chunk.start, chunk.ids) == (len(turn) - 1, turn[-1:])
        # The early one was alone, so its blocks are the first ones: (3, 9, 10, 22) - 1 tokens are in 1, 2, 3, 6 of 4.
        assert [source for source, _ in chunk.copies] == list(range((1, 2, 3, 6)[index]))


def test_what_is_kept_of_an_episode_grows_with_its_length_and_not_with_its_square() -> None:
    def kept(turns: int) -> int:
        engine = scheduler(num_blocks=1000)
        tokens: list[int] = []
        for turn in range(turns):
            tokens += [1000 + turn] * 20
            engine.submit(request(tokens, max_tokens=1))
            run(engine)
        return len(pickle.dumps(engine))

    assert kept(100) < 2.5 * kept(50)  # were it the square, four times


class Watched(list[int]):
    """Tokens that count how often they are read from one end to the other."""

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


def test_of_equal_prompts_those_that_have_to_start_over_run_together_beside_one_that_need_not() -> None:
    engine = scheduler()
    engine.submit(request([1, 2, 3, 4, 5], max_tokens=1, session="ahead"))
    run(engine)
    group = [request([1, 2, 3, 4, 5, 6, 7], max_tokens=1, session=session) for session in ("ahead", "b", "c", "d")]
    for each in group:
        engine.submit(each)
    ahead, others = step(engine)[0]
    assert (ahead.ids, ahead.draws) == ([6, 7], group[:1])
    assert (others.ids, others.draws) == ([1, 2, 3, 4, 5, 6, 7], group[1:])


def test_equal_requests_that_were_preempted_are_computed_again_together() -> None:
    engine = scheduler()
    pair = [request([1, 2, 3], session=session) for session in ("a", "b")]
    for each in pair:
        engine.submit(each)
    (chunk,) = engine.plan()
    engine.apply([chunk], [7, 7], [0.0, 0.0])
    engine.forget()
    (chunk,) = engine.plan()
    assert (chunk.start, chunk.ids, sorted(map(id, chunk.draws))) == (0, [1, 2, 3, 7], sorted(map(id, pair)))


action = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 14), st.integers(1, 10)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0), st.just(0)),
)


Memory = dict[tuple[int, int], int]  # (block, offset) -> the token whose keys and values are there


def check_step(chunks: list[Chunk], memory: Memory) -> None:
    """Blocks belong to one request each, cover its tokens and hold them; every chunk continues what is cached."""
    owned = [block for chunk in chunks for blocks in (chunk.blocks, *chunk.twin_blocks) for block in blocks]
    assert len(owned) == len(set(owned))
    lengths = [len(chunk.ids) for chunk in chunks]
    assert lengths == sorted(lengths, key=lambda n: n > 1)  # single tokens first
    for chunk in chunks:
        assert chunk.start == chunk.request.cached
        assert len(chunk.blocks) * 4 >= chunk.start + len(chunk.ids)
    assert sum(n for n in lengths if n > 1) <= 6
    copied = [(source, target) for chunk in chunks for source, target in chunk.copies]
    memory |= {(to, i): memory[source, i] for source, to in copied for i in range(4) if (source, i) in memory}
    for chunk in chunks:
        for blocks in (chunk.blocks, *chunk.twin_blocks):
            memory |= {(blocks[i // 4], i % 4): token for i, token in enumerate(chunk.ids, start=chunk.start)}
    for chunk in chunks:
        for each, blocks in zip((chunk.request, *chunk.twins), (chunk.blocks, *chunk.twin_blocks), strict=True):
            assert [memory[blocks[i // 4], i % 4] for i in range(chunk.end)] == each.tokens[: chunk.end]


class Session:
    """A scheduler driven by random actions, checked at every step."""

    def __init__(self) -> None:
        self.engine = scheduler(num_blocks=6, max_running=3, max_batch_tokens=6)  # 24 tokens: 14 + 10 fits alone
        self.submitted: list[Request] = []
        self.finished: list[Request] = []
        self.cancelled: list[Request] = []
        self.memory: Memory = {}

    def submit(self, number: int, length: int, max_tokens: int) -> None:
        self.submitted.append(request([number % 2] * length, max_tokens=max_tokens, session=str(number)))
        self.engine.submit(self.submitted[-1])

    def step(self, count: int, *_unused: int) -> None:
        for _ in range(count):
            chunks = self.engine.plan()
            check_step(chunks, self.memory)
            drawn = [each for chunk in chunks for each in chunk.draws]
            # Some draw alike and some do not; what they draw may also continue another session's prompt.
            tokens = [len(each.logprobs) * int(each.session) // 3 % 2 for each in drawn]
            self.finished += self.engine.apply(chunks, tokens, [0.0] * len(drawn))

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
