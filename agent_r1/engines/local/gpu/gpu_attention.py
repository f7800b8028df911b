"""The paged cache of the GPU engine, and attention over it as a step of a captured graph sees it.

Everything a pass needs to know stands in tensors at fixed addresses, so that a graph captured once serves any batch
that fits. The kernels are a parameter: Triton's (`triton_kernels.py`), or plain torch for tests (`torch_kernels.py`).

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

from agent_r1.errors import ConfigError

MAX_COPIED = 64  # blocks copied at once: they pass through memory beside the pool


class Kernels(Protocol):
    """What `triton_kernels.py` and `torch_kernels.py` offer."""

    def write(
        self, key_NKD: Tensor, value_NKD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, slot_N: Tensor
    ) -> None: ...

    def tokens_per_tile(self, query_heads: int, key_heads: int) -> int: ...

    def attend(  # noqa: PLR0913 (what the kernel reads)
        self,
        query_NHD: Tensor,
        keys_PKSD: Tensor,
        values_PKSD: Tensor,
        *,
        position_N: Tensor,
        table_QW: Tensor,
        sequence_T: Tensor,
        row_T: Tensor,
        count_T: Tensor,
        tokens: int,
        splits: int,
        scaling: float,
        window: int | None,
    ) -> Tensor: ...

    def draw(self, logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]: ...


class GpuCache:
    """Keys and values of all layers in one tensor, with one block more than the scheduler knows: what rows that stand
    for no token write goes there."""

    def __init__(self, *, layers: int, heads: int, size: int, num_blocks: int, block_size: int, like: Tensor) -> None:
        # Zeros, not empty: a hidden slot still enters a product with weight 0, and 0 * nan is nan.
        self.pool_L2PKSD = torch.zeros(
            layers, 2, num_blocks + 1, heads, block_size, size, dtype=like.dtype, device=like.device
        )
        self.block_size = block_size
        self.trash = num_blocks * block_size  # a slot

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys_PKSD, values_PKSD = self.pool_L2PKSD[index]
        return keys_PKSD, values_PKSD

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill the second block of each pair with what the first holds, in every layer. No block is both."""
        for start in range(0, len(pairs), MAX_COPIED):
            index = torch.tensor(pairs[start : start + MAX_COPIED])
            index = index.pin_memory() if self.pool_L2PKSD.is_cuda else index
            source_N, target_N = index.to(self.pool_L2PKSD.device, non_blocking=True).unbind(1)
            self.pool_L2PKSD.index_copy_(2, target_N, self.pool_L2PKSD.index_select(2, source_N))


def key_value_shape(config: Any) -> dict[str, int]:
    """Layers, heads of keys and values, and their size, of a text model's configuration."""
    return {
        "layers": config.num_hidden_layers,
        "heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of all layers."""
    return 2 * math.prod(key_value_shape(config).values()) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class GpuStep:
    """An `AttentionStep`: the tiles of a pass, each up to `tokens` consecutive rows of one sequence."""

    cache: GpuCache
    kernels: Kernels
    slot_N: Tensor  # where each row's keys and values go
    position_N: Tensor
    table_QW: Tensor  # the blocks of each sequence
    sequence_T: Tensor
    row_T: Tensor  # of the tile's first token
    count_T: Tensor  # tokens of the tile; 0: nothing to do
    tokens: int
    splits: int

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys_PKSD, values_PKSD = self.cache.layer(layer)
        if key_NKD.shape[1:] != keys_PKSD.shape[1::2] or value_NKD.shape != key_NKD.shape:
            raise ConfigError(
                f"layer {layer} has keys of {tuple(key_NKD.shape[1:])} and values of {tuple(value_NKD.shape[1:])} "
                f"(heads, size) where the model's configuration says {tuple(keys_PKSD.shape[1::2])}: the GPU engine "
                "needs layers that are all alike. Use another engine for this model."
            )
        self.kernels.write(key_NKD, value_NKD, keys_PKSD, values_PKSD, self.slot_N)
        return self.kernels.attend(
            query_NHD,
            keys_PKSD,
            values_PKSD,
            position_N=self.position_N,
            table_QW=self.table_QW,
            sequence_T=self.sequence_T,
            row_T=self.row_T,
            count_T=self.count_T,
            tokens=self.tokens,
            splits=self.splits,
            scaling=scaling,
            window=window,
        )
