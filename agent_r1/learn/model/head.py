"""The output head: log-prob and entropy of tokens from hidden states, without ever holding all logits.

With a vocabulary of 150k, the logits of one pack are larger than all else the learner keeps. So they are computed
chunk by chunk, reduced to three numbers per token, and computed again in the backward pass, where each chunk at once
becomes its share of the gradients. Matrix products run in the given number format, everything after them in fp32.
Knows no packs and no models; the caller checks that a model's head computes the same.

With x = h W' + b, s = softcap * tanh(x / softcap) (or x), z = s / temperature and p = softmax(z):

    log p_t        d z_j = 1[j = t] - p_j
    H = -p log p   d z_j = -p_j (log p_j + H)
    s              d x   = 1 - (s / softcap)^2

Tokens that were sampled with top-k or top-p have a support: the softmax then runs over those K ids instead of V.

Shape suffixes: T = tokens, C = tokens of a chunk, D = hidden size, V = vocabulary, K = ids of a support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from agent_r1.learn.batch.support import Supports

OUTSIDE = -1e30  # a scaled logit with probability 0; finite, because 0 times infinity is NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    temperature: float | Tensor  # one for all tokens, or [T]
    softcap: float | None  # the model's own soft cap on logits, as in Gemma
    entropy_gradient: bool
    chunk: int  # tokens whose logits exist at once
    dtype: torch.dtype  # number format of the matrix products
    compiled: bool  # fuse the operations on a chunk's logits into one kernel


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    settings: HeadSettings,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T), in fp32 (in fp64 for fp64 logits).

    supports: the ids that each token was sampled from; None: the whole vocabulary.
    """
    with torch.autocast(hidden_TD.device.type, enabled=False):  # the settings choose the format
        logprobs_T, entropy_T = _TokenLogprobs.apply(hidden_TD, weight_VD, bias_V, targets_T, settings, supports)
    return logprobs_T, entropy_T


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        settings: HeadSettings,
        supports: Supports | None,
    ) -> tuple[Tensor, Tensor]:
        reduce = _compiled(_reduce) if settings.compiled and supports is None else _reduce
        chunks = _chunks(hidden_TD, weight_VD.to(settings.dtype), bias_V, targets_T, settings, supports)
        pieces = [reduce(*arguments) for *_, arguments in chunks]
        logprobs_T, lse_T, entropy_T = (torch.cat(part) for part in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T)
        ctx.settings, ctx.supports = settings, supports
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropy_T = outputs
        hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T = ctx.saved_tensors
        settings, supports = ctx.settings, ctx.supports
        spread = _compiled(_spread) if settings.compiled and supports is None else _spread
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD) if needs_weight else None  # in the master's format: fp32
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        factor_VD = weight_VD.to(settings.dtype)
        chunks = _chunks(hidden_TD, factor_VD, bias_V, targets_T, settings, supports)
        for rows, hidden_CD, logits_CV, ids_CK, arguments in chunks:
            grad_entropy_C = grad_entropy_T[rows] if settings.entropy_gradient else None
            grad_CV = spread(*arguments, lse_T[rows], entropy_T[rows], grad_logprobs_T[rows], grad_entropy_C)
            if ids_CK is not None:  # padding adds 0 to the logit of id 0
                grad_CV = torch.zeros_like(logits_CV).scatter_add_(-1, ids_CK.clamp(min=0), grad_CV)
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows] = grad_CV @ factor_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_CD
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0, dtype=grad_bias_V.dtype)
        return grad_hidden_TD, grad_weight_VD, grad_bias_V, None, None, None


# Arguments of `_reduce` and `_spread`: logits, targets, padding, temperature (one number, or [C]) and soft cap.
# With supports, logits and targets are over K kept tokens instead of the vocabulary V; without them, padding is None.
_Arguments = tuple[Tensor, Tensor, Tensor | None, float | Tensor, float | None]


