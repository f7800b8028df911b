"""The sums behind the tables: what the hardware would allow, what a training step has to compute, and ratios.

Plain numbers in, plain numbers out; nothing here knows models or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median


def floor_tokens_per_second(
    *, sequences: int, context: float, weight_bytes: int, kv_bytes_per_token: int, bytes_per_second: float
) -> float:
    """Decoding if all it took were reading the weights and every sequence's keys and values once per token."""
    step_bytes = weight_bytes + sequences * context * kv_bytes_per_token
    return sequences * bytes_per_second / step_bytes


def training_flops(
    lengths: Iterable[int], *, trained: int, body_parameters: int, head_parameters: int, attention_width: int
) -> float:
    """Of one forward and backward pass over sequences of these lengths, as far as they are needed.

    2 FLOPs per weight and token forward and 4 backward; the output head only where a token is trained. Attention: a
    causal sequence of L tokens has L(L+1)/2 pairs of a query and a key, each with 4 FLOPs (score and sum) per unit of
    `attention_width` (layers x heads x head size) forward, and twice that backward.
    """
    sizes = list(lengths)
    pairs = sum(length * (length + 1) // 2 for length in sizes)
    return 6.0 * (body_parameters * sum(sizes) + head_parameters * trained) + 12.0 * attention_width * pairs


def medians(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every figure over the repeats. A ratio's median is that of the ratios within repeats."""
    return {name: median(repeat[name] for repeat in repeats) for name in repeats[0]}


def break_even(points: Iterable[tuple[float, float]]) -> float | None:
    """The sharing factor from which on the speed-up is at least 1, between measured (factor, speed-up) points.

    Interpolated where the speed-up last crosses 1; the smallest factor if it never is below, None if it ends below.
    """
    ordered = sorted(points)
    if ordered[-1][1] < 1:
        return None
    for (below, slow), (above, fast) in reversed(list(pairwise(ordered))):
        if slow < 1:
            return below + (above - below) * (1 - slow) / (fast - slow)
    return ordered[0][0]
