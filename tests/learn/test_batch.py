from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import DataError
from agent_r1.learn.batch import Pack, merge_steps, pack, split_evenly
from agent_r1.types import CreditedTrajectory, Step
from tests.learn.builders import random_credited, random_trajectory, step, trajectory

kinds = st.sampled_from(["append", "broken", "mixed"])


def credited(*steps: Step, name: str = "t") -> CreditedTrajectory:
    """Advantages 0.5, 1.5, 2.5 ... over the response tokens, so that each can be recognised."""
    counter = iter(range(10_000))
    advantages = [[next(counter) + 0.5 for _ in s.response_ids] for s in steps]
    return CreditedTrajectory(trajectory=trajectory(*steps, name=name), advantages=advantages)


def test_three_turns_merge_into_one_segment_id_by_id() -> None:
    # user [1 2] -> [3 4]; tool text [5] -> [6]; tool text [7 8] -> [9 10]
    item = credited(
        step([1, 2], [3, 4], [-0.1, -0.2]),
        step([1, 2, 3, 4, 5], [6], [-0.3]),
        step([1, 2, 3, 4, 5, 6, 7, 8], [9, 10], [-0.4, -0.5]),
    )
    (segment,) = merge_steps([item])
    assert segment.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert segment.trained == [2, 3, 5, 8, 9]
    assert segment.old_logprobs == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert segment.advantages == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert segment.step_indices == [0, 0, 1, 2, 2]


def test_a_prompt_that_rewrites_history_starts_a_new_segment() -> None:
    first, second = merge_steps([credited(step([1, 2], [3]), step([1, 9, 3], [4]), step([1, 9, 3, 4, 5], [6]))])
    assert (first.token_ids, first.trained, first.step_indices) == ([1, 2, 3], [2], [0])
    assert (second.token_ids, second.trained, second.step_indices) == ([1, 9, 3, 4, 5, 6], [3, 5], [1, 2])


def test_a_prompt_that_drops_the_last_sampled_token_starts_a_new_segment() -> None:
    # merging here would train the dropped token in a context that never was
    assert len(merge_steps([credited(step([1], [2, 3]), step([1, 2], [4]))])) == 2


def test_a_prompt_that_adds_nothing_continues_the_segment() -> None:
    (segment,) = merge_steps([credited(step([1], [2]), step([1, 2], [3]))])
    assert segment.token_ids == [1, 2, 3]
    assert segment.trained == [1, 2]


def test_steps_without_a_response_train_nothing() -> None:
    assert merge_steps([credited(step([1, 2], []))]) == []
    (segment,) = merge_steps([credited(step([1], [2]), step([1, 2, 3], []), step([1, 2, 3, 4], [5]))])
    assert segment.token_ids == [1, 2, 3, 4, 5]
    assert segment.trained == [1, 4]


def test_segments_never_cross_trajectories() -> None:
    # the second trajectory happens to extend the first one
    segments = merge_steps([credited(step([1], [2])), credited(step([1, 2], [3]))])
    assert [s.trajectory_id for s in segments] == [0, 1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="step 0 of trajectory 'x' has an empty prompt"):
        merge_steps([credited(step([], [1]), name="x")])


def test_an_append_only_episode_of_200_steps_costs_its_own_length() -> None:
    attempt = random_trajectory(random.Random(0), kind="append", name="long", num_steps=200)
    item = CreditedTrajectory(trajectory=attempt, advantages=[[1.0] * len(s.response_ids) for s in attempt.steps])
    (segment,) = merge_steps([item])
    last = attempt.steps[-1]
    assert len(segment.token_ids) == len(last.prompt_ids) + len(last.response_ids)
    assert len(segment.trained) == attempt.num_response_tokens


@given(st.integers(0, 10_000), kinds, st.integers(1, 60))
def test_each_response_token_is_trained_exactly_once_after_its_own_prompt(seed: int, kind: str, budget: int) -> None:
    items = random_credited(random.Random(seed), kind=kind, count=4)
    expected = sorted(
        (index, tuple(s.prompt_ids + s.response_ids[: k + 1]), s.response_logprobs[k], advantages[k])
        for index, item in enumerate(items)
        for s, advantages in zip(item.trajectory.steps, item.advantages, strict=True)
        for k in range(len(s.response_ids))
    )
    got = sorted(
        (segment.trajectory_id, tuple(segment.token_ids[: position + 1]), old, advantage)
        for segment in merge_steps(items)
        for position, old, advantage in zip(segment.trained, segment.old_logprobs, segment.advantages, strict=True)
    )
    assert got == expected
    packs = pack(merge_steps(items), budget)
    assert sum(p.num_trained for p in packs) == len(expected)


@given(st.integers(0, 10_000), kinds, st.integers(1, 60))
def test_packs_keep_the_budget_unless_one_segment_is_longer(seed: int, kind: str, budget: int) -> None:
    segments = merge_steps(random_credited(random.Random(seed), kind=kind, count=6))
    packs = pack(segments, budget)
    assert all(p.num_tokens <= budget or len(p.lengths) == 1 for p in packs)
    assert sorted(length for p in packs for length in p.lengths) == sorted(len(s.token_ids) for s in segments)


def test_pack_by_hand() -> None:
    items = [credited(step([1, 2], [3, 4])), credited(step([5], [6]), step([5, 6, 7], [8]))]
    (packed,) = pack(merge_steps(items), 100)
    assert packed.input_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert packed.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.lengths == (4, 4)
    assert packed.sources_T.tolist() == [1, 2, 4, 6]  # one before each of 3, 4, 6, 8
    assert packed.targets_T.tolist() == [3, 4, 6, 8]
    assert packed.step_ids_T.tolist() == [0, 0, 1, 2]
    assert packed.trajectory_ids_T.tolist() == [0, 0, 1, 1]


def test_first_fit_decreasing_fills_the_gaps() -> None:
    # lengths 3, 6, 4, 2 into packs of 8: the 6 takes the 2, the 4 takes the 3
    items = [credited(step(range(1, n), [0])) for n in (3, 6, 4, 2)]
    assert [p.lengths for p in pack(merge_steps(items), 8)] == [(6, 2), (3, 4)]


def test_packing_the_same_segments_twice_gives_the_same_packs() -> None:
    segments = merge_steps(random_credited(random.Random(3), kind="mixed", count=8))

    def flat(packs: list[Pack]) -> list[list[int]]:
        return [p.input_ids_N.tolist() for p in packs]

    assert flat(pack(segments, 20)) == flat(pack(segments, 20))


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_an_even_split_keeps_every_item_in_order(items: list[int], parts: int) -> None:
    got = split_evenly(items, parts)
    assert [x for part in got for x in part] == items
    assert len(got) == min(parts, len(items))
    assert not got or max(map(len, got)) - min(map(len, got)) <= 1
