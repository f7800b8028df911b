"""Steps on a GPU, without waiting for the host.

A step is a first pass over all tokens of its chunks, then passes over one token of each sampling sequence. The state of
the sequences (last token, position, whether the response has ended) stays in device tensors that the passes update, so
passes follow each other without the host, and the next step may be launched before this one has been read. Passes are
captured as CUDA graphs for a ladder of batch sizes; padding rows write to a spare block. Decoder layers are compiled
one by one, which fuses the operations around attention and matrix products.

Shape suffixes: R = rows that sample, N = tokens of a first pass, C = tokens sampled per step, T = tiles, W = blocks of
the longest sequence, E = stop ids, V = vocabulary, K = most ids that top-k and top-p keep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.engines.local.attention_interface import running
from agent_r1.engines.local.gpu.gpu_attention import GpuCache, GpuStep, Kernels, Tiles, key_value_shape
from agent_r1.engines.local.gpu.gpu_state import MAX_STOP_IDS, FirstPass, GpuSight, State, cut, cut_supports, in_order
from agent_r1.engines.local.model_runner import PROBE_BLOCKS, ModelRunner
from agent_r1.engines.local.request import Chunk, Draw, ReadDraws, Request, SamplingKind
from agent_r1.engines.local.sampling import nucleus, support_ids
from agent_r1.errors import ConfigError
from agent_r1.vision.eyes import Sight
from agent_r1.vision.picture_format import PictureFormat

# Fewer programs do not fill a GPU of 132 multiprocessors, so sequences are divided among several.
FULL_GPU = 264
MAX_SPLITS = 16
FILTERED_ROWS = 64  # rows that top-k and top-p are applied to at once
# The largest pass with a graph, in numbers of its hidden states: 4,096 tokens of width 4,096. Without a graph, the host
# takes 24 ms to launch the kernels of 30 layers; larger passes take a GPU longer than that. Their graphs would take
# much memory.
LARGEST_GRAPH = 4096 * 4096

Pass = Callable[[], None]
# Support ids returned per token; 0: top-k or top-p is used but no request keeps its support; None: neither is used.
Width = int | None
Key = tuple[str, int, Width]


def ladder(largest: int) -> list[int]:
    """Batch sizes with graphs: 2, 4, 8, then powers of two and the sizes half-way between."""
    sizes = [2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1].bit_count() == 1 else sizes[-1] * 4 // 3)
    return [size for size in sizes if size < largest] + [max(2, largest)]


@dataclass(slots=True)
class Graphs:
    """Captured passes in one memory pool, since only one runs at a time."""

    side: Any = field(default_factory=torch.cuda.Stream)  # a single one: each stream has its own workspaces
    pool: Any = None
    captured: dict[Key, Any] = field(default_factory=dict)

    def capture(self, key: Key, work: Pass) -> None:
        """Capture `work` after running it once, which compiles its kernels."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            work()
        torch.cuda.current_stream().wait_stream(self.side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (tools, rewards, a classifier on the same GPU) are not captured.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
            work()
        self.pool = graph.pool()
        self.captured[key] = graph


class GpuRunner(ModelRunner):
    """Runs everything on one stream, in order."""

    overlaps = True
    max_stop_ids = MAX_STOP_IDS

    def __init__(  # noqa: PLR0913 (sizes of the tensors, which are allocated once)
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        *,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_batch_tokens: int,
        max_length: int,
        burst: int,
        graphs: bool,
        pictures: PictureFormat | None = None,
    ) -> None:
        """max_length: tokens of the longest sequence."""
        super().__init__(model, pictures)
        config, self._kernels = self.config, kernels
        shape = key_value_shape(config) | {"block_size": block_size}
        heads = shape["heads"]
        embedding = model.get_input_embeddings().weight
        self._cache = GpuCache(num_blocks=num_blocks, like=embedding, **shape)
        self._probe = GpuCache(num_blocks=PROBE_BLOCKS, like=embedding, **shape)
        self._key_heads = heads
        self._tile = kernels.tokens_per_tile(config.num_attention_heads, heads)
        self._rows = ladder(max_running)
        self._sizes = ladder(max(max_running + max_batch_tokens, 2 * PROBE_BLOCKS))
        tokens, rows = self._sizes[-1], self._rows[-1]
        self._burst = burst
        width = max(-(-max_length // block_size), PROBE_BLOCKS)
        self._state = State.empty(rows=rows, width=width, burst=burst, vocab=config.vocab_size, device=self.device)
        self._first = FirstPass.empty(tokens=tokens, tiles=self._tiles(tokens), rows=rows, device=self.device)
        self._sight: GpuSight | None = None
        if pictures is not None:
            self._sight = GpuSight(pictures, tokens=tokens, rows=rows, device=self.device)
        self._places = torch.arange(rows, device=self.device)
        self._graphs = Graphs() if graphs else None
        self._largest_graph = LARGEST_GRAPH // config.hidden_size  # tokens
        self._before: dict[Request, int] = {}  # rows of the previous step

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> ReadDraws:
        ordered = self._load(chunks)
        drawing = [chunk for chunk in ordered if chunk.count]
        self._cache.copy([pair for chunk in chunks for pair in chunk.copies])
        rows, width = len(drawing), self._width(drawing)
        most = max((chunk.count for chunk in drawing), default=0)
        singles = all(chunk.length == 1 for chunk in chunks) and rows == len(chunks)
        if self._sight is not None and any(chunk.ids and chunk.ids[-1] < 0 for chunk in drawing):
            singles = False  # a pass over sampled tokens shows no pictures
        if not singles:
            self._run_first(ordered, width)
        size = self._rows[bisect_left(self._rows, rows)]
        for _ in range(most if singles else most - 1):
            self._run("decode", size, width, partial(self._decode, size, width))
        return self._reader(rows, width)

    def _width(self, drawing: Sequence[Chunk]) -> Width:
        """A power of two if supports are returned, so that a few buffers and graphs serve all settings."""
        if not any(map(is_filtered, {chunk.request.kind for chunk in drawing})):
            return None
        settings = [chunk.request.sampling for chunk in drawing]
        most = max(sampling.top_k if sampling.keep_support else 0 for sampling in settings)
        width = min(1 << (most - 1).bit_length(), self.config.vocab_size) if most else 0
        if width:
            self._state.make_supports(width)
        return width

    def clear_cache(self) -> None:
        with torch.inference_mode():
            self._cache.pool_L2PKSD.zero_()

    def close(self) -> None:
        self._graphs = None
        self._cache = self._probe
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def logits_of(self, steps: Sequence[Sequence[Chunk]]) -> Tensor:
        for chunks in steps:
            ordered = self._load(chunks)
            if all(chunk.length == 1 and chunk.count for chunk in chunks):
                logits = self._decode_logits(len(chunks), self._state.alive(len(chunks)), self._probe)
            else:
                tokens, sight = self._lay_out(ordered)
                logits = self._first_logits(tokens, len(chunks), self._probe, sight)
        self._state.left_R.zero_()  # probes are not continued
        self._before = {}
        return logits

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs for sampling without top-k and top-p, largest first, so that one pool fits all."""
        if self._graphs is None:
            return
        for size in [size for size in reversed(self._sizes) if size <= self._largest_graph]:
            self._first.clear(self._cache.trash)
            self._capture(("first", size, None), partial(self._sample_first, size, None))
        for rows in reversed(self._rows):
            self._capture(("decode", rows, None), partial(self._decode, rows, None))

    def _run(self, kind: str, size: int, width: Width, work: Pass) -> None:
        if self._graphs is None or size > self._largest_graph:
            work()
            return
        self._capture((kind, size, width), work)
        self._graphs.captured[kind, size, width].replay()

    def _capture(self, key: Key, work: Pass) -> None:
        """Capture a graph if it is missing, and restore the state, which capturing changes."""
        assert self._graphs is not None
        if key not in self._graphs.captured:
            before = [tensor.clone() for tensor in self._state.changing()]
            self._graphs.capture(key, work)
            for now, then in zip(self._state.changing(), before, strict=True):
                now.copy_(then)

    def _run_first(self, ordered: Sequence[Chunk], width: Width) -> None:
        tokens, sight = self._lay_out(ordered)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        if sight is not None:  # how many pictures there are, and of what size, differs from step to step
            self._sample_first(size, width, sight)
        else:
            self._run("first", size, width, partial(self._sample_first, size, width))

    # The following run under capture, so nothing in them may depend on host data.

    def _decode(self, rows: int, width: Width) -> None:
        alive_R = self._state.alive(rows)
        self._draw(self._decode_logits(rows, alive_R, self._cache), alive_R, width)

    def _decode_logits(self, rows: int, alive_R: Tensor, cache: GpuCache) -> Tensor:
        state, size = self._state, cache.block_size
        position_R = state.position_R[:rows]
        block_R = state.table_RW[:rows].gather(1, (position_R // size)[:, None])[:, 0]
        step = GpuStep(
            cache=cache,
            kernels=self._kernels,
            slot_N=torch.where(alive_R, block_R * size + position_R % size, cache.trash),
            tiles=Tiles(
                position_N=position_R,
                table_QW=state.table_RW,
                sequence_T=self._places[:rows],
                row_T=self._places[:rows],
                count_T=alive_R.int(),
                tokens=1,
                splits=splits_for(rows * self._key_heads),
            ),
        )
        with running(step):
            positions = position_R if self._sight is None else self._sight.later(position_R)
            return self.forward(state.token_R[:rows], positions, self._places[:rows])

    def _first_logits(self, tokens: int, rows: int, cache: GpuCache, sight: Sight | None = None) -> Tensor:
        first = self._first
        tiles = self._tiles(tokens)
        step = GpuStep(
            cache=cache,
            kernels=self._kernels,
            slot_N=first.slot_N[:tokens],
            tiles=Tiles(
                position_N=first.position_N[:tokens],
                table_QW=self._state.table_RW,
                sequence_T=first.sequence_T[:tiles],
                row_T=first.row_T[:tiles],
                count_T=first.count_T[:tiles],
                tokens=self._tile,
                splits=1,
            ),
        )
        with running(step):
            positions = first.position_N[:tokens] if self._sight is None else self._sight.positions(tokens)
            return self.forward(first.ids_N[:tokens], positions, first.last_R[:rows], sight)

    def _sample_first(self, tokens: int, width: Width, sight: Sight | None = None) -> None:
        rows = min(self._rows[-1], tokens)
        self._draw(self._first_logits(tokens, rows, self._cache, sight), self._state.alive(rows), width)

    def _tiles(self, tokens: int) -> int:
        """The most tiles there can be: every sequence may have one that is not full."""
        return min(tokens, self._rows[-1] + tokens // self._tile)

    def _draw(self, logits_RV: Tensor, alive_R: Tensor, width: Width) -> None:
        state, rows = self._state, len(alive_R)
        temperature_R = state.temperature_R[:rows]
        uniform_R = state.uniform_CR.index_select(0, state.passes)[0, :rows]
        if width is not None:  # greedy rows have a top_k of the whole vocabulary
            scores_RV = logits_RV.float() / torch.where(temperature_R == 0, 1, temperature_R)[:, None]
            parts = (scores_RV, state.top_k_R[:rows], state.top_p_R[:rows])
            # In parts, since sorting takes several times the memory of its input.
            kept = [nucleus(*part) for part in zip(*(p.split(FILTERED_ROWS) for p in parts), strict=True)]
            logits_RV = torch.cat(kept)
            if width:
                state.keep(torch.cat([support_ids(scores_FV, width) for scores_FV in kept]))
            temperature_R = torch.where(temperature_R == 0, 0.0, 1.0)
        state.draw(*self._kernels.draw(logits_RV, temperature_R, uniform_R), alive_R)

    def _load(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Load the next step onto the device; returns the chunks in the order of its rows."""
        ordered = in_order(chunks)
        self._state.load(ordered, self._before, self.config.vocab_size)
        if self._sight is not None:
            self._sight.load_rows(ordered)
        self._before = {chunk.request: row for row, chunk in enumerate(ordered) if chunk.count}
        return ordered

    def _lay_out(self, ordered: Sequence[Chunk]) -> tuple[int, Sight | None]:
        """Load the tokens of a first pass; returns their number and the pictures among them."""
        cache, state = self._cache, self._state
        tokens = self._first.load(ordered, state, block_size=cache.block_size, tile=self._tile, trash=cache.trash)
        return tokens, None if self._sight is None else self._sight.load_first(ordered)

    def _reader(self, rows: int, width: Width) -> ReadDraws:
        state, on_gpu = self._state, self.device.type == "cuda"
        sources = [state.drawn_CR, state.logprob_CR, *([state.supports[width]] if width else [])]
        copies = [
            torch.empty(rows, self._burst, *source.shape[2:], dtype=source.dtype, pin_memory=on_gpu).copy_(
                source[:, :rows].transpose(0, 1).contiguous(), non_blocking=on_gpu
            )
            for source in sources
        ]

        def read() -> list[Draw]:
            drawn_RC, logprob_RC, *supports = (copy.numpy() for copy in copies)
            kept = cut_supports(drawn_RC, supports[0]) if supports else [None] * rows
            return list(zip(*cut(drawn_RC, logprob_RC), kept, strict=True))

        if not on_gpu:
            return read
        done = torch.cuda.Event()
        done.record()
        return lambda: read() if done.query() else None


def load_triton_kernels() -> Kernels:
    try:
        from agent_r1.engines.local.gpu import triton_kernels
    except ImportError as error:
        raise ConfigError(f"sampling on a GPU needs Triton, which comes with torch for CUDA: {error}") from error
    return triton_kernels


def is_filtered(kind: SamplingKind) -> bool:
    temperature, top_p, top_k, _ = kind
    return bool(temperature) and (top_k > 0 or top_p < 1)


def splits_for(programs: int) -> int:
    """The smallest power of two that fills the GPU, or the most that are allowed."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < FULL_GPU:
        splits *= 2
    return splits
