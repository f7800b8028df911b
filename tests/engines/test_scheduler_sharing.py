"""Common prefixes are computed once: requests wait for them, share or copy their blocks, and decode as one."""

from __future__ import annotations

from typing import Any

from tests.engines.scheduler_steps import (
    CPU,
    GPU,
    STOP,
    both,
    drawn,
    draws,
    play,
    request,
    run,
    scheduler,
    step,
    submit,
)


def test_with_copies_equal_prompts_wait_for_the_one_that_is_being_computed() -> None:
    engine = scheduler(max_batch_tokens=4, **CPU)
    group = [request(list(range(10)), session=str(i)) for i in range(3)]
    other = request(list(range(50, 53)), max_tokens=1, session="other")
    submit(engine, *group, other)
    seen = [[(c.request.session, c.start, c.length) for c in step(engine)[0]] for _ in range(3)]
    # 10 tokens in 4 + 4 + 2; the unrelated request need not wait.
    assert seen == [[("0", 0, 4)], [("0", 4, 4)], [("0", 8, 2), ("other", 0, 2)]]
    chunks, _ = step(engine)
    # Then the others run the last token, as one.
    assert [(c.start, c.ids) for c in chunks if c.request in group[1:]] == [(9, [9])]
    assert {r.session for c in chunks for r in c.draws} == {"0", "1", "2", "other"}


def test_shared_blocks_can_be_used_in_the_step_that_computes_them() -> None:
    engine = scheduler(**GPU)
    group = [request(list(range(10)), session=str(i)) for i in range(3)]
    submit(engine, *group)
    chunks, _ = step(engine)
    # Two full blocks are shared. The third is not full, so each computes its own.
    assert [(c.request, c.start, c.ids) for c in chunks] == [
        (group[0], 0, list(range(10))),
        (group[1], 8, [8, 9]),
        (group[2], 8, [8, 9]),
    ]
    assert [c.blocks[:2] for c in chunks] == [[0, 1]] * 3
    assert len({c.blocks[2] for c in chunks}) == 3
    assert (engine.stats.prefilled_tokens, engine.stats.shared_tokens) == (10 + 2 + 2, 8 + 8)


def test_shared_blocks_are_not_used_before_the_step_that_computes_them() -> None:
    engine = scheduler(max_batch_tokens=4, **GPU)
    first, late = request(list(range(10)), session="first"), request(list(range(9)), session="late")
    submit(engine, first, late)
    seen = [[(c.request, c.start, c.length) for c in step(engine)[0]] for _ in range(3)]
    # The late one lacks a single token, for which there is always room. It still waits for the two blocks before it:
    # the first step computes only one of them.
    assert seen[0] == [(first, 0, 4)]
    assert seen[1] == [(late, 8, 1), (first, 4, 4)]
    assert seen[2] == [(late, 9, 1), (first, 8, 2)]


def test_requests_begin_again_if_nobody_will_compute_what_they_share() -> None:
    engine = scheduler(max_batch_tokens=4, **GPU)
    gone, *stay = (request(list(range(10)), session=session) for session in ("gone", "stays", "too"))
    submit(engine, gone, *stay)
    chunks = engine.plan()
    assert [(c.request, c.start, c.length) for c in chunks] == [(gone, 0, 4)]
    engine.cancel(gone)  # its second block is not computed
    engine.apply(chunks, draws(chunks))
    assert engine.stats.preemptions == 2
    seen = [[(c.request, c.start, c.length) for c in step(engine)[0]] for _ in range(3)]
    assert seen == [[(stay[0], 0, 4)], [(stay[0], 4, 4)], [(stay[0], 8, 2), (stay[1], 8, 2)]]
    assert set(run(engine)) == set(stay)


