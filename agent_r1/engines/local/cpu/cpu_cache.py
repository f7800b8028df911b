"""Keys and values on a CPU between steps: one pool of blocks per attention layer.

`scheduler.py` decides which request owns which block. A layer's pool is allocated when the layer first runs, so head
counts and sizes need not be guessed from the model's configuration.

Shape suffixes: P = blocks in the pool, K = key/value heads, S = tokens in a block, D = head size, N = tokens in a step,
M = places they are written to, B = sequences, W = blocks of the longest, L = tokens they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values. Each layout makes the product with a single query 2 to 4 times as fast on a CPU:
    scores run along a block's tokens, the output along the head size."""

    keys_PKDS: Tensor
    values_PKSD: Tensor

    def write(self, key_MKD: Tensor, value_MKD: Tensor, block_M: Tensor, offset_M: Tensor) -> None:
        self.keys_PKDS[block_M, :, :, offset_M] = key_MKD
        self.values_PKSD[block_M, :, offset_M] = value_MKD

    def sequences(self, block_BW: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of several sequences, [B, K, L, D] with L = W * S."""
        keys_BWKDS = self.keys_PKDS.index_select(0, block_BW.flatten()).unflatten(0, block_BW.shape)
        values_BWKSD = self.values_PKSD.index_select(0, block_BW.flatten()).unflatten(0, block_BW.shape)
        return keys_BWKDS.permute(0, 2, 1, 4, 3).flatten(2, 3), values_BWKSD.transpose(1, 2).flatten(2, 3)


class CpuCache:
    """The pools of all layers."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int, key_NKD: Tensor, value_NKD: Tensor) -> LayerCache:
        """The pool of a layer, allocated to fit these keys and values if it is new."""
        if index not in self._layers:
            (_, heads, key_size), value_size = key_NKD.shape, value_NKD.shape[-1]
            # Zeros, not empty: a masked slot still enters a product with weight ~0, and 0 * nan is nan.
            self._layers[index] = LayerCache(
                key_NKD.new_zeros(self.num_blocks, heads, key_size, self.block_size),
                value_NKD.new_zeros(self.num_blocks, heads, self.block_size, value_size),
            )
        return self._layers[index]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pairs of blocks in every layer. All sources are read before any target is written."""
        pools = [pool for layer in self._layers.values() for pool in (layer.keys_PKDS, layer.values_PKSD)]
        if not pairs or not pools:
            return
        source_N, target_N = torch.tensor(pairs, device=pools[0].device).T.contiguous()
        for pool in pools:
            pool.index_copy_(0, target_N, pool.index_select(0, source_N))

    def clear(self) -> None:
        with torch.inference_mode():
            for layer in self._layers.values():
                layer.keys_PKDS.zero_()
                layer.values_PKSD.zero_()
