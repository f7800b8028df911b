from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learn.batch.minibatch import layout
from agent_r1.learn.batch.packs import Pack, Segment, merge_steps, pack
from agent_r1.learn.batch.tree import (
    BREAK_EVEN,
    IntArray,
    PackLayout,
    PrefixSharing,
    break_even,
    common_prefix,
    count_rows,
    first_fit,
    grow_trees,
    lay_out,
)
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import Trajectory
from tests.learn.builders import (
    VOCABULARY,
    credit_for,
    gradients_of,
    learner_for,
    on_policy,
    random_groups,
    step,
    tiny_model,
    trajectory,
)

CPU = torch.device("cpu")
# Few different tokens, so that many segments start alike.
token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def arrays(*sequences: Iterable[int]) -> list[IntArray]:
    return [np.array(list(ids), dtype=np.int64) for ids in sequences]


def segment(ids: Sequence[int], index: int, columns: Iterable[int]) -> Segment:
    """Everything after the first token is trained."""
    trained = list(range(1, len(ids)))
    return Segment(
        trajectory_id=index,
        token_ids=list(ids),
        trained=trained,
        columns=list(columns),
        step_indices=[0] * len(trained),
    )


def segments_of(sequences: Sequence[Sequence[int]]) -> list[Segment]:
    """Columns count on from segment to segment."""
    starts = np.cumsum([0, *(len(ids) - 1 for ids in sequences)])
    return [
        segment(ids, index, range(start, start + len(ids) - 1))
        for index, (ids, start) in enumerate(zip(sequences, starts.tolist(), strict=False))
    ]


# Laying out.


def test_the_tree_of_the_module_header_by_hand() -> None:
    rows = lay_out([arrays([1, 2, 3, 4, 5], [1, 2, 3, 8], [1, 2, 3, 8, 9])])
    assert rows.token_ids_N.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert rows.depths_N.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert [path.tolist() for path in rows.paths] == [[0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 5, 6]]
    assert rows.layout.query_lengths == (5, 2)
    assert rows.layout.key_lengths == (5, 5)
    assert rows.layout.gather_K is not None
    assert rows.layout.gather_K.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert (rows.layout.query_starts.tolist(), rows.layout.key_starts.tolist()) == ([0, 5, 7], [0, 5, 10])
    assert rows.layout.query_starts.dtype == rows.layout.key_starts.dtype == torch.int32


@pytest.mark.parametrize(
    "trees",
    [
        [arrays([1, 2, 3]), arrays([1, 2])],  # separate: nothing is shared although both start alike
        [arrays([1, 2], [1, 2, 3], [1, 2, 3, 4])],  # each goes on where the one before ends
        [arrays([1, 2], [1, 2], [1, 2])],  # all the same
    ],
)
def test_nothing_is_gathered_if_no_row_lies_on_two_paths(trees: list[list[IntArray]]) -> None:
    rows = lay_out(trees)
    assert rows.layout.gather_K is None
    assert rows.layout.query_lengths == rows.layout.key_lengths


def test_a_flat_layout_is_one_run_per_sequence() -> None:
    flat = PackLayout.flat((3, 2))
    assert (flat.query_lengths, flat.key_lengths, flat.gather_K) == ((3, 2), (3, 2), None)
    assert flat.key_starts.tolist() == [0, 3, 5]
    assert flat.to(CPU).query_starts.tolist() == [0, 3, 5]


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    length = common_prefix(*arrays(a, b))
    assert a[:length] == b[:length]
    assert a[length : length + 1] != b[length : length + 1] or length == len(a) == len(b)


# Growing.


def test_segments_that_start_alike_become_one_tree_in_lexicographic_order() -> None:
    segments = arrays([1, 2, 9], [5, 6], [1, 2, 3], [5, 6, 7], [4])
    assert grow_trees(segments, 100, 1.0) == [[2, 0], [1, 3], [4]]
    assert grow_trees(segments, 100, float("inf")) == [[0], [1], [2], [3], [4]]


