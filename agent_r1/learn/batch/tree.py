"""Token trees: a prefix that several segments share is computed once, and every token still sees exactly its own past.

Attempts at one row share their prompt, and often the first tokens after it. Sorted, segments with a common prefix are
neighbours; laid out in that order, each adds only the rows that the ones before it do not have:

    [1 2 3 4 5]    rows 0 1 2 3 4    a run of 5 rows, whose path is rows 0 1 2 3 4
    [1 2 3 8]      row  5            a run of 1 row, whose path is rows 0 1 2 5
    [1 2 3 8 9]    row  6            extends that run: now 2 rows, path 0 1 2 5 6

A run is a stretch of rows that follow each other both in the pack and on a path from the root. So attention needs no
mask: a run is a causal sequence, except that the keys of its first tokens are gathered along its path, because another
run computed them. In a pack of separate segments, every run is its own path.

Knows token ids and rows; knows no trajectories, losses or models.

Shape suffixes: N = rows of a pack, K = rows of the paths of all its runs, one path after the other: more than N if rows
lie on several paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
PrefixSharing = Literal["auto", "on", "off"]

# Joining segments saves rows in every layer but gathers keys and values in every attention: the factor by which rows
# must shrink for that to pay, by type of device. CPU: forward and backward on one x86 core, models of width 64 and 256,
# groups of 2 and 8 segments of 128 and 512 tokens: 1.02 tends to lose, 1.05 is about even, 1.15 gained at least 5 %
# everywhere. CUDA: `python -m benchmarks.speed learner --only sharing`, H200, 16 groups of 8, 135M model: even at 1.12,
# 3 % gained at 1.21.
BREAK_EVEN = {"cpu": 1.15, "cuda": 1.2}


def break_even(prefix_sharing: PrefixSharing, device: torch.device) -> float:
    """Return by what factor rows must shrink for segments to be joined; infinite for devices that were not measured."""
    return {"on": 1.0, "off": math.inf, "auto": BREAK_EVEN.get(device.type, math.inf)}[prefix_sharing]


# Not frozen, though nothing changes it: torch.compile (2.11) guards every field of a frozen dataclass and would compile
# the layers again for every other length. Here it guards only the type and the tensors that are read.
@dataclass(slots=True, kw_only=True, eq=False)
class PackLayout:
    """The layout of a pack's rows, for attention. Opaque to compiled layers."""

    query_lengths: tuple[int, ...]  # rows of each run; they sum to N
    key_lengths: tuple[int, ...]  # rows of each run's path; they sum to K
    query_starts: Tensor  # cumulative sums from 0, in int32 as kernels expect: one more than there are runs
    key_starts: Tensor
    gather_K: Tensor | None  # the paths; None: every path is its run, so K is N
    longest: Tensor  # the most rows of a run and of a path, on the CPU; an int would be compiled in

    @classmethod
    def of(cls, query_lengths: Sequence[int], key_lengths: Sequence[int], gather_K: Tensor | None) -> PackLayout:
        return cls(
            query_lengths=tuple(query_lengths),
            key_lengths=tuple(key_lengths),
            query_starts=_starts(query_lengths),
            key_starts=_starts(key_lengths),
            gather_K=gather_K,
            longest=_static([max(query_lengths, default=0), max(key_lengths, default=0)]),
        )

    @classmethod
    def flat(cls, lengths: Sequence[int]) -> PackLayout:
        """Separate sequences."""
        return cls.of(lengths, lengths, None)

    def to(self, device: torch.device) -> PackLayout:
        return replace(
            self,
            query_starts=self.query_starts.to(device, non_blocking=True),
            key_starts=self.key_starts.to(device, non_blocking=True),
            gather_K=None if self.gather_K is None else self.gather_K.to(device, non_blocking=True),
        )