@both
def test_prompts_with_the_same_system_prompt_wait_only_for_its_blocks(side: dict[str, Any]) -> None:
    engine = scheduler(max_batch_tokens=8, **side)
    system = list(range(10, 20))
    first, second = (request([*system, *extra], max_tokens=1, session=str(extra)) for extra in ([1, 2, 3], [4, 5]))
    submit(engine, first, second)
    assert [(c.request, c.start, c.length) for c in step(engine)[0]] == [(first, 0, 8)]
    # 2 blocks of 4 tokens are shared; the third only begins with 2 tokens of the system prompt.
    # The step has 8 tokens for both: 5 of the first, and 3 of the 4 that the second lacks.
    assert [(c.request, c.start, c.length) for c in step(engine)[0]] == [(first, 8, 5), (second, 8, 3)]
    assert engine.stats.shared_tokens == 8


def test_requests_that_copy_continue_when_the_one_they_wait_for_is_cancelled() -> None:
    engine = scheduler(num_blocks=8, max_batch_tokens=4, **CPU)
    gone, *stay = (request(list(range(6)), session=session) for session in ("gone", "stays", "too"))
    submit(engine, gone, *stay)
    chunks = engine.plan()
    assert [chunk.request for chunk in chunks] == [gone]
    engine.cancel(gone)
    engine.apply(chunks, draws(chunks))
    (chunk,) = engine.plan()  # from the start: the cancelled request left nothing
    assert (chunk.request, chunk.start, chunk.ids) == (stay[0], 0, [0, 1, 2, 3])
    engine.apply([chunk], draws([chunk]))
    assert run(engine) == stay


def test_with_shared_decoding_equal_requests_run_once_until_they_sample_different_tokens() -> None:
    engine = scheduler(**CPU)
    play(engine, [1, 2, 3, 4, 5], session="first")
    group = [request([1, 2, 3, 4, 5], max_tokens=4, session=str(i)) for i in range(3)]
    submit(engine, *group)
    (chunk,) = engine.plan()
    assert (chunk.request, chunk.start, chunk.ids, chunk.draws) == (group[0], 4, [5], group)
    engine.apply([chunk], [([7], [-1.0], None), ([7], [-2.0], None), ([8], [-3.0], None)])
    pair, single = engine.plan()
    assert (pair.ids, pair.draws, single.ids, single.draws) == ([7], group[:2], [8], [group[2]])
    engine.apply([pair, single], drawn([9], [9], [9]))
    pair, single = engine.plan()  # the last token is the same, the one before it is not
    assert (pair.draws, single.draws) == (group[:2], [group[2]])
    assert [each.logprobs[0] for each in group] == [-1.0, -2.0, -3.0]
    # 4 found for each of three; the fifth of two twins, then one sampled token of one
    assert engine.stats.shared_tokens == 3 * 4 + 2 + 1
    assert engine.stats.prefilled_tokens == 5 + 1


def test_twins_continue_when_the_request_that_runs_for_them_is_cancelled() -> None:
    engine = scheduler(num_blocks=8, **CPU)
    play(engine, [1, 2], max_tokens=1, session="first")
    gone, stays = request([1, 2], session="gone"), request([1, 2], session="stays")
    submit(engine, gone, stays)
    (chunk,) = engine.plan()
    assert chunk.draws == [gone, stays]
    engine.cancel(gone)
    engine.apply([chunk], draws([chunk]))
    (chunk,) = engine.plan()
    assert (chunk.request, chunk.start, chunk.ids) == (stays, 2, [7])


@both
def test_only_the_last_token_runs_of_a_prompt_that_another_session_holds(side: dict[str, Any]) -> None:
    engine = scheduler(**side)
    play(engine, [1, 2, 3, 4, 5, 6], session="first")
    late = [request([1, 2, 3, 4, 5, 6], session=session) for session in ("late", "too")]
    submit(engine, *late)
    chunks, _ = step(engine)
    assert {(chunk.start, *chunk.ids) for chunk in chunks} == {(5, 6)}
    copies = [pair for chunk in chunks for pair in chunk.copies]
    if side is CPU:  # copies of both blocks for both of them, which run as one
        assert copies == [(i, each.blocks[i]) for each in late for i in range(2)]
        assert (engine.stats.prefilled_tokens, engine.stats.shared_tokens) == (6 + 1, 5 + 5 + 1)
    else:  # the full block is shared, the other is written and therefore copied
        assert copies == [(1, each.blocks[1]) for each in late]
        assert [each.blocks[0] for each in late] == [0, 0]
        assert (engine.stats.prefilled_tokens, engine.stats.shared_tokens) == (6 + 1 + 1, 5 + 5)
    # In all 2 blocks of the first, and 2 (copies) or 1 (shared) of each of the others.
    assert engine.free_blocks == 16 - (2 + 2 * (2 if side is CPU else 1))


