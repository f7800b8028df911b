"""How attention layers of transformers models turn queries and keys into weights: shared by engine and learner.

Reads the arguments that models pass through transformers' `AttentionInterface`, and computes in plain torch the
features that fused kernels lack. Knows neither caches nor packs.

Shape suffixes: B = sequences, C = queries, L = keys, H = query heads, K = key/value heads, G = H / K, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agent_r1.errors import UnsupportedModelError

# Arguments with which some models change the scores. They must not be ignored silently.
REFUSED = ("position_bias", "sinks", "indices", "block_indices")
PROBE_WINDOW = 3  # shorter than the sequences that a model is checked with
# Beyond the original length, these rescale positions by the longest sequence of the batch, so that one sequence would
# change the logits of another.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How one layer scores keys, apart from causality."""

    scale: float
    window: int | None = None  # keys that a query sees, itself included; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks_H: Tensor | None = None  # a score of each head that enters the softmax and adds nothing to the output

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels can compute these scores."""
        return self.softcap is None and self.sinks_H is None


def read_scoring(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    scale: float | None,
    window: int | None,
    kwargs: Mapping[str, Any],
) -> Scoring:
    """The arguments of an attention function. Raises if one of them changes the result in an unknown way."""
    refused = [name for name in REFUSED if kwargs.get(name) is not None] + ["a custom mask"] * (mask is not None)
    if refused:
        raise UnsupportedModelError(f"the attention of {type(module).__name__} uses {', '.join(refused)}")
    return Scoring(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )


def plain_attention(
    query_BHCD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, hidden_CL: Tensor, scoring: Scoring
) -> Tensor:
    """[B, H, C, D] in plain torch. `hidden_CL`, with any leading dimensions, is True where a query may not look."""
    grouped_BKGCD = query_BHCD.unflatten(1, (key_BKLD.shape[1], -1))
    products_BKGCL = grouped_BKGCD @ key_BKLD[:, :, None].transpose(-1, -2)
    scores_BKGCL = products_BKGCL.to(torch.promote_types(query_BHCD.dtype, torch.float32)) * scoring.scale
    if scoring.softcap is not None:
        scores_BKGCL = scoring.softcap * (scores_BKGCL / scoring.softcap).tanh()
    scores_BHCL = scores_BKGCL.flatten(1, 2).masked_fill(hidden_CL, float("-inf"))
    if scoring.sinks_H is not None:
        sinks_BHC1 = scoring.sinks_H.to(scores_BHCL.dtype)[:, None, None].expand(*scores_BHCL.shape[:3], 1)
        scores_BHCL = torch.cat([scores_BHCL, sinks_BHC1], dim=-1)
    weights_BHCL = scores_BHCL.softmax(-1)[..., : key_BKLD.shape[2]].to(value_BKLD.dtype)
    weights_BKGCL = weights_BHCL.unflatten(1, (key_BKLD.shape[1], -1))
    out_BHCD: Tensor = (weights_BKGCL @ value_BKLD[:, :, None]).flatten(1, 2)
    return out_BHCD


def position_limit(config: Any) -> int | None:
    """The most tokens of a sequence whose logits do not depend on what else is computed; None: no limit is known."""
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limits.append(each.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Shorten all sliding windows to `PROBE_WINDOW`, so that short sequences show whether they are respected."""
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    for module in list(owners.values()):
        if (config := getattr(module, "config", None)) is not None:
            owners |= {id(config): config, id(config.get_text_config()): config.get_text_config()}
    windows = [(each, value) for each in owners.values() if type(value := getattr(each, "sliding_window", None)) is int]
    try:
        for owner, _ in windows:
            owner.sliding_window = PROBE_WINDOW
        yield
    finally:
        for owner, value in windows:
            owner.sliding_window = value
