"""Draws tokens from next-token logits, for a whole batch with mixed settings.

The token of a row depends only on that row's logits, settings and uniform number, not on the rest of the batch.

Shape suffixes: B = rows, V = vocabulary, F = rows that use top-k or top-p, K = most ids that they keep.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.engines.base import Sampling
from agent_r1.types import Support

# The support of some tokens: how many ids top-k and top-p kept for each, and these ids. Both int32.
Kept = tuple[NDArray[np.int32], NDArray[np.int32]]


class _Streams(threading.local):
    """One generator per thread, reset to the start of each stream. Creating one per stream would read an unused seed
    from the operating system, which takes longer than drawing."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.start: Any = self.bits.state


_STREAMS = _Streams()


def uniform_stream(seed: int, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) for tokens 0 .. count-1 of a request; each depends only on the seed and the token's index."""
    _STREAMS.start["state"]["key"][0] = seed % 2**64
    _STREAMS.bits.state = _STREAMS.start
    return _STREAMS.generator.random(count)


def sample(
    logits_BV: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float], list[Kept | None]]:
    """Draw one token per row. Returns tokens, log-probs, and supports for settings with `keep_support`.

    The distribution is the softmax after temperature, then top-k, then top-p, renormalised. At temperature 0 the most
    likely token is taken, and its log-prob comes from the plain softmax. Computed in float64, because inverting a
    cumulative sum over 150,000 fp32 terms would misplace rare tokens.
    """
    temperature = [s.temperature for s in settings]
    greedy = [t == 0.0 for t in temperature]
    scores_BV, device = logits_BV.double(), logits_BV.device
    if any(t not in (0.0, 1.0) for t in temperature):
        divisor_B = torch.tensor([t or 1.0 for t in temperature], dtype=torch.float64, device=device)
        scores_BV = scores_BV / divisor_B[:, None]
    kept: list[Kept | None] = [None] * len(settings)
    filtered = [i for i, s in enumerate(settings) if s.temperature and (s.top_k or s.top_p < 1.0)]
    if filtered:
        rows_F = torch.tensor(filtered, device=device)
        top_k_F = torch.tensor([settings[i].top_k or scores_BV.shape[-1] for i in filtered], device=device)
        top_p_F = torch.tensor([settings[i].top_p for i in filtered], dtype=torch.float64, device=device)
        scores_FV = nucleus(scores_BV[rows_F], top_k_F, top_p_F)
        scores_BV = scores_BV.index_copy(0, rows_F, scores_FV)
        if widest := max(settings[i].top_k if settings[i].keep_support else 0 for i in filtered):
            ids_FK = support_ids(scores_FV, widest).numpy(force=True)
            for i, ids_K in zip(filtered, ids_FK, strict=True):
                kept[i] = ragged(ids_K[None]) if settings[i].keep_support else None
    logprobs_BV = torch.log_softmax(scores_BV, dim=-1)
    if all(greedy):
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        uniforms_B = torch.tensor(uniforms, dtype=torch.float64, device=device)
        tokens_B = _invert_cdf(logprobs_BV, uniforms_B)
        if any(greedy):
            tokens_B = torch.where(torch.tensor(greedy, device=device), logprobs_BV.argmax(dim=-1), tokens_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B.tolist(), chosen_B.tolist(), kept


def nucleus(scores_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """Set scores outside top-k, then outside the top-p nucleus of the rest, to -inf."""
    device, vocab = scores_FV.device, scores_FV.shape[-1]
    # Stable, so that among equal scores the lower id wins.
    ranked_FV, order_FV = scores_FV.sort(dim=-1, descending=True, stable=True)
    within_k_FV = torch.arange(vocab, device=device) < top_k_F[:, None]
    probs_FV = torch.softmax(ranked_FV.masked_fill(~within_k_FV, -torch.inf), dim=-1)
    # A token is in the nucleus if the mass before it is below top_p, so the first always is.
    mass_before_FV = probs_FV.cumsum(dim=-1) - probs_FV
    keep_ranked_FV = within_k_FV & ((mass_before_FV < top_p_F[:, None]) | (top_p_F[:, None] == 1.0))
    keep_FV = torch.zeros_like(keep_ranked_FV).scatter_(1, order_FV, keep_ranked_FV)
    return scores_FV.masked_fill(~keep_FV, -torch.inf)


def support_ids(scores_FV: Tensor, width: int) -> Tensor:
    """The ids that `nucleus` kept, at most `width`, ascending and padded with -1: [F, K], int32.

    The shape does not depend on the values, so this can be captured in a CUDA graph.
    """
    vocab = scores_FV.shape[-1]
    scores_FK, ids_FK = scores_FV.topk(min(width, vocab), dim=-1, sorted=False)
    ids_FK = torch.where(scores_FK == -torch.inf, vocab, ids_FK).sort(dim=-1).values  # dropped ids come last
    return torch.where(ids_FK == vocab, -1, ids_FK).int()


def ragged(ids_TK: NDArray[np.int32]) -> Kept:
    """Drop the padding."""
    is_kept_TK = ids_TK >= 0
    return is_kept_TK.sum(axis=1, dtype=np.int32), ids_TK[is_kept_TK]


def as_support(parts: Sequence[Kept]) -> Support:
    """Concatenate the supports of a response."""
    counts, ids = (b"".join(part[i].astype("<i4").tobytes() for part in parts) for i in range(2))
    return Support(counts=counts, ids=ids)


def _invert_cdf(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds the uniform number, in id order."""
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    # u * total may round up to total; one float below, the search ends at an id of positive probability.
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    threshold_B1 = torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    return (cdf_BV <= threshold_B1).sum(dim=-1)
