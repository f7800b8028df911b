"""Attention in towers that take the patches of many pictures one after the other: all pictures in one call.

transformers calls an attention once per picture, in a loop that `torch.compile` would unroll for every number of
pictures. Only implementations with "flash" in their names get all pictures at once.

Shape suffixes: N = patches of all pictures, H = heads, D = size of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from agent_r1.compute.flash import flash_runs

PICTURES_AT_ONCE = "agent_r1_flash_pictures"


def _attention(
    _module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens_q: Tensor,  # where each picture begins, or each window of one
    longest: Tensor,  # the most patches of a picture or window, twice, on the CPU; see `flash_runs`
    scaling: float,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    query_NHD, key_NHD, value_NHD = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    starts = (cu_seq_lens_q, cu_seq_lens_q)
    output_NHD = flash_runs(query_NHD, key_NHD, value_NHD, *starts, None, longest, scaling, window=0, causal=False)[0]
    return output_NHD[None], None


AttentionInterface.register(PICTURES_AT_ONCE, _attention)
