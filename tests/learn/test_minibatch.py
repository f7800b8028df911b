from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.learn.batch.minibatch import MiniBatch, Share, assign_rows, culprits, layout, prepare, with_own_logprobs
from agent_r1.learn.batch.packs import Pack, Segment
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import correction, random_credited, step, trajectory

CPU = torch.device("cpu")


def made(credited: Sequence[CreditedTrajectory], **overrides: Any) -> MiniBatch:
    settings: dict[str, Any] = {"max_tokens": 1000, "device": CPU, "ranks": OneProcess(), "keep_idle": False}
    return prepare(credited, **(settings | overrides))


def one_of_two(rank: int) -> OneProcess:
    ranks = OneProcess()
    ranks.rank, ranks.size = rank, 2
    return ranks


def with_values(item: CreditedTrajectory) -> CreditedTrajectory:
    """Asked at the first token of each step."""
    zeros = [[0.0] * len(row) for row in item.advantages]
    targets = [[1.0 if i == 0 else None for i in range(len(row))] for row in item.advantages]
    return replace(item, values=zeros, value_targets=targets)


def three() -> list[CreditedTrajectory]:
    """2 + 1 tokens, 1 token whose advantage is 0, and a trajectory without any: 4 tokens, 3 steps, 2 trajectories."""
    first = trajectory(step([1], [2, 3], [-0.1, -0.2]), step([9], [8], [-0.3]), name="first")
    idle = trajectory(step([4], [5], [-0.4]), name="idle")
    empty = trajectory(step([6], []), name="empty")
    return [
        CreditedTrajectory(trajectory=first, advantages=[[1.0, 2.0], [3.0]]),
        CreditedTrajectory(trajectory=idle, advantages=[[0.0]]),
        CreditedTrajectory(trajectory=empty, advantages=[[]]),
    ]


def test_counts_include_idle_segments_and_packs_do_not() -> None:
    batch = made(three())
    assert (batch.counts.tokens, batch.counts.steps, batch.counts.trajectories) == (4, 3, 2)
    assert batch.num_segments == 2  # both of `first`: its second prompt is a new one
    assert [p.columns_T.tolist() for p in batch.packs] == [[0, 1, 2]]
    assert made(three(), keep_idle=True).num_segments == 3


def test_columns_by_hand() -> None:
    columns = made(three()).columns
    assert columns.old_logprobs_R.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert columns.advantages_R.tolist() == [1, 2, 3, 0]
    assert columns.step_sizes_R.tolist() == [2, 2, 1, 1]
    assert columns.trajectory_sizes_R.tolist() == [3, 3, 3, 1]
    assert columns.importance_R.tolist() == [1, 1, 1, 1]
    assert columns.values_R is columns.targets_R is None
    taken = columns.at(torch.tensor([3, 0]))
    assert taken.advantages_R.tolist() == [0, 1]


def test_only_tokens_with_a_target_are_counted() -> None:
    batch = made([with_values(item) for item in three()], keep_idle=True)
    assert batch.num_targets == 3  # one per step with a response
    assert batch.columns.targets_R is not None
    assert batch.columns.targets_R.isnan().tolist() == [False, True, False, False]
    assert made(three()).num_targets == 0


def test_values_of_some_trajectories_alone_are_not_used() -> None:
    # left in, the columns of values would be shorter than the others and every later token would read another's value
    first, *rest = three()
    assert made([first, *map(with_values, rest)]).columns.values_R is None


def test_ranks_share_the_counts_and_divide_the_packs() -> None:
    credited = random_credited(random.Random(0), kind="mixed", count=5)
    for index, item in enumerate(credited):  # rows a, b, a, b, a
        credited[index] = replace(item, trajectory=replace(item.trajectory, row_id="ab"[index % 2]))
    whole = made(credited, keep_idle=True)
    shares = [made(credited, keep_idle=True, ranks=one_of_two(rank)) for rank in (0, 1)]
    assert all(share.counts == whole.counts for share in shares)
    assert all(share.num_segments == whole.num_segments for share in shares)
    held = [i for share in shares for part in share.packs for i in part.columns_T.tolist()]
    assert sorted(held) == sorted(i for part in whole.packs for i in part.columns_T.tolist())
    for share in shares:  # a row stays on one rank
        assert len({i % 2 for part in share.packs for i in part.trajectory_ids_T.tolist()}) == 1


def test_rows_go_to_the_rank_with_the_fewest_tokens() -> None:
    def segment(index: int, tokens: int) -> Segment:
        return Segment(trajectory_id=index, token_ids=[0] * tokens, trained=[], columns=[], step_indices=[])

    # a has 3 + 4 = 7 tokens, b 6, c 5, d 2: a -> rank 0, b -> 1, c -> 1 has 6 < 7, d -> 0 has 7 < 11
    segments = [segment(0, 3), segment(1, 6), segment(2, 4), segment(3, 5), segment(4, 2)]
    rows = ["a", "b", "a", "c", "d"]
    assert assign_rows(segments, rows, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert assign_rows(segments, rows, 1) == dict.fromkeys("abcd", 0)
    assert assign_rows([], [], 2) == {}


def test_a_column_is_filled_only_at_the_tokens_of_its_packs() -> None:
    batch = made(three())

    def ask(part: Pack) -> torch.Tensor:
        return part.targets_T.float()

    asked = batch.share.column(ask, batch.columns.advantages_R)
    assert asked[:3].tolist() == [2, 3, 8]
    assert math.isnan(asked[3])  # idle
    nothing = Share(packs=[], fillers=[], ranks=OneProcess())
    assert nothing.column(ask, torch.zeros(2)).isnan().all()
    assert nothing.column(ask, torch.zeros(0)).numel() == 0


def test_a_correction_replaces_the_old_logprobs_and_keeps_the_samplers() -> None:
    batch = made(three())
    corrected = with_own_logprobs(batch, lambda part: torch.zeros(part.num_trained), correction("truncate")).columns
    assert corrected.old_logprobs_R[:3].tolist() == [0, 0, 0]
    assert corrected.sampler_logprobs_R is batch.columns.old_logprobs_R
    # ratios e^0.1, e^0.2, e^0.3; the idle token was not asked about and keeps weight 1
    assert corrected.importance_R.tolist() == pytest.approx([math.exp(0.1), math.exp(0.2), math.exp(0.3), 1])


def test_the_layout_counts_packs_segments_steps_and_tokens() -> None:
    batch = made(three(), keep_idle=True, max_tokens=5)
    # segments [1 2 3], [9 8], [4 5] into packs of 5: (3 + 2) and (2)
    counted = {"packs": 2, "segments": 3, "steps": 3, "tokens_trained": 4, "tokens_computed": 7, "tokens_flat": 7}
    assert layout(batch.packs) == counted
    assert layout([]) == dict.fromkeys(counted, 0)


@pytest.mark.parametrize("column", ["old_logprobs_R", "advantages_R", "importance_R", "values_R", "targets_R"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_culprits_are_the_trajectories_with_a_number_that_is_not_finite(column: str, value: float) -> None:
    batch = made([with_values(item) for item in three()], keep_idle=True, max_tokens=3)
    logprobs = [torch.zeros(part.num_trained) for part in batch.packs]
    assert culprits(batch, logprobs) == []
    poisoned = getattr(batch.columns, column).clone()
    poisoned[3] = value
    named = culprits(batch.with_columns(**{column: poisoned}), logprobs)
    # a target that is NaN is how "not asked" is written
    assert named == ([] if column == "targets_R" and math.isnan(value) else ["idle"])