def test_joining_has_to_pay() -> None:
    # apart 5 + 5 = 10 rows, together 8: 1.25 times fewer
    segments = arrays([1, 2, 3, 4, 5], [1, 2, 6, 7, 8])
    assert grow_trees(segments, 100, 1.25) == [[0, 1]]
    assert grow_trees(segments, 100, 1.26) == [[0], [1]]


def test_a_short_common_prefix_does_not_join_unrelated_groups() -> None:
    # two pairs that share 9 of 10 tokens (20 rows apart, 11 together); all four share the first (22 rows, 21)
    start, one, other = [0], [1] * 8, [2] * 8
    segments = arrays([*start, *one, 3], [*start, *other, 3], [*start, *one, 4], [*start, *other, 4])
    assert grow_trees(segments, 100, 1.15) == [[0, 2], [1, 3]]
    assert grow_trees(segments, 100, 1.0) == [[0, 2, 1, 3]]


def test_a_tree_that_is_too_large_is_split_where_little_is_shared() -> None:
    # two pairs of 8 + 2 rows = 10 + 2 = 12 rows each; all share 2 tokens: 22 rows together
    start, one, other = [0, 0], [1] * 6, [2] * 6
    segments = arrays([*start, *one, 3, 3], [*start, *other, 3, 3], [*start, *one, 4, 4], [*start, *other, 4, 4])
    assert grow_trees(segments, 22, 1.0) == [[0, 2, 1, 3]]
    assert grow_trees(segments, 21, 1.0) == [[0, 2], [1, 3]]  # not three and one
    assert grow_trees(segments, 11, 1.0) == [[0], [1], [2], [3]]


def test_a_contained_segment_fits_into_a_full_tree() -> None:
    # [1 2] costs no row beside [1 2 3 4], which alone is larger than a pack
    assert grow_trees(arrays([1, 2, 3, 4], [1, 2], [1, 2]), 3, 1.0) == [[1, 2, 0]]


def test_a_tree_with_thousands_of_branches_does_not_recurse_deeply() -> None:
    # each segment shares one token more with the next than with the one before
    segments = arrays(*([1] * depth + [0] for depth in range(1, 1500)))
    trees = grow_trees(segments, 100, 1.0)
    assert sorted(chain.from_iterable(trees)) == list(range(len(segments)))
    assert all(len(tree) == 1 or count_rows([segments[i] for i in tree]) <= 100 for tree in trees)


def test_the_bins_of_first_fit_decreasing_by_hand() -> None:
    assert first_fit([3, 6, 4, 2], 8) == [[1, 3], [0, 2]]
    assert first_fit([9, 1, 0], 8) == [[0, 2], [1]]  # 9 has a bin of its own, in which 0 still fits
    assert first_fit([], 8) == []


def test_the_break_even_by_mode_and_device() -> None:
    assert break_even("off", CPU) == float("inf")
    assert break_even("on", CPU) == 1.0
    assert break_even("auto", CPU) == BREAK_EVEN["cpu"] > 1
    assert break_even("auto", torch.device("cuda", 1)) == BREAK_EVEN["cuda"] > 1
    assert break_even("auto", torch.device("meta")) == float("inf")  # never measured


# Packing.


@given(token_lists)
def test_every_distinct_prefix_is_computed_once(sequences: list[list[int]]) -> None:
    (packed,) = pack(segments_of(sequences), 10_000, prefix_sharing="on")
    prefixes = {tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))}
    assert packed.num_tokens == len(prefixes)
    assert sum(packed.lengths) == sum(map(len, sequences))


@given(token_lists, st.integers(1, 30), st.sampled_from(["on", "auto", "off"]))
def test_every_trained_token_sees_exactly_its_own_segment(
    sequences: list[list[int]], budget: int, prefix_sharing: PrefixSharing
) -> None:
    segments = segments_of(sequences)
    packs = pack(segments, budget, prefix_sharing=prefix_sharing)
    expected = {
        column: (each.trajectory_id, each.token_ids[: at + 1])
        for each in segments
        for column, at in zip(each.columns, each.trained, strict=True)
    }
    got = {}
    for packed in packs:
        paths = visible_rows(packed)
        for source, target, column, owner in zip(
            *(t.tolist() for t in (packed.sources_T, packed.targets_T, packed.columns_T, packed.trajectory_ids_T)),
            strict=True,
        ):
            seen = paths[source]
            assert packed.position_ids_N[seen].tolist() == list(range(len(seen)))
            assert column not in got
            got[column] = (owner, [*packed.input_ids_N[seen].tolist(), target])
    assert got == expected
    assert all(packed.num_tokens <= budget or len(packed.layout.query_lengths) == 1 for packed in packs)


