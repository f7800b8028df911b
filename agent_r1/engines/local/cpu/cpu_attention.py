"""The paged cache on a CPU, one pool of blocks per attention layer, and attention over it.

Single tokens (decoding) come first in a step and are computed together. Longer chunks (prefill) follow; chunks of
similar size are computed together, padded to the largest.

Decoding brings each query to the blocks of its sequence instead of gathering the blocks for the query, since keys and
values are most of the data. Every block gives a partial result and the log of its softmax normaliser; a softmax over
those joins a sequence's blocks. Blocks are read in place, as the first part of the pool, unless most of that part
belongs to other sequences. So a block must belong to one sequence, and equal prompts are copied.

Shape suffixes: N = tokens in the step, B = sequences computed together, T = blocks read, W = blocks of the longest
sequence, C = tokens of the longest chunk, L = tokens it may attend to, M = tokens of a prefill, H = query heads,
K = key/value heads, G = H / K, P = blocks in a pool, S = tokens in a block, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_r1.compute.attention import Scoring, plain_attention
from agent_r1.engines.local.request import Chunk

# Added to a score to hide it: vanishes in any softmax, but finite, so that a fully hidden block gets weight 0, not nan.
HIDDEN = -1e30
# e**-80 is negligible beside the largest weight, 1; smaller arguments take exp's slow path, tens of times slower.
SMALLEST_EXPONENT = -80.0
# Gathering blocks costs about as much as computing over them once more, so for each block of ours up to this many of
# other sequences are computed too.
MAX_FOREIGN = 1.0
MAX_GATHERED = 8192  # tokens whose keys and values are gathered at once for a prefill, to bound memory


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


class DecodeLayout:
    """Indices for the single-token chunks of a step."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int) -> None:
        self.size = len(chunks)
        counts_B = np.array([len(chunk.blocks) for chunk in chunks])
        block_T = np.fromiter(chain.from_iterable(chunk.blocks for chunk in chunks), dtype=np.int64)
        positions_B = np.array([chunk.start for chunk in chunks])
        ordinal_T = np.arange(len(block_T)) - np.repeat(counts_B.cumsum() - counts_B, counts_B)
        owner_T = np.repeat(np.arange(self.size), counts_B)

        span = int(block_T.max()) + 1
        self.span = span if span <= (1 + MAX_FOREIGN) * len(block_T) else None
        place_T = np.arange(len(block_T)) if self.span is None else block_T
        read = len(block_T) if self.span is None else span
        # Blocks of other sequences get the first sequence's query; the result is not used.
        query_T, first_T = np.zeros(read, dtype=np.int64), np.zeros(read, dtype=np.int64)
        query_T[place_T], first_T[place_T] = owner_T, ordinal_T * block_size
        # Padded with the sequence's own first block, so that NaN in another sequence cannot spread.
        first_place_B1 = place_T[np.cumsum(counts_B) - counts_B][:, None]
        table_BW = np.repeat(first_place_B1, int(counts_B.max()), axis=1)
        table_BW[owner_T, ordinal_T] = place_T
        padding_BW = np.arange(table_BW.shape[1]) >= counts_B[:, None]

        self.block_T = torch.from_numpy(block_T)
        self.query_T = torch.from_numpy(query_T)
        self.table_BW = torch.from_numpy(table_BW)
        self.padding_BW11 = torch.from_numpy(padding_BW[:, :, None, None]) * HIDDEN
        self._position_T1 = positions_B[query_T][:, None]
        self._keys_TS = first_T[:, None] + np.arange(block_size)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def read(self, pool_P: Tensor) -> Tensor:
        """The blocks to compute over, [T, ...]."""
        return pool_P.index_select(0, self.block_T) if self.span is None else pool_P[: self.span]

    def mask(self, window: int | None, heads: int) -> Tensor:
        """Added to scores, [T * K, 1, S]: hides keys after the query's position, and those before its window."""
        if (window, heads) not in self._masks:
            hidden_TS = self._keys_TS > self._position_T1
            if window is not None:
                hidden_TS |= self._keys_TS <= self._position_T1 - window
            mask_TS = torch.from_numpy(hidden_TS) * HIDDEN
            self._masks[window, heads] = mask_TS.repeat_interleave(heads, dim=0)[:, None]
        return self._masks[window, heads]


