from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import (
    column,
    column_with_gaps,
    merge_steps,
    nested,
    pack,
    split_evenly,
    step_sizes,
    trajectory_sizes,
)
from agent_r1.types import Trajectory
from tests.learn.builders import random_trajectory, step, trajectory

kinds = st.sampled_from(["append", "broken", "mixed"])


def several(seed: int, *, kind: str, count: int) -> list[Trajectory]:
    rng = random.Random(seed)
    return [random_trajectory(rng, kind=kind, name=f"t{i}") for i in range(count)]


def test_three_turns_merge_into_one_segment_id_by_id() -> None:
    # user [1 2] -> [3 4]; tool text [5] -> [6]; tool text [7 8] -> [9 10]
    attempt = trajectory(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]), step([1, 2, 3, 4, 5, 6, 7, 8], [9, 10]))
    (segment,) = merge_steps([attempt])
    assert segment.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert segment.trained == [2, 3, 5, 8, 9]
    assert segment.columns == [0, 1, 2, 3, 4]
    assert segment.step_indices == [0, 0, 1, 2, 2]


def test_a_prompt_that_rewrites_history_starts_a_new_segment() -> None:
    first, second = merge_steps([trajectory(step([1, 2], [3]), step([1, 9, 3], [4]), step([1, 9, 3, 4, 5], [6]))])
    assert (first.token_ids, first.trained, first.step_indices) == ([1, 2, 3], [2], [0])
    assert (second.token_ids, second.trained, second.step_indices) == ([1, 9, 3, 4, 5, 6], [3, 5], [1, 2])
    assert (first.columns, second.columns) == ([0], [1, 2])


def test_a_prompt_that_drops_the_last_sampled_token_starts_a_new_segment() -> None:
    # merging here would train the dropped token in a context that never was
    assert len(merge_steps([trajectory(step([1], [2, 3]), step([1, 2], [4]))])) == 2


def test_a_prompt_that_adds_nothing_continues_the_segment() -> None:
    (segment,) = merge_steps([trajectory(step([1], [2]), step([1, 2], [3]))])
    assert segment.token_ids == [1, 2, 3]
    assert segment.trained == [1, 2]


def test_conversations_that_take_turns_are_one_segment_each() -> None:
    """Steps 0 and 2 are one conversation, 1 and 3 another; step 4 branches off the first, before its last response."""
    attempt = trajectory(
        step([1], [2]), step([9], [8]), step([1, 2, 3], [4]), step([9, 8, 7], [6]), step([1, 2, 3], [5])
    )
    first, second, branch = merge_steps([attempt])
    assert (first.token_ids, first.step_indices, first.columns) == ([1, 2, 3, 4], [0, 2], [0, 2])
    assert (second.token_ids, second.step_indices, second.columns) == ([9, 8, 7, 6], [1, 3], [1, 3])
    assert (branch.token_ids, branch.trained, branch.columns) == ([1, 2, 3, 5], [3], [4])


def test_a_step_continues_the_longest_segment_it_extends() -> None:
    short, long = step([1], [2]), step([1, 3], [4])
    found = merge_steps([trajectory(long, short, step([1, 3, 4, 5], [6]))])
    assert [segment.step_indices for segment in found] == [[0, 2], [1]]
    found = merge_steps([trajectory(short, short, step([1, 2, 3], [4]))])
    assert [segment.step_indices for segment in found] == [[0], [1, 2]]  # of two equal segments, the latest


def test_steps_without_a_response_train_nothing() -> None:
    assert merge_steps([trajectory(step([1, 2], []))]) == []
    (segment,) = merge_steps([trajectory(step([1], [2]), step([1, 2, 3], []), step([1, 2, 3, 4], [5]))])
    assert segment.token_ids == [1, 2, 3, 4, 5]
    assert segment.trained == [1, 4]


def test_segments_never_cross_trajectories() -> None:
    # the second trajectory happens to extend the first one
    segments = merge_steps([trajectory(step([1], [2])), trajectory(step([1, 2], [3]))])
    assert [s.trajectory_id for s in segments] == [0, 1]
    assert [s.columns for s in segments] == [[0], [1]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="step 0 of trajectory 'x'"):
        merge_steps([trajectory(step([], [1]), name="x")])


def test_an_append_only_episode_of_200_steps_costs_its_own_length() -> None:
    attempt = random_trajectory(random.Random(0), kind="append", name="long", num_steps=200)
    (segment,) = merge_steps([attempt])
    last = attempt.steps[-1]
    assert len(segment.token_ids) == len(last.prompt_ids) + len(last.response_ids)
    assert len(segment.trained) == attempt.num_response_tokens


