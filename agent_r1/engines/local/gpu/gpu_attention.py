"""The paged cache of the GPU engine, and attention over it as a pass of a captured graph sees it.

All that a pass needs is in tensors at fixed addresses, so that a graph captured once serves any batch that fits. The
kernels are a parameter: Triton's (`triton_kernels.py`), or plain torch for tests (`torch_kernels.py`).

Shape suffixes: N = rows (tokens of a pass), H = query heads, K = key/value heads, D = head size, L = layers,
P = blocks of the pool, S = tokens in a block, T = tiles, Q = sequences, W = blocks of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from agent_r1.compute.attention import Scoring
from agent_r1.errors import UnsupportedModelError

MAX_COPIED = 64  # blocks copied at once, through a buffer outside the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The work of a pass: each tile is up to `tokens` consecutive rows of one sequence.

    splits: parts that a sequence is divided into, each computed by its own program and joined afterwards; only with one
    row per tile, tile t being row t.
    """

    position_N: Tensor
    table_QW: Tensor  # the blocks of each sequence
    sequence_T: Tensor
    row_T: Tensor  # row of the tile's first token
    count_T: Tensor  # tokens of the tile; 0: nothing to do
    tokens: int
    splits: int


class Kernels(Protocol):
    """What `triton_kernels.py` and `torch_kernels.py` provide."""

    def write(self, key_NKD: Tensor, value_NKD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, slot_N: Tensor) -> None:
        """Store each row's keys and values at its slot, counted in tokens over the blocks."""

    def tokens_per_tile(self, query_heads: int, key_heads: int) -> int:
        """Return the tokens of a tile in passes with chunks of several tokens."""

    def attend(
        self, query_NHD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, tiles: Tiles, scoring: Scoring
    ) -> Tensor:
        """Causal attention of every tile to its sequence's blocks. Rows outside all tiles are undefined."""

    def draw(self, logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row, the first whose cumulative probability exceeds the uniform number, and its log-prob.

        At temperature 0 the most likely token, and its log-prob in the plain softmax.
        """


class GpuCache:
    """Keys and values of all layers in one tensor, with an extra block that padding rows write to."""

    def __init__(self, *, layers: int, heads: int, size: int, num_blocks: int, block_size: int, like: Tensor) -> None:
        # Zeros, not empty: a masked slot still enters a product with weight 0, and 0 * nan is nan.
        self.pool_L2PKSD = torch.zeros(
            layers, 2, num_blocks + 1, heads, block_size, size, dtype=like.dtype, device=like.device
        )
        self.block_size = block_size
        self.trash = num_blocks * block_size  # first slot of the extra block

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys_PKSD, values_PKSD = self.pool_L2PKSD[index]
        return keys_PKSD, values_PKSD

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pairs of blocks in every layer. No block is both."""
        for start in range(0, len(pairs), MAX_COPIED):
            index = torch.tensor(pairs[start : start + MAX_COPIED])
            index = index.pin_memory() if self.pool_L2PKSD.is_cuda else index
            source_N, target_N = index.to(self.pool_L2PKSD.device, non_blocking=True).unbind(1)
            self.pool_L2PKSD.index_copy_(2, target_N, self.pool_L2PKSD.index_select(2, source_N))


def key_value_shape(config: Any) -> dict[str, int]:
    """Layers, key/value heads and head size."""
    return {
        "layers": config.num_hidden_layers,
        "heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Cache size per token, over all layers."""
    return 2 * math.prod(key_value_shape(config).values()) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class GpuStep:
    """An `AttentionStep` on a GPU."""

    cache: GpuCache
    kernels: Kernels
    slot_N: Tensor  # where each row's keys and values go
    tiles: Tiles

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scoring: Scoring) -> Tensor:
        keys_PKSD, values_PKSD = self.cache.layer(layer)
        if key_NKD.shape[1:] != keys_PKSD.shape[1::2] or value_NKD.shape != key_NKD.shape:
            raise UnsupportedModelError(
                f"layer {layer} has keys of {list(key_NKD.shape[1:])} and values of {list(value_NKD.shape[1:])}, but "
                f"the model's configuration says {list(keys_PKSD.shape[1::2])} (heads, size)"
            )
        self.kernels.write(key_NKD, value_NKD, keys_PKSD, values_PKSD, self.slot_N)
        return self.kernels.attend(query_NHD, keys_PKSD, values_PKSD, self.tiles, scoring)