def visible_rows(packed: Pack) -> dict[int, list[int]]:
    """For every row the rows that it sees, itself last: what the layout says, without any kernel."""
    made = packed.layout
    keys = list(range(packed.num_tokens)) if made.gather_K is None else made.gather_K.tolist()
    seen, query, key = {}, 0, 0
    for rows, past in zip(made.query_lengths, made.key_lengths, strict=True):
        for i in range(rows):
            seen[query + i] = keys[key : key + past - rows + i + 1]
            assert seen[query + i][-1] == query + i
        query, key = query + rows, key + past
    assert (query, key) == (packed.num_tokens, len(keys))
    return seen


def test_two_attempts_that_say_the_same_share_rows_but_not_columns() -> None:
    same = [trajectory(step([1, 2], [3, 4])), trajectory(step([1, 2], [3, 4])), trajectory(step([1, 2], [3, 5]))]
    (packed,) = pack(merge_steps(same), 100, prefix_sharing="on")
    assert packed.input_ids_N.tolist() == [1, 2, 3, 4, 5]
    assert packed.sources_T.tolist() == [1, 2, 1, 2, 1, 2]
    assert packed.targets_T.tolist() == [3, 4, 3, 4, 3, 5]
    assert packed.columns_T.tolist() == [0, 1, 2, 3, 4, 5]
    assert packed.step_ids_T.tolist() == [0, 0, 1, 1, 2, 2]
    assert packed.trajectory_ids_T.tolist() == [0, 0, 1, 1, 2, 2]
    assert packed.lengths == (4, 4, 4)
    assert layout([packed])["tokens_computed"] == 5
    assert layout([packed])["tokens_flat"] == 12


# Training.


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def shared_prompts(rng: random.Random) -> list[Trajectory]:
    prompts = [ids(rng, 9), ids(rng, 6)]
    return [trajectory(step(prompt, ids(rng, 1 + i))) for prompt in prompts for i in range(4)]


def shared_responses(rng: random.Random) -> list[Trajectory]:
    prompt, said = ids(rng, 5), ids(rng, 6)
    return [trajectory(step(prompt, said[:i] + ids(rng, 4))) for i in (0, 2, 2, 4, 6)]


def branching_episodes(rng: random.Random) -> list[Trajectory]:
    """The first step is the same for all, the second for some, and one env rewrites its history."""
    prompt, first, tool, second = ids(rng, 4), ids(rng, 3), ids(rng, 3), ids(rng, 4)
    seen = [*prompt, *first, *tool]
    return [
        trajectory(step(prompt, first), step(seen, second), step([*seen, *second, 7], ids(rng, 3))),
        trajectory(step(prompt, first), step(seen, second), step([*seen, *second, 8], ids(rng, 2))),
        trajectory(step(prompt, first), step(seen, ids(rng, 5))),
        trajectory(step(prompt, first), step([*prompt, 9], ids(rng, 5))),
    ]


def one_inside_another(rng: random.Random) -> list[Trajectory]:
    prompt, said = ids(rng, 4), ids(rng, 7)
    return [trajectory(step(prompt, said[:n])) for n in (3, 7, 5)]


def identical(rng: random.Random) -> list[Trajectory]:
    return [trajectory(step(prompt, said)) for prompt, said in [(ids(rng, 5), ids(rng, 5))] * 3]


CASES = [shared_prompts, shared_responses, branching_episodes, one_inside_another, identical]
FAMILIES = ["llama", "qwen2-sliding", "qwen3", "gemma3"]  # all with grouped heads, two with sliding windows