@given(st.integers(0, 10_000), kinds, st.integers(1, 60))
def test_each_response_token_is_trained_exactly_once_after_its_own_prompt(seed: int, kind: str, budget: int) -> None:
    attempts = several(seed, kind=kind, count=4)
    # column after column: whose token it is, of which step, and exactly what it was sampled after
    expected = [
        (index, k, tuple(s.prompt_ids + s.response_ids[: n + 1]))
        for index, attempt in enumerate(attempts)
        for k, s in enumerate(attempt.steps)
        for n in range(len(s.response_ids))
    ]
    segments = merge_steps(attempts)
    got = {
        number: (segment.trajectory_id, k, tuple(segment.token_ids[: position + 1]))
        for segment in segments
        for number, k, position in zip(segment.columns, segment.step_indices, segment.trained, strict=True)
    }
    assert [got[number] for number in range(len(expected))] == expected
    assert sum(len(segment.trained) for segment in segments) == len(expected)
    for packed in pack(segments, budget):
        # and the packs hold the same: the target, its place, its step and its trajectory
        parts = packed.input_ids_N.split(packed.lengths)
        starts = [sum(packed.lengths[:i]) for i in range(len(parts))]
        for source, target, number, owner in zip(
            packed.sources_T.tolist(),
            packed.targets_T.tolist(),
            packed.columns_T.tolist(),
            packed.trajectory_ids_T.tolist(),
            strict=True,
        ):
            start = max(s for s in starts if s <= source)
            assert (owner, (*packed.input_ids_N[start : source + 1].tolist(), target)) == (
                got[number][0],
                got[number][2],
            )
        steps = [got[number][:2] for number in packed.columns_T.tolist()]
        assert len(set(zip(steps, packed.step_ids_T.tolist(), strict=True))) == len(set(steps))
        assert sorted(set(packed.step_ids_T.tolist())) == list(range(len(set(steps))))


@given(st.integers(0, 10_000), kinds, st.integers(1, 60))
def test_the_tokens_of_a_step_are_never_split_between_packs(seed: int, kind: str, budget: int) -> None:
    attempts = several(seed, kind=kind, count=4)
    sizes = step_sizes(attempts)
    for packed in pack(merge_steps(attempts), budget):
        for number in set(packed.step_ids_T.tolist()):
            inside = packed.step_ids_T == number
            assert int(inside.sum()) == sizes[packed.columns_T[inside]].unique().item()


def test_pack_by_hand() -> None:
    attempts = [trajectory(step([1, 2], [3, 4])), trajectory(step([5], [6]), step([5, 6, 7], [8]))]
    (packed,) = pack(merge_steps(attempts), 100)
    assert packed.input_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert packed.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.lengths == (4, 4)
    assert packed.sources_T.tolist() == [1, 2, 4, 6]  # one before each of 3, 4, 6, 8
    assert packed.targets_T.tolist() == [3, 4, 6, 8]
    assert packed.columns_T.tolist() == [0, 1, 2, 3]
    assert packed.step_ids_T.tolist() == [0, 0, 1, 2]
    assert packed.trajectory_ids_T.tolist() == [0, 0, 1, 1]


def test_first_fit_decreasing_fills_the_gaps() -> None:
    # lengths 3, 6, 4, 2 into packs of 8: the 6 takes the 2, the 4 takes the 3
    attempts = [trajectory(step(range(1, n), [0])) for n in (3, 6, 4, 2)]
    assert [p.lengths for p in pack(merge_steps(attempts), 8)] == [(6, 2), (3, 4)]


def test_columns_run_over_all_response_tokens_in_order() -> None:
    attempts = [trajectory(step([1], [2, 3]), step([1], [])), trajectory(), trajectory(step([1], [4]))]
    made = column_with_gaps([[[0.5, None], []], [], [[2.0]]])
    assert made.isnan().tolist() == [False, True, False]
    assert (made[0].item(), made[2].item()) == (0.5, 2.0)
    assert step_sizes(attempts).tolist() == [2, 2, 1]
    assert trajectory_sizes(attempts).tolist() == [2, 2, 1]
    assert nested(column([[[0.5, 1.5], []], [], [[2.0]]]), attempts) == [[[0.5, 1.5], []], [], [[2.0]]]


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_an_even_split_keeps_every_item_in_order(items: list[int], parts: int) -> None:
    got = split_evenly(items, parts)
    assert [x for part in got for x in part] == items
    assert len(got) == min(parts, len(items))
    assert not got or max(map(len, got)) - min(map(len, got)) <= 1
