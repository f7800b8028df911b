"""Attention over the paged cache, plugged into transformers' `AttentionInterface`, so that models need no port.

A step runs the tokens of all its sequences as one row, [1, N]: linear layers see N tokens, and only this function
knows which token belongs to whom. Single tokens (decoding) come first and are computed together; longer chunks
(prefill) follow and are computed one sequence at a time.

Decoding moves each query to the blocks of its sequence instead of collecting the blocks for the query: keys and
values are the bulk of the data and stay where they are. Every block gives a partial result and the log of its softmax
normaliser; a softmax over those joins a sequence's blocks. Blocks are read in place as the leading part of the pool
unless most of that part belongs to others.

Not supported, and refused rather than ignored: soft-capped scores, attention sinks, position biases, custom masks.

Shape suffixes: N = tokens in the step, B = single tokens, T = blocks read, W = blocks of the longest sequence,
C = tokens of a chunk, L = tokens it may look at, H = query heads, K = key/value heads, G = H / K, S = tokens in a
block, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agent_r1.errors import ConfigError
from agent_r1.rollout.engines.kv_cache import KVCache
from agent_r1.rollout.engines.scheduler import Chunk

PAGED = "agent_r1_paged"
# Collecting blocks costs about as much as computing over them once more, so up to this many blocks of others are
# computed along for each block that is ours.
MAX_FOREIGN = 1.0
REFUSED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")


def _additive(hidden: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where visible; elsewhere a number that vanishes in any softmax, yet finite: a block hidden as a whole must
    come out with weight 0, not nan."""
    lowest = torch.finfo(dtype).min / 4
    return torch.from_numpy(hidden).to(device).to(dtype) * lowest