class PrefillLayout:
    """Indices for chunks of similar size that are computed together, each with the row of its first token."""

    def __init__(self, parts: Sequence[tuple[Chunk, int]], block_size: int) -> None:
        chunks = [chunk for chunk, _ in parts]
        starts_B1 = np.array([[chunk.start] for chunk in chunks])
        counts_B1 = np.array([[len(chunk.ids)] for chunk in chunks])
        slot_C = np.arange(counts_B1.max())
        # Shorter chunks repeat their last token; the result is not used.
        offset_BC = np.minimum(slot_C, counts_B1 - 1)
        row_BC = np.array([[row] for _, row in parts]) + offset_BC
        filled_BC = slot_C < counts_B1
        self.from_start = not starts_B1.any()  # then a chunk attends only to its own keys and values
        # A request may own more blocks, for tokens after its chunk.
        width = -(-int((starts_B1 + counts_B1).max()) // block_size)
        owned = [chunk.blocks[:width] for chunk in chunks]
        block_BW = np.array([blocks + blocks[-1:] * (width - len(blocks)) for blocks in owned])

        self.row_BC = torch.from_numpy(row_BC)
        self.block_BW = torch.from_numpy(block_BW)
        self.rows_M = torch.from_numpy(row_BC[filled_BC])  # where results go
        self.slots_M = torch.from_numpy(np.flatnonzero(filled_BC))  # where they are in [B * C]
        self._length = len(slot_C) if self.from_start else width * block_size
        self._position_BC1 = (starts_B1 + offset_BC)[:, :, None]
        self._masks: dict[int | None, Tensor] = {}

    def take(self, row_NHD: Tensor) -> Tensor:
        """The chunks' part of a row, [B, H, C, D]."""
        chunks_BCHD: Tensor = row_NHD.index_select(0, self.row_BC.flatten()).unflatten(0, self.row_BC.shape)
        return chunks_BCHD.transpose(1, 2)

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean [B, 1, C, L], or None if plain causal attention gives the same."""
        if window is not None and window >= self._length:
            window = None
        return None if window is None and self.from_start else self.visible(window)

    def visible(self, window: int | None) -> Tensor:
        """Boolean [B, 1, C, L]."""
        if window not in self._masks:
            key_L = np.arange(self._length)
            seen_BCL = key_L <= self._position_BC1
            if window is not None:
                seen_BCL &= key_L > self._position_BC1 - window
            self._masks[window] = torch.from_numpy(seen_BCL[:, None])
        return self._masks[window]


class WriteLayout:
    """Where keys and values of a step go: to the blocks of the request and of its twins."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int) -> None:
        places: list[tuple[int, int, int]] = []  # row, block, offset
        first = 0
        for chunk in chunks:
            rows = [(first + i, *divmod(chunk.start + i, block_size)) for i in range(chunk.length)]
            for owned in (chunk.blocks, *chunk.twin_blocks):
                places += [(row, owned[index], offset) for row, index, offset in rows]
            first += len(rows)
        row_M, self._block_M, self._offset_M = torch.tensor(places).T.contiguous().unbind(0)
        self._row_M = row_M if len(places) > first else None

    def write(self, layer: LayerCache, key_NKD: Tensor, value_NKD: Tensor) -> None:
        if self._row_M is not None:
            key_NKD, value_NKD = key_NKD.index_select(0, self._row_M), value_NKD.index_select(0, self._row_M)
        layer.write(key_NKD, value_NKD, self._block_M, self._offset_M)


def group_similar(parts: Sequence[tuple[Chunk, int]], block_size: int) -> list[list[tuple[Chunk, int]]]:
    """Group short chunks, because calling attention costs more than computing it.

    In a group, sizes and lengths differ by less than a factor of two, and the gathered tokens are bounded.
    """
    groups: dict[tuple[bool, int, int], list[list[tuple[Chunk, int]]]] = {}
    for chunk, row in parts:
        size, width = len(chunk.ids).bit_length(), (-(-chunk.end // block_size)).bit_length()
        split = groups.setdefault((chunk.start == 0, size, width), [[]])
        if split[-1] and (len(split[-1]) + 1) * (block_size << width) > MAX_GATHERED:
            split.append([])
        split[-1].append((chunk, row))
    return [group for split in groups.values() for group in split]


class CpuStep:
    """An `AttentionStep` on a CPU. Single tokens come first in `chunks`."""

    def __init__(self, chunks: Sequence[Chunk], cache: CpuCache) -> None:
        size = cache.block_size
        singles = [chunk for chunk in chunks if len(chunk.ids) == 1]
        longer, row = [], len(singles)
        for chunk in chunks[len(singles) :]:
            longer.append((chunk, row))
            row += len(chunk.ids)
        self._cache = cache
        self._writes = WriteLayout(chunks, size)
        self._decode = DecodeLayout(singles, size) if singles else None
        self._prefill = [PrefillLayout(group, size) for group in group_similar(longer, size)]

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scoring: Scoring) -> Tensor:
        pools = self._cache.layer(layer, key_NKD, value_NKD)
        self._writes.write(pools, key_NKD, value_NKD)
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], value_NKD.shape[-1])
        if self._decode is not None:
            size = self._decode.size
            out_NHD[:size] = _decode(self._decode, query_NHD[:size] * scoring.scale, pools, scoring)
        for part in self._prefill:
            if part.from_start:
                key_BKLD, value_BKLD = part.take(key_NKD), part.take(value_NKD)
            else:
                key_BKLD, value_BKLD = pools.sequences(part.block_BW)
            if scoring.is_plain:
                mask = part.mask(scoring.window)
                out_BHCD = scaled_dot_product_attention(
                    part.take(query_NHD),
                    key_BKLD,
                    value_BKLD,
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scoring.scale,
                    enable_gqa=query_NHD.shape[1] != key_NKD.shape[1],
                )
            else:
                hidden = ~part.visible(scoring.window)
                out_BHCD = plain_attention(part.take(query_NHD), key_BKLD, value_BKLD, hidden, scoring)
            out_NHD[part.rows_M] = out_BHCD.transpose(1, 2).flatten(0, 1)[part.slots_M]
        return out_NHD


