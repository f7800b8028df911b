"""Time and memory of a training step from the sizes of a model, by formulas with measured constants.

`measured.json` holds the constants with their sources. Nothing here knows recipes or parallel layouts. Times are
seconds on one GPU; docs/scaling.md explains the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent_r1.learn.sizes import MAX_LOGITS, RESERVE
from agent_r1.plan.shapes import MEASURED, Shape

GIB = 2**30
LOGITS_BYTES = 3 * 4 * MAX_LOGITS  # of a chunk: logits, log-probs and gradient in fp32


def training_flops(
    lengths: Iterable[int],
    *,
    trained: int,
    body_parameters: int,
    head_parameters: int,
    attention_width: int,
    per_weight: float = 6.0,
) -> float:
    """FLOPs that one forward and backward pass over sequences of these lengths needs.

    2 FLOPs per weight and token forward and 4 backward; the output head only where a token is trained. Attention: a
    causal sequence of L tokens has L(L+1)/2 pairs of a query and a key, each with 4 FLOPs (score and sum) per unit of
    `attention_width` (layers x heads x head size) forward, and twice that backward.
    """
    sizes = list(lengths)
    pairs = sum(length * (length + 1) // 2 for length in sizes)
    weights = body_parameters * sum(sizes) + head_parameters * trained
    return per_weight * weights + 2.0 * per_weight * attention_width * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU relative to the measured one."""

    name: str
    memory_gib: float
    flops: float
    bytes: float
    source: str

    @property
    def usable_bytes(self) -> float:
        return (1 - RESERVE) * self.memory_gib * GIB

    @property
    def matmul_flops(self) -> float:
        return float(MEASURED["matmul_flops"]["value"]) * self.flops

    def share(self, name: str, shape: Shape) -> float:
        """A measured share of `matmul_flops`, for a model of this size."""
        return between(MEASURED[name]["by_parameters"], shape.parameters) * self.matmul_flops


def gpu_of(name: str) -> Gpu:
    """Raises KeyError for one without constants."""
    return Gpu(name=name, **MEASURED["gpus"][name])


def between(points: Sequence[Sequence[float]], x: float) -> float:
    """Interpolate linearly in log x; the first and last values hold beyond the ends."""
    for (low, before), (high, after) in pairwise(points):
        if x <= high:
            weight = max(0.0, math.log(x / low) / math.log(high / low))
            return before + weight * (after - before)
    return points[-1][1]


def decode_pass_seconds(shape: Shape, gpu: Gpu, *, sequences: float, context: float, split: int = 1) -> float:
    """One token for each sequence: start the kernels, read weights and cache, multiply. `split` GPUs share a model."""
    weights = shape.body_parameters + shape.head_parameters
    read = (2 * weights + sequences * context * shape.kv_bytes) / (MEASURED["copy_bytes"]["value"] * gpu.bytes)
    products = 2 * weights * sequences / gpu.share("decode_share", shape)
    return float(shape.layers * MEASURED["layer_seconds"]["value"] + (read + products) / split)


def prefill_seconds(shape: Shape, gpu: Gpu, *, tokens: float, context: float = 0.0) -> float:
    """Compute prompt tokens that attend to `context` tokens on average."""
    flops = 2 * shape.body_parameters * tokens + 4 * shape.attention_width * tokens * context
    return flops / gpu.share("prefill_share", shape)


def host_seconds(calls: float) -> float:
    """Host time of each model call: rendering, parsing, scheduling."""
    return float(MEASURED["call_seconds"]["value"]) * calls


def update_seconds(shape: Shape, gpu: Gpu, flops: float) -> float:
    return flops / gpu.share("learner_mfu", shape)


def activation_bytes(shape: Shape, tokens: float, *, checkpointing: bool, mlp_chunk: int | None = None) -> float:
    """Memory of a pack for its backward pass, without gradients."""
    chunk = 0.0 if mlp_chunk is None else min(tokens, mlp_chunk) * _factor() * shape.mlp_bytes
    return tokens * bytes_per_token(shape, checkpointing=checkpointing, in_chunks=chunk > 0) + chunk + LOGITS_BYTES


def bytes_per_token(shape: Shape, *, checkpointing: bool, in_chunks: bool) -> float:
    """Of activations. With checkpointing: one fp32 input per layer, and one whole layer. Without MLPs in chunks."""
    one_layer = _factor() * (shape.activation_bytes - shape.mlp_bytes * in_chunks)
    return 4 * shape.layers * shape.hidden + one_layer if checkpointing else shape.layers * one_layer


def _factor() -> float:
    return float(MEASURED["activation_factor"]["value"])