def _chunks(
    hidden_TD: Tensor,
    factor_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    settings: HeadSettings,
    supports: Supports | None,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None, _Arguments]]:
    """Yield (rows, hidden_CD, logits_CV, ids_CK, arguments) of each chunk, in the number format of the products.
    Without tokens, yield one empty chunk."""
    bias_V = bias_V.to(settings.dtype) if bias_V is not None else None
    for start in range(0, max(1, len(hidden_TD)), settings.chunk):
        rows = slice(start, start + settings.chunk)
        hidden_CD, targets_C, temperature = hidden_TD[rows].to(settings.dtype), targets_T[rows], settings.temperature
        logits_CV, ids_CK = linear(hidden_CD, factor_VD, bias_V), None
        at = temperature[rows] if isinstance(temperature, Tensor) else temperature
        arguments: _Arguments = (logits_CV, targets_C, None, at, settings.softcap)
        if supports is not None:
            ids_CK = supports.chunk(rows, hidden_TD.device)
            narrow, chosen_C = (
                logits_CV.gather(-1, ids_CK.clamp(min=0)),
                (ids_CK == targets_C[:, None]).long().argmax(-1),
            )
            arguments = (narrow, chosen_C, ids_CK < 0, at, settings.softcap)
        yield rows, hidden_CD, logits_CV, ids_CK, arguments


def _scaled(
    logits_CV: Tensor, padding_CV: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(soft-capped logits, those over the temperature), in fp32 or better."""
    capped_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if softcap is not None:
        capped_CV = softcap * (capped_CV / softcap).tanh()
    if isinstance(temperature, Tensor):
        scaled_CV = capped_CV / temperature[:, None]
    else:
        scaled_CV = capped_CV if temperature == 1.0 else capped_CV / temperature
    return capped_CV, scaled_CV if padding_CV is None else scaled_CV.masked_fill(padding_CV, OUTSIDE)


def _reduce(
    logits_CV: Tensor, targets_C: Tensor, padding_CV: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, logsumexp, entropy) of each row."""
    _, scaled_CV = _scaled(logits_CV, padding_CV, temperature, softcap)
    logprobs_CV = scaled_CV.log_softmax(-1)
    entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    logprobs_C, scaled_C = (each.gather(-1, targets_C[:, None])[:, 0] for each in (logprobs_CV, scaled_CV))
    return logprobs_C, scaled_C - logprobs_C, entropy_C


def _spread(  # noqa: PLR0913 (arguments of a kernel)
    logits_CV: Tensor,
    targets_C: Tensor,
    padding_CV: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """The gradient of the logits, in their own number format; see the module header."""
    capped_CV, scaled_CV = _scaled(logits_CV, padding_CV, temperature, softcap)
    logprobs_CV = scaled_CV - lse_C[:, None]
    probs_CV = logprobs_CV.exp()
    grad_CV = _chosen_minus(probs_CV, targets_C) * (grad_logprobs_C / temperature)[:, None]
    if grad_entropy_C is not None:
        grad_CV = grad_CV - (grad_entropy_C / temperature)[:, None] * probs_CV * (logprobs_CV + entropy_C[:, None])
    if softcap is not None:
        grad_CV = grad_CV * (1 - (capped_CV / softcap).square())
    return grad_CV.to(logits_CV.dtype)


def _chosen_minus(probs_CV: Tensor, targets_C: Tensor) -> Tensor:
    """1[j = t] - p_j"""
    if torch.compiler.is_compiling():  # a comparison fuses into the one pass over the chunk, a scatter does not
        chosen_CV = torch.arange(probs_CV.shape[1], device=probs_CV.device) == targets_C[:, None]
        return torch.where(chosen_CV, 1 - probs_CV, -probs_CV)
    ones_C1 = torch.ones_like(probs_CV[:, :1])
    return probs_CV.neg().scatter_add_(1, targets_C[:, None], ones_C1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