class DecodeLayout:
    """Index tensors for the single-token sequences of a step."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> None:
        self.size = len(chunks)
        counts_B = np.fromiter((len(chunk.blocks) for chunk in chunks), dtype=np.int64, count=self.size)
        blocks_T = np.fromiter(chain.from_iterable(chunk.blocks for chunk in chunks), dtype=np.int64)
        positions_B = np.fromiter((chunk.start for chunk in chunks), dtype=np.int64, count=self.size)
        ordinal_T = np.arange(len(blocks_T)) - np.repeat(counts_B.cumsum() - counts_B, counts_B)
        owner_T = np.repeat(np.arange(self.size), counts_B)

        span = int(blocks_T.max()) + 1
        self.span = span if span <= (1 + MAX_FOREIGN) * len(blocks_T) else None
        place_T = np.arange(len(blocks_T)) if self.span is None else blocks_T
        read = len(blocks_T) if self.span is None else span
        # Blocks of others get the first sequence's query; nobody reads the result.
        query_T, first_T = np.zeros(read, dtype=np.int64), np.zeros(read, dtype=np.int64)
        query_T[place_T], first_T[place_T] = owner_T, ordinal_T * block_size
        table_BW = np.zeros((self.size, int(counts_B.max())), dtype=np.int64)
        table_BW[owner_T, ordinal_T] = place_T
        padding_BW = np.arange(table_BW.shape[1]) >= counts_B[:, None]

        self.blocks_T = torch.from_numpy(blocks_T).to(device)
        self.query_T = torch.from_numpy(query_T).to(device)
        self.table_BW = torch.from_numpy(table_BW).to(device)
        self.padding_BW11 = _additive(padding_BW, torch.float32, device)[:, :, None, None]
        self._position_T1 = positions_B[query_T][:, None]
        self._keys_TS = first_T[:, None] + np.arange(block_size)
        self._device = device
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """Additive [T * K, 1, S]: a block's keys up to its query's position, and inside the window if there is one."""
        key = (window, heads, dtype)
        if key not in self._masks:
            hidden_TS = self._keys_TS > self._position_T1
            if window is not None:
                hidden_TS |= self._keys_TS <= self._position_T1 - window
            mask_TS = _additive(hidden_TS, dtype, self._device)
            self._masks[key] = mask_TS[:, None].expand(-1, heads, -1).reshape(-1, 1, mask_TS.shape[1])
        return self._masks[key]


class PrefillLayout:
    """Where one chunk's tokens stand in the row, and what they may look at."""

    def __init__(self, chunk: Chunk, row_start: int, block_size: int, device: torch.device) -> None:
        self.rows = slice(row_start, row_start + len(chunk.ids))
        self.start = chunk.start
        self.length = chunk.start + len(chunk.ids)
        # The request may own more blocks, for what comes after this chunk.
        self.blocks = torch.tensor(chunk.blocks[: -(-self.length // block_size)], device=device)
        self._device = device
        self._masks: dict[int | None, Tensor | None] = {}

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean [C, L], or None where plain causal attention says the same."""
        if window is not None and window >= self.length:
            window = None
        if window not in self._masks:
            query_C1 = torch.arange(self.start, self.length, device=self._device)[:, None]
            key_L = torch.arange(self.length, device=self._device)
            if window is not None:
                self._masks[window] = (key_L <= query_C1) & (key_L > query_C1 - window)
            else:
                self._masks[window] = key_L <= query_C1 if self.start else None
        return self._masks[window]


@dataclass(slots=True)
class StepLayout:
    """One step as the attention function needs it, and what it learns on the way."""

    cache: KVCache
    slots_N: NDArray[np.int64]  # block * S + offset of each token
    decode: DecodeLayout | None
    prefill: list[PrefillLayout]
    device: torch.device
    windows: dict[int, int | None] = field(default_factory=dict)  # layer -> its sliding window, as the model passed it
    _rows: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Sequence[Chunk], cache: KVCache, device: torch.device) -> StepLayout:
        size = cache.block_size
        singles = [chunk for chunk in chunks if len(chunk.ids) == 1]
        slots, prefill, row = [c.blocks[c.start // size] * size + c.start % size for c in singles], [], len(singles)
        for chunk in chunks[len(singles) :]:
            positions = range(chunk.start, chunk.start + len(chunk.ids))
            slots.extend(chunk.blocks[p // size] * size + p % size for p in positions)
            prefill.append(PrefillLayout(chunk, row, size, device))
            row += len(chunk.ids)
        decode = DecodeLayout(singles, size, device) if singles else None
        return cls(cache, np.array(slots, dtype=np.int64), decode, prefill, device)

    def rows(self, heads: int) -> Tensor:
        """Rows of a pool seen as [P * K * S, D] that the step's tokens go to, [N * K]."""
        if heads not in self._rows:
            size = self.cache.block_size
            block_N, offset_N = np.divmod(self.slots_N, size)
            rows_NK = (block_N[:, None] * heads + np.arange(heads)) * size + offset_N[:, None]
            self._rows[heads] = torch.from_numpy(rows_NK.reshape(-1)).to(self.device)
        return self._rows[heads]


_STEP: ContextVar[StepLayout | None] = ContextVar("agent_r1_step", default=None)


@contextmanager
def running(step: StepLayout) -> Iterator[None]:
    """Attention calls inside belong to this step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def register() -> None:
    """Make `PAGED` an attention implementation. No mask is registered with it: models then build none."""
    AttentionInterface.register(PAGED, paged_attention)


def paged_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; keyword arguments that do not change the result are ignored."""
    step = _STEP.get()
    if step is None:
        raise ConfigError(
            "this model's attention belongs to a LocalEngine and was called outside it. The engine needs a model and "
            "a config of its own: pass it copy.deepcopy(model)."
        )
    refused = [name for name in REFUSED if kwargs.get(name) is not None]
    if attention_mask is not None or refused:
        raise ConfigError(
            f"{type(module).__name__} asks for {', '.join(refused) or 'a mask of its own'}, which LocalEngine does not "
            "support. Use another engine for this model."
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    step.windows[layer] = sliding_window
    keys_PKSD, values_PKSD = step.cache.write(layer, key_1KND[0], value_1KND[0], step.rows(key_1KND.shape[1]))
    if scaling is None:
        scaling = query_1HND.shape[-1] ** -0.5

    query_NHD = query_1HND[0].transpose(0, 1)
    out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], value_1KND.shape[-1])
    if step.decode is not None:
        singles = step.decode.size
        out_NHD[:singles] = _decode(step.decode, query_NHD[:singles], keys_PKSD, values_PKSD, scaling, sliding_window)
    for part in step.prefill:
        query_HCD = query_1HND[0, :, part.rows]
        if part.start:
            key_KLD, value_KLD = _collected(keys_PKSD, part), _collected(values_PKSD, part)
        else:
            key_KLD, value_KLD = key_1KND[0, :, part.rows], value_1KND[0, :, part.rows]
        mask = part.mask(sliding_window)
        out_1HCD = scaled_dot_product_attention(
            query_HCD[None],
            key_KLD[None],
            value_KLD[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query_HCD.shape[0] != key_KLD.shape[0],
        )
        out_NHD[part.rows] = out_1HCD[0].transpose(0, 1)
    return out_NHD[None], None


def _decode(
    layout: DecodeLayout,
    query_BHD: Tensor,
    keys_PKSD: Tensor,
    values_PKSD: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    if layout.span is None:
        keys_TKSD, values_TKSD = keys_PKSD[layout.blocks_T], values_PKSD[layout.blocks_T]
    else:
        keys_TKSD, values_TKSD = keys_PKSD[: layout.span], values_PKSD[: layout.span]
    read, heads, block_size, head_size = keys_TKSD.shape
    value_size, (batch, query_heads, _) = values_TKSD.shape[-1], query_BHD.shape
    group = query_heads // heads

    query_TGD = query_BHD.reshape(batch, -1).index_select(0, layout.query_T).view(read * heads, group, head_size)
    scores_TGS = torch.baddbmm(
        layout.mask(window, heads, query_BHD.dtype),
        query_TGD,
        keys_TKSD.view(-1, block_size, head_size).transpose(1, 2),
        alpha=scaling,
    )
    partial_TGD = torch.bmm(torch.softmax(scores_TGS, dim=-1), values_TKSD.view(-1, block_size, value_size))
    normaliser_TGS = torch.logsumexp(scores_TGS.float(), dim=-1)

    table = layout.table_BW.view(-1)
    normaliser_BWH = normaliser_TGS.view(read, query_heads).index_select(0, table).view(batch, -1, query_heads, 1)
    weight_BWH1 = torch.softmax(normaliser_BWH + layout.padding_BW11, dim=1).to(partial_TGD.dtype)
    partial_BWHD = partial_TGD.view(read, -1).index_select(0, table).view(batch, -1, query_heads, value_size)
    return (partial_BWHD * weight_BWH1).sum(dim=1)


def _collected(pool_PKSD: Tensor, part: PrefillLayout) -> Tensor:
    """The keys or values of one sequence, side by side: [K, L, D]."""
    blocks_KWSD = pool_PKSD[part.blocks].transpose(0, 1)
    return blocks_KWSD.reshape(blocks_KWSD.shape[0], -1, blocks_KWSD.shape[-1])[:, : part.length]