def test_a_prompt_that_fills_its_last_block_copies_only_that_one() -> None:
    engine = scheduler(**GPU)
    engine.submit(request(list(range(8)), session="first"))
    step(engine)
    engine.submit(request(list(range(8)), session="late"))
    chunks, _ = step(engine)
    late = next(chunk for chunk in chunks if chunk.request.session == "late")
    # Its last token has to run, and writes where the first has the same token.
    assert (late.start, late.ids, late.copies) == (7, [7], [(1, late.blocks[1])])
    assert late.blocks[0] == 0


def test_a_block_that_is_computed_in_the_same_step_is_not_copied() -> None:
    engine = scheduler(**GPU)
    for session in ("first", "late"):
        engine.submit(request(list(range(8)), session=session))
    chunks, _ = step(engine)
    # Copies are made before the step: the late one shares the first block and computes its own second one.
    assert [(c.start, c.ids, c.copies) for c in chunks] == [(0, list(range(8)), []), (4, [4, 5, 6, 7], [])]
    assert (chunks[1].blocks[0], chunks[1].blocks[1] == chunks[0].blocks[1]) == (0, False)


@both
def test_a_request_cancelled_before_its_copies_were_made_frees_their_sources(side: dict[str, Any]) -> None:
    engine = scheduler(max_batch_tokens=4, **side)
    for session in ("first", "late"):
        play(engine, [1, 2, 3, 4, 5], max_tokens=1, session=session)
    busy = request(list(range(20, 28)), max_tokens=1, session="busy")  # has the whole budget for two steps
    extends = request([1, 2, 3, 4, 5, 6, 7], max_tokens=1, session="new")  # in a copy, unless it may share the block
    rewrites = request([1, 2, 60, 61], max_tokens=1, session="first")  # in a copy, as others share it or will copy it
    submit(engine, busy, extends, rewrites)
    step(engine)
    assert (len(extends.copies), len(rewrites.copies)) == (1 if side is CPU else 0, 1)
    for each in (busy, extends, rewrites):
        engine.cancel(each)
    engine.release("first")
    engine.release("late")
    assert engine.free_blocks == 16


@both
def test_a_session_rewrites_shared_blocks_in_a_copy(side: dict[str, Any]) -> None:
    engine = scheduler(**side)
    play(engine, [1, 2, 3, 4, 5], max_tokens=1, session="first")
    play(engine, [1, 2, 3, 4, 5], max_tokens=1, session="late")
    engine.submit(request([1, 2, 60, 61], max_tokens=1, session="first"))
    (chunk,), _ = step(engine)
    # Block 0 is also the late one's, unless that has a copy.
    assert chunk.start == 2
    assert chunk.copies == ([] if side is CPU else [(0, chunk.blocks[0])])
    assert (chunk.blocks[0] == 0) == (side is CPU)


