"""The kernels of the GPU engine in plain torch: slow, and easy to check.

Tests compare the Triton kernels with these, and use these to run the GPU engine on machines without a GPU. The
functions are described in `gpu_attention.Kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.compute.attention import Scoring, plain_attention
from agent_r1.engines.local.gpu.gpu_attention import Tiles


def write(key_NKD: Tensor, value_NKD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, slot_N: Tensor) -> None:
    size = keys_PKSD.shape[2]
    keys_PKSD[slot_N // size, :, slot_N % size] = key_NKD
    values_PKSD[slot_N // size, :, slot_N % size] = value_NKD


def tokens_per_tile(query_heads: int, key_heads: int) -> int:
    return 4


def attend(query_NHD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, tiles: Tiles, scoring: Scoring) -> Tensor:
    size, window = keys_PKSD.shape[2], scoring.window
    out_NHD = torch.zeros_like(query_NHD)
    for tile, (row_of_tile, count) in enumerate(zip(tiles.row_T.tolist(), tiles.count_T.tolist(), strict=True)):
        assert count <= tiles.tokens
        for row in range(row_of_tile, row_of_tile + count):
            last = int(tiles.position_N[row])
            first = 0 if window is None else max(0, last - window + 1)
            seen = torch.arange(first, last + 1, device=query_NHD.device)
            blocks = tiles.table_QW[int(tiles.sequence_T[tile])][seen // size].long()
            keys_KLD, values_KLD = (
                pool[blocks, :, seen % size].transpose(0, 1).float() for pool in (keys_PKSD, values_PKSD)
            )
            hidden_1L = torch.zeros(1, len(seen), dtype=torch.bool, device=query_NHD.device)
            query_HD = query_NHD[row].float()
            out_1HCD = plain_attention(query_HD[None, :, None], keys_KLD[None], values_KLD[None], hidden_1L, scoring)
            out_NHD[row] = out_1HCD[0, :, 0].to(out_NHD.dtype)
    return out_NHD


def draw(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    greedy_B = temperature_B == 0
    scores_BV = logits_BV.double() / torch.where(greedy_B, 1.0, temperature_B.double())[:, None]
    logprobs_BV = torch.log_softmax(scores_BV, dim=-1)
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1)
    drawn_B = (cdf_BV <= uniform_B.double()[:, None] * cdf_BV[:, -1:]).sum(dim=-1).clamp(max=logits_BV.shape[-1] - 1)
    token_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), drawn_B)
    return token_B, logprobs_BV.gather(1, token_B[:, None])[:, 0].float()