def _static(numbers: list[int]) -> Tensor:
    """Keep torch.compile from identifying the size with another one that is equal by chance."""
    tensor = torch.tensor(numbers)
    torch._dynamo.mark_static(tensor)
    return tensor


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Trees, laid out row by row."""

    token_ids_N: IntArray
    depths_N: IntArray  # the position of a token in every segment that it is part of
    paths: list[IntArray]  # rows of the tokens of each segment, tree by tree
    layout: PackLayout


def lay_out(trees: Sequence[Sequence[IntArray]]) -> Rows:
    """Trees of segments (token ids) in lexicographic order, one tree after the other."""
    added: list[IntArray] = []  # the new tokens of each segment
    depths: list[IntArray] = []
    paths: list[IntArray] = []
    runs: list[tuple[int, IntArray]] = []  # number of rows, and path
    row = 0
    for tree in trees:
        previous, path = np.empty(0, np.int64), np.empty(0, np.int64)
        for index, ids in enumerate(tree):
            shared = common_prefix(previous, ids)
            new = len(ids) - shared
            path = np.concatenate([path[:shared], np.arange(row, row + new)])
            if index and shared == len(previous):  # extends the last run
                runs[-1] = (runs[-1][0] + new, path)
            else:
                runs.append((new, path))
            added.append(ids[shared:])
            depths.append(np.arange(shared, len(ids)))
            paths.append(path)
            previous, row = ids, row + new
    keys = [path for _, path in runs]
    is_flat = sum(map(len, keys)) == row
    return Rows(
        token_ids_N=np.concatenate(added),
        depths_N=np.concatenate(depths),
        paths=paths,
        layout=PackLayout.of(
            [rows for rows, _ in runs],
            [len(path) for path in keys],
            None if is_flat else torch.from_numpy(np.concatenate(keys)),
        ),
    )


def count_rows(tree: Sequence[IntArray]) -> int:
    """The rows of a tree in lexicographic order."""
    return len(tree[0]) + sum(len(ids) - common_prefix(before, ids) for before, ids in pairwise(tree))


def common_prefix(a: IntArray, b: IntArray) -> int:
    """The length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Segments that are laid out together."""

    ranks: list[int]  # positions of its segments in the lexicographic order; ascending
    num_rows: int  # an upper bound


def grow_trees(segments: Sequence[IntArray], max_rows: int, break_even: float) -> list[list[int]]:
    """Choose which segments to lay out together, each tree in lexicographic order. Deterministic.

    From the leaves to the root: segments that share their first d tokens are joined if that leaves `break_even` times
    fewer rows, as far as `max_rows` allows; otherwise each part computes the d tokens itself. This is decided at every
    depth, so a BOS token or a short system prompt common to all rows does not join unrelated segments.
    """
    if math.isinf(break_even):
        return [[index] for index in range(len(segments))]
    # Big-endian bytes compare like the ids they hold, and in one call. Ids of pictures are negative and need 8 of them.
    width = ">u8" if any(len(ids) and ids.min() < 0 for ids in segments) else ">u4"
    order = sorted(range(len(segments)), key=lambda index: (segments[index].astype(width).tobytes(), index))
    done: list[Tree] = []
    # Pairs of a depth and the trees that share their first `depth` tokens and may still be joined. Depths ascend.
    waiting: list[tuple[int, list[Tree]]] = [(0, [])]
    for rank, index in enumerate(order):
        shared = common_prefix(segments[order[rank - 1]], segments[index]) if rank else 0
        if shared > waiting[-1][0]:
            waiting.append((shared, [waiting[-1][1].pop()]))  # the tree of the previous segment
        done += _close(waiting, shared, max_rows, break_even)
        waiting[-1][1].append(Tree(ranks=[rank], num_rows=len(segments[index])))
    done += _close(waiting, 0, max_rows, break_even) + waiting[0][1]
    return sorted(([order[rank] for rank in tree.ranks] for tree in done), key=min)


def _close(waiting: list[tuple[int, list[Tree]]], shared: int, max_rows: int, break_even: float) -> list[Tree]:
    """Join the waiting trees that share more than `shared` tokens; no later tree does. Returns finished trees.

    Trees that do not fit together share even less with others, so only the smallest of them keeps waiting.
    """
    done: list[Tree] = []
    while waiting[-1][0] > shared:
        depth, trees = waiting.pop()
        bins = first_fit([tree.num_rows - depth for tree in trees], max_rows - depth)
        *full, smallest = sorted(([trees[i] for i in members] for members in bins), key=_num_rows, reverse=True)
        done += chain.from_iterable(_join(some, depth, break_even) for some in full)
        if waiting[-1][0] < shared:
            waiting.append((shared, []))
        waiting[-1][1].extend(_join(smallest, depth, break_even))
    return done


def _num_rows(trees: list[Tree]) -> int:
    return sum(tree.num_rows for tree in trees)


def _join(trees: list[Tree], depth: int, break_even: float) -> list[Tree]:
    """Make one tree of those that share their first `depth` tokens, if that pays."""
    apart = _num_rows(trees)
    together = apart - depth * (len(trees) - 1)
    if apart < break_even * together:
        return trees
    return [Tree(ranks=sorted(chain.from_iterable(tree.ranks for tree in trees)), num_rows=together)]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: large items first, each into the first bin with room. Members of a bin keep their order.

    An item larger than a bin gets a bin of its own, which only items of size 0 may join.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        crowded = size > 0 and 2 * size > capacity  # every bin holds an item at least as large, so none has room
        slot = None if crowded else next((i for i, free in enumerate(room) if size <= max(free, 0)), None)
        if slot is None:
            bins.append([index])
            room.append(capacity - size)
        else:
            bins[slot].append(index)
            room[slot] -= size
    return [sorted(members) for members in bins]
