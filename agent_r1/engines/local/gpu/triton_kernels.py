"""Triton kernels of the GPU engine: writing to the paged cache, attention over it, drawing tokens.

They read all sizes (tokens of a tile, length of a sequence) from tensors, never from the host, so that a captured CUDA
graph can be replayed for other sequences. `gpu_attention.Kernels` describes the functions; `torch_kernels.py` computes
the same in plain torch.

Shape suffixes: N = rows (tokens of a pass), H = query heads, K = key/value heads, D = head size, P = blocks of the
pool, S = tokens in a block, T = tiles, Q = sequences, W = blocks of the longest, B = rows to draw for, V = vocabulary.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"
# ruff: noqa: PLR0913, PLR0915 (a kernel takes what it reads)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agent_r1.compute.attention import Scoring
from agent_r1.engines.local.gpu.gpu_attention import Tiles

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _write(key, value, keys, values, slot_N, key_row, key_head, value_row, value_head, S: tl.constexpr,
           KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    slot = tl.load(slot_N + row).to(tl.int64)
    d = tl.arange(0, WIDTH)
    place = (slot // S) * heads * S + head * S + slot % S
    tl.store(keys + place * KEY + d, tl.load(key + row * key_row + head * key_head + d, mask=d < KEY), mask=d < KEY)
    tl.store(values + place * VALUE + d, tl.load(value + row * value_row + head * value_head + d, mask=d < VALUE),
             mask=d < VALUE)  # fmt: skip


def write(key_NKD: Tensor, value_NKD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, slot_N: Tensor) -> None:
    (rows, heads, size), value_size = key_NKD.shape, value_NKD.shape[-1]
    assert key_NKD.stride(-1) == value_NKD.stride(-1) == 1
    _write[rows, heads](
        key_NKD, value_NKD, keys_PKSD, values_PKSD, slot_N, key_NKD.stride(0), key_NKD.stride(1), value_NKD.stride(0),
        value_NKD.stride(1), S=keys_PKSD.shape[2], KEY=size, VALUE=value_size,
        WIDTH=triton.next_power_of_2(max(size, value_size)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _attend(query, keys, values, out, partial, normaliser, position_N, table_QW, sequence_T, row_T, count_T, scale,
            query_row, query_head, out_row, out_head, table_row, window, softcap, sinks_H, KEYS_HEADS: tl.constexpr,
            GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, TOKENS: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
            D_PAD: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
            CAPPED: tl.constexpr, SUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_T + tile)
    if count == 0:
        return
    M: tl.constexpr = TOKENS * GROUP_PAD
    m = tl.arange(0, M)
    token, member = m // GROUP_PAD, m % GROUP_PAD
    used = (token < count) & (member < GROUP)
    d, n = tl.arange(0, D_PAD), tl.arange(0, STEP)
    first_row = tl.load(row_T + tile).to(tl.int64)
    first = tl.load(position_N + first_row).to(tl.int32)
    position, row = first + token, first_row + token
    query_head_index = head * GROUP + member
    q = tl.load(query + (row * query_row + query_head_index * query_head)[:, None] + d[None, :],
                mask=used[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
    table = table_QW + tl.load(sequence_T + tile).to(tl.int64) * table_row

    end = first + count  # the last token of the tile attends to all before it and itself
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, first - window + 1) // STEP * STEP
    share = tl.cdiv(tl.cdiv(end - begin, STEP), SPLITS) * STEP
    begin += split * share
    end = tl.minimum(end, begin + share)

    top, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    if SUNK:  # the sink is a first key without a value
        sink = tl.load(sinks_H + query_head_index, mask=used, other=0.0).to(tl.float32) * LOG2_E
        top, total = tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)
    acc = tl.zeros([M, D_PAD], tl.float32)
    for start in range(begin, end, STEP):
        seen = start + n
        inside = seen < end
        block = tl.load(table + seen // S, mask=inside, other=0).to(tl.int64)
        place = (block * KEYS_HEADS + head) * S + seen % S
        here = inside[None, :] & (d < D)[:, None]
        k = tl.load(keys + place[None, :] * D + d[:, None], mask=here, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * (scale * LOG2_E)
        if CAPPED:  # tanh(x) = 2 sigmoid(2x) - 1; the cap is in the unit of the scores
            scores = softcap * (2 * tl.sigmoid(scores * (2 / softcap)) - 1)
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        if WINDOWED:
            visible &= seen[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + place[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    mask = used[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        result = acc / total[:, None]
        tl.store(out + (row * out_row + query_head_index * out_head)[:, None] + d[None, :],
                 result.to(out.dtype.element_ty), mask=mask)  # fmt: skip
    else:  # [N, H, SPLITS, D]; an empty split gets a normaliser of weight 0
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place_m = (row * (KEYS_HEADS * GROUP) + query_head_index) * SPLITS + split
        tl.store(partial + place_m[:, None] * D + d[None, :], result, mask=mask)
        tl.store(normaliser + place_m, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -1e30),
                 mask=used)  # fmt: skip


@triton.jit
def _join(partial, normaliser, out, count_T, out_row, out_head, SPLITS: tl.constexpr, D: tl.constexpr,
          D_PAD: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(count_T + row) == 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    place = (row.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + s
    norm = tl.load(normaliser + place)
    weight = tl.exp2(norm - tl.max(norm, 0))
    part = tl.load(partial + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row.to(tl.int64) * out_row + head * out_head + d, result.to(out.dtype.element_ty), mask=d < D)


def tokens_per_tile(query_heads: int, key_heads: int) -> int:
    """Tokens per tile, so that tokens times query heads per key head fill a product of 64 rows."""
    return max(1, 64 // triton.next_power_of_2(query_heads // key_heads))


def attend(query_NHD: Tensor, keys_PKSD: Tensor, values_PKSD: Tensor, tiles: Tiles, scoring: Scoring) -> Tensor:
    (rows, heads, size), (_, key_heads, block_size, _) = query_NHD.shape, keys_PKSD.shape
    tokens, splits, count_T = tiles.tokens, tiles.splits, tiles.count_T
    assert keys_PKSD.shape == values_PKSD.shape, "keys and values of different sizes have no kernel"
    assert splits == 1 or (tokens == 1 and len(count_T) == rows)
    out_NHD = torch.empty_like(query_NHD, memory_format=torch.contiguous_format)
    group = heads // key_heads
    padded = triton.next_power_of_2(group)
    padded = max(padded, 16 // tokens)  # a product has at least 16 rows
    half = query_NHD.dtype != torch.float32
    d_pad = max(16, triton.next_power_of_2(size))
    partial = normaliser = out_NHD
    sinks_H = out_NHD if scoring.sinks_H is None else scoring.sinks_H
    cap = (scoring.softcap or 1.0) * LOG2_E.value
    if splits > 1:
        partial = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query_NHD.device)
        normaliser = torch.empty(rows, heads, splits, dtype=torch.float32, device=query_NHD.device)
    _attend[len(count_T), key_heads, splits](
        query_NHD, keys_PKSD, values_PKSD, out_NHD, partial, normaliser, tiles.position_N, tiles.table_QW,
        tiles.sequence_T, tiles.row_T, count_T, scoring.scale, query_NHD.stride(0), query_NHD.stride(1),
        out_NHD.stride(0), out_NHD.stride(1), tiles.table_QW.stride(0), scoring.window or 0, cap,
        sinks_H, KEYS_HEADS=key_heads, GROUP=group, GROUP_PAD=padded, TOKENS=tokens, S=block_size, D=size, D_PAD=d_pad,
        STEP=64 if d_pad <= 128 else 32, SPLITS=splits, WINDOWED=scoring.window is not None,
        CAPPED=scoring.softcap is not None, SUNK=scoring.sinks_H is not None, PRECISION="tf32" if half else "ieee",
        num_warps=2 if tokens == 1 else 4, num_stages=3 if half else 2,
    )  # fmt: skip
    if splits > 1:
        _join[rows, heads](partial, normaliser, out_NHD, count_T, out_NHD.stride(0), out_NHD.stride(1), SPLITS=splits,
                           D=size, D_PAD=d_pad, num_warps=1)  # fmt: skip
    return out_NHD


@triton.jit
def _draw(logits, logits_row, temperature_B, uniform_B, token_B, logprob_B, V: tl.constexpr, TILE: tl.constexpr,
          TILES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperature_B + row)
    greedy = temperature == 0.0
    factor = 1.0 / tl.where(greedy, 1.0, temperature)
    source = logits + row.to(tl.int64) * logits_row
    v = tl.arange(0, TILE)

    best = tl.full([], -float("inf"), tl.float32)
    best_token = tl.full([], 0, tl.int32)
    for start in range(0, V, TILE):
        x = tl.load(source + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32) * factor
        highest, where = tl.max(x, 0, return_indices=True)
        best_token = tl.where(highest > best, start + where, best_token)
        best = tl.maximum(best, highest)

    # The sums of all tiles, so that the draw has to search only one of them.
    t = tl.arange(0, TILES)
    sums = tl.zeros([TILES], tl.float32)
    for start in range(0, V, TILE):
        x = tl.load(source + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32) * factor
        sums = tl.where(t == start // TILE, tl.sum(tl.exp(x - best), 0), sums)
    before = tl.cumsum(sums, 0)
    total = tl.max(before, 0)
    target = tl.load(uniform_B + row) * total
    # Only tiles and ids with a positive weight count, since a parallel cumulative sum need not be monotonic.
    tile = tl.min(tl.where((before > target) & (sums > 0), t, tl.max(tl.where(sums > 0, t, 0), 0)), 0)
    target -= tl.sum(tl.where(t < tile, sums, 0.0), 0)
    start = tile * TILE
    x = tl.load(source + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32) * factor
    weights = tl.exp(x - best)
    upto = tl.cumsum(weights, 0)
    target = tl.minimum(target, tl.max(upto, 0) * 0.9999999)  # sums in another order differ by rounding
    last = tl.max(tl.where(weights > 0, v, 0), 0)
    drawn = start + tl.min(tl.where((upto > target) & (weights > 0), v, last), 0)
    token = tl.where(greedy, best_token, drawn)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # stay in the row if logits are not finite
    chosen = tl.load(source + token).to(tl.float32) * factor
    tl.store(token_B + row, token.to(tl.int64))
    # Not finite if any logit is not, since the sum covers all of them.
    tl.store(logprob_B + row, chosen - best - tl.log(tl.sum(sums, 0)))


def draw(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits_BV.shape
    assert logits_BV.stride(-1) == 1
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    tile = min(4096, triton.next_power_of_2(vocab))
    _draw[rows,](
        logits_BV, logits_BV.stride(0), temperature_B, uniform_B, token_B, logprob_B, V=vocab, TILE=tile,
        TILES=triton.next_power_of_2(triton.cdiv(vocab, tile)), num_warps=8,
    )  # fmt: skip
    return token_B, logprob_B
