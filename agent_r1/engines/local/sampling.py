"""From next-token logits to tokens: one pass over a whole batch with mixed settings.

The token drawn for a row is a function of that row's logits, settings and uniform number alone; no other row of the
batch can change it. Nothing here knows requests or models.

Shape suffixes: B = rows, V = vocabulary, F = the rows among B that use top-k or top-p, K = most ids that they keep.
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

# For some tokens of a response: how many ids top-k and top-p kept, and these ids, token after token. Both int32.
Kept = tuple[NDArray[np.int32], NDArray[np.int32]]


class _Streams(threading.local):
    """One generator per thread, put at the start of the stream that is asked for: making one each time would ask the
    operating system for a seed that nobody uses, which takes longer than all the rest."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.start: Any = self.bits.state


_STREAMS = _Streams()


def uniform_stream(seed: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that decide tokens 0 .. count-1 of a request: a function of (seed, token index) only."""
    _STREAMS.start["state"]["key"][0] = seed % 2**64
    _STREAMS.bits.state = _STREAMS.start
    return _STREAMS.generator.random(count)


def sample(
    logits_BV: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float], list[Kept | None]]:
    """Draw one token per row; also its log-prob under the distribution it was drawn from, and the ids that it was drawn
    from for settings with `keep_support`.

    That distribution is the softmax after temperature, then top-k, then top-p, renormalised. At temperature 0 the
    most likely token is taken and the log-prob is that of the plain softmax, top-k and top-p aside. float64, because
    inverting a cumulative sum over 150,000 fp32 terms would misplace rare tokens.
    """
    device = logits_BV.device
    temperature = [s.temperature for s in settings]
    greedy = [t == 0.0 for t in temperature]
    scores_BV = logits_BV.double()
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
    """Scores with everything outside top-k, then outside the top-p nucleus of what is left, set to -inf."""
    device, vocab = scores_FV.device, scores_FV.shape[-1]
    # Stable: among equal scores the lower id wins, so the cut does not depend on the sorting algorithm.
    ranked_FV, order_FV = scores_FV.sort(dim=-1, descending=True, stable=True)
    within_k_FV = torch.arange(vocab, device=device) < top_k_F[:, None]
    probs_FV = torch.softmax(ranked_FV.masked_fill(~within_k_FV, -torch.inf), dim=-1)
    # A token belongs to the nucleus while the mass before it is short of top_p: the first always does.
    mass_before_FV = probs_FV.cumsum(dim=-1) - probs_FV
    keep_ranked_FV = within_k_FV & ((mass_before_FV < top_p_F[:, None]) | (top_p_F[:, None] == 1.0))
    keep_FV = torch.zeros_like(keep_ranked_FV).scatter_(1, order_FV, keep_ranked_FV)
    return scores_FV.masked_fill(~keep_FV, -torch.inf)


def support_ids(scores_FV: Tensor, width: int) -> Tensor:
    """The ids that `nucleus` kept, ascending and padded with -1: [F, K], int32. At most `width` may have been kept.

    The shape does not depend on the values, so this can be captured in a CUDA graph.
    """
    vocab = scores_FV.shape[-1]
    scores_FK, ids_FK = scores_FV.topk(min(width, vocab), dim=-1, sorted=False)
    ids_FK = torch.where(scores_FK == -torch.inf, vocab, ids_FK).sort(dim=-1).values  # what was not kept comes last
    return torch.where(ids_FK == vocab, -1, ids_FK).int()


def ragged(ids_TK: NDArray[np.int32]) -> Kept:
    """Drop the padding."""
    is_kept_TK = ids_TK >= 0
    return is_kept_TK.sum(axis=1, dtype=np.int32), ids_TK[is_kept_TK]


def as_support(parts: Sequence[Kept]) -> Support:
    """Join the supports of the parts of a response."""
    counts, ids = (b"".join(part[i].astype("<i4").tobytes() for part in parts) for i in range(2))
    return Support(counts=counts, ids=ids)


def _invert_cdf(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds the uniform number, in id order."""
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    # u * total may round up to total; one step below it the search still ends at an id of positive probability.
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    threshold_B1 = torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    return (cdf_BV <= threshold_B1).sum(dim=-1)