@both
def test_every_prompt_of_a_growing_episode_can_be_found_in_its_blocks(side: dict[str, Any]) -> None:
    engine = scheduler(num_blocks=64, **side)
    turns = [list(range(10, 10 + length)) for length in (3, 9, 10, 22)]
    for turn in turns:
        engine.submit(request(turn, max_tokens=1, session="early"))
        run(engine, turns[-1][len(turn)] if turn != turns[-1] else STOP)
    for index, turn in enumerate(turns):
        engine.submit(request(turn, max_tokens=1, session=f"late{index}"))
        (chunk,), _ = step(engine)
        assert (chunk.start, chunk.ids) == (len(turn) - 1, turn[-1:])
        # The early one was alone, so its blocks are the first ones: (3, 9, 10, 22) - 1 tokens are in 1, 2, 3, 6 of 4.
        held = list(range((1, 2, 3, 6)[index]))
        copied = [source for source, _ in chunk.copies]
        # Shared blocks are full; the tokens run are the 3rd, 1st, 2nd, 2nd of theirs, so the second is not written to.
        assert copied == (held if side is CPU else [[0], [], [2], [5]][index])
        assert chunk.blocks[: len(held) - len(copied)] == held[: len(held) - len(copied)]


def test_with_copies_equal_prompts_wait_for_the_one_that_already_has_a_cache() -> None:
    engine = scheduler(**CPU)
    play(engine, [1, 2, 3, 4, 5], max_tokens=1, session="ahead")
    group = [request([1, 2, 3, 4, 5, 6, 7], max_tokens=1, session=session) for session in ("ahead", "b", "c", "d")]
    submit(engine, *group)
    (ahead,), _ = step(engine)
    assert (ahead.ids, ahead.draws) == ([6, 7], group[:1])
    others, _ = step(engine)
    assert [request for chunk in others for request in chunk.draws] == group[1:]
    assert {(chunk.start, *chunk.ids) for chunk in others} == {(6, 7)}


def test_with_copies_the_common_prefix_of_preempted_requests_is_recomputed_once() -> None:
    engine = scheduler(**CPU)
    pair = [request([1, 2, 3], session=session) for session in ("a", "b")]
    submit(engine, *pair)
    step(engine)
    step(engine)
    engine.forget()
    assert [each.tokens for each in pair] == [[1, 2, 3, 7, 7], [1, 2, 3, 7]]  # b has waited for a's prompt
    again, last = step(engine)[0], step(engine)[0]
    assert [(c.request, c.start, c.ids) for c in again] == [(pair[0], 0, [1, 2, 3, 7, 7])]
    assert [(c.start, c.ids) for c in last] == [(3, [7])]


def test_the_shared_blocks_of_preempted_requests_are_recomputed_once() -> None:
    engine = scheduler(**GPU)
    pair = [request([1, 2, 3, 4, 5], session=session) for session in ("a", "b")]
    submit(engine, *pair)
    step(engine)
    engine.forget()
    again = step(engine)[0]
    assert [(c.request, c.start, c.ids) for c in again] == [(pair[0], 0, [1, 2, 3, 4, 5, 7]), (pair[1], 4, [5, 7])]


@both
def test_a_prompt_that_fits_only_without_the_source_of_its_copy_still_runs(side: dict[str, Any]) -> None:
    engine = scheduler(num_blocks=6, **side)
    for session in ("first", "late"):
        engine.submit(request(list(range(12)), max_tokens=1, session=session))
        # 3 blocks; the late one needs room for 13 tokens, 4 blocks, and 3 to copy from: more than 6.
        assert [each.session for each in run(engine)] == [session]


@both
def test_a_session_that_starts_over_can_evict_its_own_cache(side: dict[str, Any]) -> None:
    engine = scheduler(num_blocks=6, **side)
    for start, length in ((0, 12), (50, 15)):  # 3 blocks are kept; the other text needs 4 of 6, and none of these
        engine.submit(request(list(range(start, start + length)), max_tokens=1))
        assert len(run(engine)) == 1


def test_a_burst_may_grow_into_the_block_that_was_copied_from() -> None:
    engine = scheduler(num_blocks=6, burst=4, **GPU)
    play(engine, list(range(19)), max_tokens=1, session="first")
    late = request(list(range(19)), max_tokens=5, session="late")
    engine.submit(late)
    # 4 shared blocks and a copy of the fifth: all six. Its first burst runs tokens up to 18 + 1 + 3, the sixth block.
    assert run(engine) == [late]