def gradients(packs: list[Pack], weights_R: torch.Tensor, family: str) -> tuple[float, dict[str, Any]]:
    """Of a weighted sum of the log-probs, with a weight of its own for every response token."""
    policy = PolicyModel(tiny_model(family))
    loss = torch.zeros(())
    for packed in packs:
        loss = loss + (weights_R[packed.columns_T] * policy.logprobs(packed, temperature=0.9)[0]).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.model.named_parameters()}


def per_step(attempts: Sequence[Trajectory]) -> list[Segment]:
    """The definition: each step is a row of its own."""
    split = [trajectory(each) for attempt in attempts for each in attempt.steps]
    return merge_steps(split)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_trees_merged_segments_and_steps_give_the_same_loss_and_gradient(
    case: Callable[[random.Random], list[Trajectory]], family: str
) -> None:
    attempts = case(random.Random(1))
    merged = merge_steps(attempts)
    weights_R = torch.randn(sum(t.num_response_tokens for t in attempts), generator=torch.Generator().manual_seed(0))
    loss, expected = gradients(pack(per_step(attempts), 10_000), weights_R, family)
    layouts = {
        "merged": pack(merged, 10_000),
        "tree": pack(merged, 10_000, prefix_sharing="on"),
        "tree of steps": pack(per_step(attempts), 10_000, prefix_sharing="on"),
        "split tree": pack(merged, 18, prefix_sharing="on"),
    }
    assert layout(layouts["tree"])["tokens_computed"] < layout(layouts["merged"])["tokens_computed"]
    assert len(layouts["split tree"]) > 1 or case in (one_inside_another, identical)
    for packs in layouts.values():
        got_loss, got = gradients(packs, weights_R, family)
        assert got_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in expected.items():
            # relative to the largest element of each weight's gradient
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize(("name", "shared"), [("grpo", False), ("gspo", False), ("ppo", True), ("steppo", False)])
@pytest.mark.parametrize("max_tokens", [16, 10_000])
def test_a_learner_takes_the_same_step_whether_prefixes_are_shared_or_not(
    name: str, shared: bool, max_tokens: int
) -> None:
    rng = random.Random(3)
    groups = on_policy(random_groups(rng, kind="append"), PolicyModel(tiny_model("llama-tied")), rng, noise=0.2)

    def update(prefix_sharing: PrefixSharing) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        learner = learner_for(
            name,
            shared=shared,
            lr=1e-9,
            max_grad_norm=float("inf"),
            max_tokens_per_pack=max_tokens,
            prefix_sharing=prefix_sharing,
        )
        return learner.update(credit_for(name, groups, learner)), gradients_of(learner)

    (flat, expected), (tree, got) = update("off"), update("on")
    assert tree["tokens_computed"] < tree["tokens_flat"] == flat["tokens_computed"] == flat["tokens_flat"]
    assert tree["tokens_trained"] == flat["tokens_trained"]
    for metric in ("loss", "grad_norm", "entropy", "approx_kl"):
        assert tree[metric] == pytest.approx(flat[metric], rel=1e-4, abs=1e-6)
    for key, gradient in expected.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-5, atol=1e-5 * max(1.0, gradient.abs().max().item()))


def test_trees_whose_paths_are_many_times_their_rows_take_more_of_the_budget() -> None:
    """Keys are gathered along paths: packs of few rows and long paths would take more memory than their size says."""

    def group(first: int) -> list[Trajectory]:
        prompt = [first] * 100
        return [trajectory(step(prompt, [first, answer])) for answer in range(1, 33)]

    # A group of 32: 100 + 1 + 32 rows, since the first response token is shared too, and paths of 32 * 102 = 3,264
    # rows, which count as 3,264 / 8 = 408. Two of them fit into 1,000, by rows alone all four would.
    packs = pack(merge_steps([each for first in range(4) for each in group(first)]), 1000, prefix_sharing="on")
    assert [part.num_tokens for part in packs] == [266, 266]
    assert all(sum(part.layout.key_lengths) <= 8 * 1000 for part in packs)
