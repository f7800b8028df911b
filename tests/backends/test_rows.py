from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.backends.verl.rows import FILLER_TOKENS, RowBatch, pack, pack_group, unpack, unpack_group
from agent_r1.errors import DataError
from agent_r1.learn.batch.packs import Pack, merge_steps
from agent_r1.learn.batch.packs import pack as pack_segments
from agent_r1.types import Failure, StopReason, Trajectory
from tests.learn.builders import group, random_groups, random_trajectory, step, trajectory


def rows_of(*trajectories: Trajectory) -> list[Pack]:
    return pack_segments(merge_steps(trajectories), 1)  # 1: every segment is a row of its own


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["append", "broken", "mixed"]))
def test_a_trajectory_survives_the_way_to_the_driver(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    made = replace(
        random_trajectory(rng, kind=kind, name="t"),
        next_prompt_ids=[rng.randrange(9) for _ in range(rng.randint(0, 3))],
        outcome_reward=rng.random(),
        stop=rng.choice(list(StopReason)),
        failure=Failure(kind="k", message="m") if rng.random() < 0.5 else None,
    )
    assert unpack(pickle.loads(pickle.dumps(pack(made)))) == made


def test_an_episode_without_a_step_survives_too() -> None:
    made = trajectory(stop=StopReason.ERROR)
    assert unpack(pack(made)) == made


def test_a_growing_prompt_is_stored_once() -> None:
    made = trajectory(step([1, 2, 3], [4, 5]), step([1, 2, 3, 4, 5, 6, 7], [8]))
    packed = pack(made)
    assert [ids.tolist() for ids in packed.segments] == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert packed.places == [(0, 3, 5), (0, 7, 8)]


def test_a_rewritten_prompt_begins_a_new_segment() -> None:
    packed = pack(trajectory(step([1, 2, 3], [4, 5]), step([1, 9], [8])))
    assert [ids.tolist() for ids in packed.segments] == [[1, 2, 3, 4, 5], [1, 9, 8]]
    assert packed.places == [(0, 3, 5), (1, 2, 3)]


def test_a_group_survives_with_its_row() -> None:
    made = replace(random_groups(random.Random(1))[0], greedy=None)
    assert unpack_group(made.row, pack_group(made)) == made


def test_packing_keeps_log_probs_exactly() -> None:
    values = [-0.1, -1 / 3, -1e-30]
    assert unpack(pack(trajectory(step([1], [2, 3, 4], values)))).steps[0].response_logprobs == values


def test_rows_are_dealt_to_the_emptier_worker_until_it_is_full() -> None:
    # lengths 6, 5, 4, 3, 2 for two workers with room for three: 6 -> A; 5, 4 -> B (5, 9); 3 -> A (9); 2 -> A (tie)
    lengths = [2, 6, 3, 5, 4]
    made = [trajectory(step(range(1, n), [0]), name=str(n)) for n in lengths]
    batch = RowBatch.of(rows_of(*made), 2)
    assert [None if row is None else row.num_tokens for row in batch.packs] == [6, 3, 2, 5, 4, None]
    assert batch.num_tokens == 20 + FILLER_TOKENS


def test_without_rows_every_worker_gets_a_filler() -> None:
    assert RowBatch.of([], 3).packs == [None, None, None]


def test_numbers_lie_where_they_are_predicted() -> None:
    # tokens 1 2 | 3 4 | 5 | 6; sampled: 3, 4 (columns 0, 1) and 6 (column 2), predicted at positions 1, 2 and 4
    made = trajectory(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]))
    batch = RowBatch.of(rows_of(made), 1)
    tokens = batch.token_columns()
    assert tokens["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert tokens["loss_mask"][0].tolist() == [0, 1, 1, 0, 1, 0]
    spread = batch.spread({"advantages": torch.tensor([0.5, 0.25, -1.0])})
    assert spread["advantages"][0].tolist() == [0, 0.5, 0.25, 0, -1.0, 0]
    assert batch.step_ids()[0].tolist() == [0, 0, 0, 0, 1, 0]


def test_a_filler_trains_nothing() -> None:
    batch = RowBatch.of(rows_of(trajectory(step([1, 2], [3]))), 2)
    assert batch.token_columns()["loss_mask"][1].tolist() == [0] * FILLER_TOKENS
    assert batch.spread({"a": torch.ones(1)})["a"][1].tolist() == [0.0] * FILLER_TOKENS


@given(seed=st.integers(0, 10_000), workers=st.integers(1, 4))
def test_what_is_spread_is_gathered_again(seed: int, workers: int) -> None:
    rng = random.Random(seed)
    made = [random_trajectory(rng, kind="mixed", name=str(number)) for number in range(rng.randint(1, 7))]
    batch = RowBatch.of(rows_of(*made), workers)
    column_R = torch.arange(sum(each.num_response_tokens for each in made), dtype=torch.float32)
    spread = batch.spread({"c": column_R})["c"]
    assert torch.equal(batch.gather(torch.cat(spread), column_R), column_R)
    assert len(batch.packs) % workers == 0
    steps = [step for each in made for step in each.steps if step.response_ids]
    ids = torch.cat([s[m.bool()] for s, m in zip(batch.step_ids(), batch.token_columns()["loss_mask"], strict=True)])
    assert len(ids.unique()) == len(steps)


def test_a_wrong_number_of_answers_is_an_error() -> None:
    batch = RowBatch.of(rows_of(trajectory(step([1, 2], [3]))), 1)
    with pytest.raises(DataError, match="returned 2 numbers for 3 tokens"):
        batch.gather(torch.zeros(2), torch.zeros(1))


def test_rows_of_one_trajectory_are_not_several_trajectories() -> None:
    made = trajectory(step([1, 2], [3]), step([9], [4]))
    assert len(rows_of(made)) == 2
    assert len(group(made).trajectories) == 1
