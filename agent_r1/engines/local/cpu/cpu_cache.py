"""Where keys and values live between steps: one pool of equal blocks per attention layer.

The pools know blocks, not requests; `scheduler.py` decides who owns which. A layer's pools are made when the layer is
first seen, so head counts and head sizes need not be guessed from a model's configuration.

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
    """One layer's keys and values, each in the layout its product with a single query is fastest in (by 2 to 4 on a
    CPU): the scores run along a block's tokens, the output along the head size."""

    keys_PKDS: Tensor
    values_PKSD: Tensor

    def write(self, key_MKD: Tensor, value_MKD: Tensor, block_M: Tensor, offset_M: Tensor) -> None:
        self.keys_PKDS[block_M, :, :, offset_M] = key_MKD
        self.values_PKSD[block_M, :, offset_M] = value_MKD

    def sequences(self, block_BW: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of sequences side by side, [B, K, L, D] with L = W * S."""
        keys_BWKDS = self.keys_PKDS.index_select(0, block_BW.flatten()).unflatten(0, block_BW.shape)
        values_BWKSD = self.values_PKSD.index_select(0, block_BW.flatten()).unflatten(0, block_BW.shape)
        return keys_BWKDS.permute(0, 2, 1, 4, 3).flatten(2, 3), values_BWKSD.transpose(1, 2).flatten(2, 3)


class CpuCache:
    """The layers' pools."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int, key_NKD: Tensor, value_NKD: Tensor) -> LayerCache:
        """The pools of a layer whose new keys and values look like these."""
        if index not in self._layers:
            (_, heads, key_size), value_size = key_NKD.shape, value_NKD.shape[-1]
            # Zeros, not empty: a masked slot still enters a product with weight ~0, and 0 * nan is nan.
            self._layers[index] = LayerCache(
                key_NKD.new_zeros(self.num_blocks, heads, key_size, self.block_size),
                value_NKD.new_zeros(self.num_blocks, heads, self.block_size, value_size),
            )
        return self._layers[index]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill the second block of each pair with what the first holds, in every layer; all are read before any."""
        pools = [pool for layer in self._layers.values() for pool in (layer.keys_PKDS, layer.values_PKSD)]
        if not pairs or not pools:
            return
        # Once for all layers: a transfer to a GPU makes the host wait.
        source_N, target_N = torch.tensor(pairs, device=pools[0].device).T.contiguous()
        for pool in pools:
            pool.index_copy_(0, target_N, pool.index_select(0, source_N))

    def clear(self) -> None:
        with torch.inference_mode():
            for layer in self._layers.values():
                layer.keys_PKDS.zero_()
                layer.values_PKSD.zero_()
