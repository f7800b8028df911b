"""The sequences of a step, in device tensors at fixed addresses, and how the host updates them.

`State` holds one row per sampling sequence; passes read and update it without the host. `FirstPass` holds the tokens of
a step's chunks and their tiles. Nothing here waits for the device.

Shape suffixes: R = rows that sample, N = tokens of a first pass, C = tokens sampled per step, T = tiles, W = blocks of
the longest sequence, E = stop ids, K = most ids that top-k and top-p keep, A = numbers of a position.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.engines.local.model_runner import positions_of, shift_of, sight_of
from agent_r1.engines.local.request import Chunk, Request, SamplingKind
from agent_r1.engines.local.sampling import Kept, ragged
from agent_r1.vision.eyes import Sight
from agent_r1.vision.picture_format import PictureFormat

MAX_STOP_IDS = 16


@dataclass(slots=True)
class State:
    """The sampling sequences."""

    token_R: Tensor  # the last token, to be run next
    position_R: Tensor  # position of the last token
    left_R: Tensor  # tokens still to be sampled in this step
    ended_R: Tensor  # whether the response is complete
    table_RW: Tensor  # the blocks; sequences that do not sample follow the others
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    stop_RE: Tensor  # -1: none
    uniform_CR: Tensor
    drawn_CR: Tensor  # tokens sampled in this step; -1: none
    logprob_CR: Tensor
    passes: Tensor  # number of passes of this step so far
    kinds: list[SamplingKind] = field(default_factory=list)  # kinds of the first rows, as loaded
    # The ids that were sampled from, by K: [C, R, K]. Never replaced, because captured graphs write to them.
    supports: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, *, rows: int, width: int, burst: int, vocab: int, device: torch.device) -> State:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            token_R=zeros(rows),
            position_R=zeros(rows),
            left_R=zeros(rows),
            ended_R=zeros(rows, dtype=torch.bool),
            table_RW=zeros(rows, width, dtype=torch.int32),
            temperature_R=zeros(rows, dtype=torch.float32),
            top_k_R=zeros(rows) + vocab,
            top_p_R=zeros(rows, dtype=torch.float32) + 1,
            stop_RE=zeros(rows, MAX_STOP_IDS) - 1,
            uniform_CR=zeros(burst, rows, dtype=torch.float32),
            drawn_CR=zeros(burst, rows),
            logprob_CR=zeros(burst, rows, dtype=torch.float32),
            passes=zeros(1),
        )

    def changing(self) -> list[Tensor]:
        """The tensors that a pass changes."""
        return [self.token_R, self.position_R, self.left_R, self.ended_R, self.drawn_CR, self.logprob_CR, self.passes]

    def alive(self, rows: int) -> Tensor:
        return (self.left_R[:rows] > 0) & ~self.ended_R[:rows]

    def load(self, ordered: Sequence[Chunk], before: Mapping[Request, int], vocab: int) -> None:
        """Load the next step. `before`: rows of the previous step, which sequences in flight continue from."""
        drawing = [chunk for chunk in ordered if chunk.count]
        rows = len(drawing)
        tables = block_tables(ordered)
        put(self.table_RW[: len(ordered), : tables.shape[1]], tables)
        token_R, before_R, position_R, left_R = to_device(_numbers(drawing, before), self.token_R.device)
        known_R, source_R = before_R < 0, before_R.clamp(min=0)
        self.token_R[:rows] = torch.where(known_R, token_R, self.token_R[source_R])
        self.ended_R[:rows] = self.ended_R[source_R] & ~known_R
        self.position_R[:rows] = position_R
        self.left_R.zero_()
        self.left_R[:rows] = left_R
        self._load_sampling(drawing, vocab)
        self.drawn_CR.fill_(-1)
        self.passes.zero_()

    def _load_sampling(self, drawing: Sequence[Chunk], vocab: int) -> None:
        counts_R1 = np.array([[chunk.count] for chunk in drawing]).reshape(-1, 1)
        numbers = [chunk.request.uniforms[chunk.drawn : chunk.drawn + chunk.count] for chunk in drawing]
        uniform_RC = np.zeros((len(drawing), len(self.uniform_CR)), dtype=np.float32)
        uniform_RC[np.arange(len(self.uniform_CR)) < counts_R1] = np.concatenate([*numbers, []])
        put(self.uniform_CR[:, : len(drawing)], np.minimum(uniform_RC.T, np.float32(1 - 2.0**-24)))
        kinds = [chunk.request.kind for chunk in drawing]
        if kinds != self.kinds[: len(kinds)]:  # usually all rows have the same kind
            self.kinds = []  # in case loading fails
            self._load_kinds(kinds, vocab)
            self.kinds = kinds

    def _load_kinds(self, kinds: list[SamplingKind], vocab: int) -> None:
        """At temperature 0 nothing is filtered."""
        rows, device = len(kinds), self.token_R.device
        temperatures, top_ps, top_ks, stop_ids = zip(*kinds, strict=True)
        floats = np.array([temperatures, [p if t else 1.0 for t, p in zip(temperatures, top_ps, strict=True)]])
        self.temperature_R[:rows], self.top_p_R[:rows] = to_device(floats.astype(np.float32), device)
        most = [(k or vocab) if t else vocab for t, k in zip(temperatures, top_ks, strict=True)]
        put(self.top_k_R[:rows], np.array(most, np.int64))
        distinct = set(stop_ids)  # usually a single set
        stops = np.full((1 if len(distinct) == 1 else rows, MAX_STOP_IDS), -1, dtype=np.int64)
        for row, ids in enumerate(distinct if len(distinct) == 1 else stop_ids):
            stops[row, : len(ids)] = ids
        self.stop_RE[:rows] = to_device(stops, device)

    def make_supports(self, width: int) -> None:
        """Allocate buffers for supports of up to this many ids. Must not run while a graph is captured."""
        if width not in self.supports:
            ids_CR = self.drawn_CR
            self.supports[width] = torch.zeros(*ids_CR.shape, width, dtype=torch.int32, device=ids_CR.device)

    def keep(self, ids_RK: Tensor) -> None:
        """Record the supports of a pass, before `draw`."""
        rows, width = ids_RK.shape
        self.supports[width][:, :rows].index_copy_(0, self.passes, ids_RK[None])

    def draw(self, token_R: Tensor, logprob_R: Tensor, alive_R: Tensor) -> None:
        """Record what a pass has sampled, and advance to the next pass."""
        rows = len(alive_R)
        self.drawn_CR[:, :rows].index_copy_(0, self.passes, torch.where(alive_R, token_R, -1)[None])
        self.logprob_CR[:, :rows].index_copy_(0, self.passes, logprob_R[None])
        stops_R = (self.stop_RE[:rows] == token_R[:, None]).any(dim=1)
        self.ended_R[:rows] |= alive_R & stops_R
        self.token_R[:rows] = torch.where(alive_R, token_R, self.token_R[:rows])
        self.position_R[:rows] += alive_R
        self.left_R[:rows] -= alive_R.long()
        self.passes += 1


def _numbers(drawing: Sequence[Chunk], before: Mapping[Request, int]) -> NDArray[np.int64]:
    """One row each: last token, its row in the previous step (-1 if known), its position, tokens to sample."""
    numbers = [
        (ids[-1], -1, chunk.end - 1, chunk.count)
        if (ids := chunk.ids)
        else (0, before[chunk.request], chunk.start, chunk.count)
        for chunk in drawing
    ]
    flat = np.fromiter(chain.from_iterable(numbers), dtype=np.int64, count=4 * len(numbers))
    return flat.reshape(-1, 4).T


@dataclass(slots=True)
class FirstPass:
    """The tokens of a step's chunks and their tiles."""

    ids_N: Tensor
    position_N: Tensor
    slot_N: Tensor
    last_R: Tensor  # the last row of each sampling sequence
    sequence_T: Tensor
    row_T: Tensor
    count_T: Tensor

    @classmethod
    def empty(cls, *, tokens: int, tiles: int, rows: int, device: torch.device) -> FirstPass:
        shapes = {"ids_N": tokens, "position_N": tokens, "slot_N": tokens, "last_R": rows}
        shapes |= {"sequence_T": tiles, "row_T": tiles, "count_T": tiles}
        return cls(**{name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in shapes.items()})

    def clear(self, trash: int) -> None:
        """Leave nothing to compute or store."""
        for tensor in (self.ids_N, self.position_N, self.last_R, self.sequence_T, self.row_T, self.count_T):
            tensor.zero_()
        self.slot_N.fill_(trash)

    def load(self, ordered: Sequence[Chunk], state: State, *, block_size: int, tile: int, trash: int) -> int:
        """Load the chunks; returns the number of tokens."""
        lengths = np.array([chunk.length for chunk in ordered])
        total, starts = int(lengths.sum()), lengths.cumsum() - lengths
        ids = np.fromiter(chain.from_iterable(chunk.ids or (0,) for chunk in ordered), dtype=np.int64, count=total)
        sequence = np.repeat(np.arange(len(ordered)), lengths)
        position = np.arange(total) - starts[sequence] + np.array([chunk.start for chunk in ordered])[sequence]
        tables = block_tables(ordered)
        slot = tables[sequence, position // block_size].astype(np.int64) * block_size + position % block_size
        tiles = -(-lengths // tile)
        owner = np.repeat(np.arange(len(ordered)), tiles)
        offset = (np.arange(len(owner)) - (tiles.cumsum() - tiles)[owner]) * tile
        self.clear(trash)
        put(self.ids_N[:total], ids)
        put(self.position_N[:total], position)
        put(self.slot_N[:total], slot)
        put(self.sequence_T[: len(owner)], owner)
        put(self.row_T[: len(owner)], starts[owner] + offset)
        put(self.count_T[: len(owner)], np.minimum(tile, lengths[owner] - offset))
        last = (starts + lengths - 1)[: sum(chunk.count > 0 for chunk in ordered)]
        put(self.last_R[: len(last)], last)
        # Single tokens that sample come first. They may be known to the device only, or the sequence may have ended.
        singles = sum(chunk.count > 0 and chunk.length == 1 for chunk in ordered)
        self.ids_N[:singles] = state.token_R[:singles]
        self.slot_N[:singles] = torch.where(state.ended_R[:singles], trash, self.slot_N[:singles])
        return total


class GpuSight:
    """Positions of a model that takes pictures, as captured passes need them."""

    def __init__(self, form: PictureFormat, *, tokens: int, rows: int, device: torch.device) -> None:
        self._form = form
        self._positions_AN = torch.zeros(form.axes, tokens, dtype=torch.int64, device=device)
        self._shift_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def load_rows(self, ordered: Sequence[Chunk]) -> None:
        """Load the rows of the next step."""
        shifts = [shift_of(chunk.request) for chunk in ordered if chunk.count]
        put(self._shift_R[: len(shifts)], np.array(shifts, np.int64))

    def load_first(self, ordered: Sequence[Chunk]) -> Sight | None:
        """Load the tokens of a first pass; returns the pictures among them."""
        positions_AN = positions_of(ordered, self._form)
        put(self._positions_AN[:, : positions_AN.shape[1]], positions_AN)
        sight = sight_of(ordered, self._form)
        return None if sight is None else sight.to(self._shift_R.device)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of a first pass, [A, N]."""
        return self._positions_AN[:, :tokens]

    def later(self, place_R: Tensor) -> Tensor:
        """Return the positions of sampled tokens, [A, R], from their places in the sequences."""
        return (place_R + self._shift_R[: len(place_R)]).expand(self._form.axes, -1)


def in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order of rows: single tokens that sample, longer chunks that sample, the rest."""
    if all(chunk.count for chunk in chunks):  # planned in this order already
        return list(chunks)
    return sorted(chunks, key=lambda chunk: (not chunk.count, chunk.length > 1))


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def put(buffer: Tensor, values: NDArray[Any]) -> None:
    buffer.copy_(to_device(values, buffer.device))


def block_tables(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    """The blocks of each chunk, padded with zeros. They rarely change, so their bytes are cached."""
    tables: list[bytes] = []
    for chunk in chunks:
        request = chunk.request
        if request.table[0] is not chunk.blocks:
            request.table = chunk.blocks, array("i", chunk.blocks).tobytes()
        tables.append(request.table[1])
    width = max(map(len, tables), default=0)
    filled = bytearray().join(table.ljust(width, b"\0") for table in tables)
    return np.frombuffer(filled, dtype=np.int32).reshape(len(tables), width // 4)


def cut(drawn_RC: NDArray[np.int64], logprob_RC: NDArray[np.float32]) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens drawn in each row, and their log-probs."""
    counts = (drawn_RC >= 0).sum(axis=1).tolist()
    tokens = [row[:count] for row, count in zip(drawn_RC.tolist(), counts, strict=True)]
    return tokens, [row[:count] for row, count in zip(logprob_RC.tolist(), counts, strict=True)]


def cut_supports(drawn_RC: NDArray[np.int64], ids_RCK: NDArray[np.int32]) -> list[Kept]:
    """The ids that each row's tokens were sampled from. Vectorised, as a loop over tokens would stall the GPU."""
    is_drawn_RC = drawn_RC >= 0
    counts, ids = ragged(ids_RCK[is_drawn_RC])  # ids of all tokens, row by row
    ends_R = is_drawn_RC.sum(axis=1).cumsum()[:-1]
    starts = np.concatenate([[0], counts.cumsum()])
    return list(zip(np.split(counts, ends_R), np.split(ids, starts[ends_R]), strict=True))
