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
FORWARD_MOVES = 1 / 3  # share of a pass without gradients in what a forward and a backward pass move


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

    2 FLOPs per weight and token forward and 4 backward, of which frozen weights save 2; the output head only where a
    token is trained. Attention: a causal sequence of L tokens has L(L+1)/2 pairs of a query and a key, each with 4
    FLOPs (score and sum) per unit of `attention_width` (layers x heads x head size) forward, and twice that backward,
    whether weights are frozen or not.
    """
    sizes = list(lengths)
    weights = body_parameters * sum(sizes) + head_parameters * trained
    return per_weight * weights + 12.0 * attention_width * sum(causal_pairs(length) for length in sizes)


def causal_pairs(length: float) -> float:
    return length * (length + 1) / 2


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
    def copy_bytes(self) -> float:
        return measured("copy_bytes") * self.bytes

    @property
    def matmul_flops(self) -> float:
        return measured("matmul_flops") * self.flops

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
    read = (2 * weights + sequences * context * shape.kv_bytes) / gpu.copy_bytes
    products = 2 * weights * sequences / gpu.share("decode_share", shape)
    return shape.layers * measured("layer_seconds") + (read + products) / split


def prefill_seconds(shape: Shape, gpu: Gpu, *, tokens: float, context: float = 0.0) -> float:
    """Compute prompt tokens that attend to `context` tokens on average."""
    flops = 2 * shape.body_parameters * tokens + 4 * shape.attention_width * tokens * context
    return flops / gpu.share("prefill_share", shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to run a training step."""

    name: str
    settings: str = ""  # that select it, as words of a command
    adapter_rank: int | None = None  # None: all weights are trained
    checkpointing: bool = False
    offload: bool = False
    eight_bit: bool = False  # AdamW's moments
    mlp_chunk: int | None = None  # tokens
    split: int = 1  # GPUs that share one engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the learner computes in a step. A prompt that a group shares is computed once."""

    tokens: float
    pairs: float  # of a query and a key that it sees
    trained: float  # tokens whose logits are needed


def update_seconds(shape: Shape, gpu: Gpu, batch: Batch, method: Method) -> float:
    """A forward and a backward pass, and AdamW.

    In units of a forward pass, products with weights cost 3 (2 if the weights are frozen) and attention 3;
    checkpointing adds 1 to both. The head is computed once more for its backward pass. AdamW reads the gradient, the
    weight and both moments of a parameter and writes the last three: 28 bytes.
    """
    products, again = (3 if method.adapter_rank is None else 2), int(method.checkpointing)
    multiplied = _product_seconds(shape, gpu, batch, body=products + again, head=products + 1, attention=3 + again)
    moved = _moved_bytes(shape, batch, kept=1 + FORWARD_MOVES * again, logits=1)
    return multiplied + (moved + 28 * shape.trained_parameters(method.adapter_rank)) / gpu.copy_bytes


def forward_seconds(shape: Shape, gpu: Gpu, batch: Batch) -> float:
    """A pass without gradients."""
    moved = _moved_bytes(shape, batch, kept=FORWARD_MOVES, logits=FORWARD_MOVES)
    return _product_seconds(shape, gpu, batch, body=1, head=1, attention=1) + moved / gpu.copy_bytes


def _product_seconds(shape: Shape, gpu: Gpu, batch: Batch, *, body: int, head: int, attention: int) -> float:
    weights = body * shape.body_parameters * batch.tokens + head * shape.head_parameters * batch.trained
    scores = attention * shape.attention_width * batch.pairs
    return (2 * weights / measured("learner_products") + 4 * scores / measured("learner_attention")) / gpu.matmul_flops


def _moved_bytes(shape: Shape, batch: Batch, *, kept: float, logits: float) -> float:
    """Return the bytes moved by everything but matrix products: norms, activations, rotations, sums, softmax."""
    activations = measured("learner_moves") * batch.tokens * shape.layers * shape.activation_bytes
    return kept * activations + logits * measured("logit_moves") * batch.trained * 4 * shape.vocabulary


def activation_bytes(shape: Shape, tokens: float, method: Method, *, shared_base: bool) -> float:
    """Memory of a pack for its backward pass, without gradients of weights.

    shared_base: the base below adapters is in bf16, and so is what layers pass on.
    """
    packs = tokens * bytes_per_token(shape, method, shared_base=shared_base) + LOGITS_BYTES
    if method.mlp_chunk is None:
        return packs
    one_mlp = measured("activation_factor") * shape.mlp_bytes + _backward_bytes(shape, method)
    return packs + min(tokens, method.mlp_chunk) * one_mlp


def bytes_per_token(shape: Shape, method: Method, *, shared_base: bool) -> float:
    """Of activations, without MLPs in chunks. With checkpointing: the input of each layer, and one whole layer."""
    in_chunks = method.mlp_chunk is not None
    layer = measured("activation_factor") * (shape.activation_bytes - shape.mlp_bytes * in_chunks)
    passing = 0.0 if in_chunks else _backward_bytes(shape, method)
    if method.checkpointing:
        width = 2 if shared_base and method.adapter_rank is not None else 4
        return width * shape.layers * shape.hidden + layer + passing
    return shape.layers * layer + passing


def _backward_bytes(shape: Shape, method: Method) -> float:
    """Of a token while the backward pass is in an MLP: the gradient of its widest vector, in bf16. Below adapters that
    gradient comes over two paths, and peft makes an fp32 copy of the vector: 8 bytes, which agree with both sizes that
    were measured with adapters."""
    return (2.0 if method.adapter_rank is None else 8.0) * shape.intermediate


def measured(name: str) -> float:
    return float(MEASURED[name]["value"])