def _decode(layout: DecodeLayout, query_BHD: Tensor, layer: LayerCache, scoring: Scoring) -> Tensor:
    keys_TKDS, values_TKSD = layout.read(layer.keys_PKDS), layout.read(layer.values_PKSD)
    (blocks, heads, head_size, _), (batch, query_heads, _) = keys_TKDS.shape, query_BHD.shape
    query_TKGD = query_BHD.reshape(batch, -1).index_select(0, layout.query_T)

    # From here on T * K is one dimension: each block and head is a small product.
    scores_TGS = torch.bmm(query_TKGD.view(blocks * heads, -1, head_size), keys_TKDS.flatten(0, 1))
    scores_TGS = scores_TGS.float()
    if scoring.softcap is not None:
        scores_TGS = scores_TGS.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    scores_TGS = scores_TGS.add_(layout.mask(scoring.window, heads))
    top_TG1 = scores_TGS.amax(dim=-1, keepdim=True)
    weights_TGS = scores_TGS.sub_(top_TG1).clamp_(min=SMALLEST_EXPONENT).exp_()
    total_TG1 = weights_TGS.sum(dim=-1, keepdim=True)
    partial_TGD = torch.bmm(weights_TGS.to(values_TKSD.dtype), values_TKSD.flatten(0, 1))

    normaliser_TH = (top_TG1 + total_TG1.log()).view(blocks, query_heads)
    partial_THD = (partial_TGD / total_TG1).view(blocks, -1)
    table = layout.table_BW.view(-1)
    normaliser_BWH1 = normaliser_TH.index_select(0, table).view(batch, -1, query_heads, 1)
    partial_BWHD = partial_THD.index_select(0, table).view(batch, -1, query_heads, values_TKSD.shape[-1])
    normaliser_BWH1 = normaliser_BWH1 + layout.padding_BW11
    joined_BHD = (partial_BWHD * torch.softmax(normaliser_BWH1, dim=1)).sum(dim=1)
    if scoring.sinks_H is not None:  # they take their share of the weights
        joined_BHD *= torch.sigmoid(normaliser_BWH1.logsumexp(dim=1) - scoring.sinks_H[:, None])
    return joined_BHD.to(query_BHD.dtype)
