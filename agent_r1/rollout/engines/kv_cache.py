"""Where keys and values live between steps: one pool of equal blocks per attention layer.

The pools know blocks, not requests; `scheduler.py` decides who owns which. A layer's pool is made when the layer is
first seen, so head counts and head sizes need not be guessed from a model's configuration.

Shape suffixes: P = blocks in the pool, K = key/value heads, S = tokens in a block, D = head size, N = tokens in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [P, K, S, D] each: the tokens of one block and head lie side by side."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys_KND: Tensor, values_KND: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's tokens; `rows` names one (block, head, offset) per token and head. Returns the two pools."""
        if layer not in self._layers:
            self._layers[layer] = (self._pool(keys_KND), self._pool(values_KND))
        key_pool, value_pool = self._layers[layer]
        for pool, new_KND in ((key_pool, keys_KND), (value_pool, values_KND)):
            head_size = pool.shape[-1]
            pool.view(-1, head_size).index_copy_(0, rows, new_KND.transpose(0, 1).reshape(-1, head_size))
        return key_pool, value_pool

    def clear(self) -> None:
        """Zero everything: a masked slot still enters a product with weight 0, and 0 * nan is nan."""
        for pools in self._layers.values():
            for pool in pools:
                pool.zero_()

    def _pool(self, like_KND: Tensor) -> Tensor:
        heads, _, head_size = like_KND.shape
        shape = (self.num_blocks, heads, self.block_size, head_size)
        return torch.zeros(shape, dtype=like_KND.dtype, device=like_KND.device)
