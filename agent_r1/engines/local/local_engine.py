"""The default engine: any Hugging Face causal LM in this process, with continuous batching.

While there are requests, one task on the event loop plans a step, has it computed, and answers the requests that are
complete. Requests join and leave between steps, a session's cache is kept for its next request, and what requests have
in common is computed once. `scheduler.py` decides what runs, `cpu/` and `gpu/` compute it, `request_engine.py` handles
futures and versions.

On a CPU, a step is computed on the engine's worker thread, so tools continue meanwhile. As long as tools do not wait,
results do not depend on timing: before each step the loop turns a fixed number of times, so that an episode that was
just answered can send its next request. On a GPU, the next step is launched before the last one is read, so the host
handles results, tools included, while the GPU computes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.compute.compiling import compile_each, repeated_layers
from agent_r1.engines.local.blocks import BLOCK_SIZE
from agent_r1.engines.local.cpu.cpu_runner import CpuRunner
from agent_r1.engines.local.gpu.fused_linear import fuse_linears, restore_linears
from agent_r1.engines.local.gpu.gpu_attention import Kernels
from agent_r1.engines.local.gpu.gpu_runner import GpuRunner, load_triton_kernels
from agent_r1.engines.local.model_runner import ModelRunner
from agent_r1.engines.local.request import Chunk, Draw, EngineStats, ReadDraws
from agent_r1.engines.local.request_engine import RequestEngine
from agent_r1.engines.local.scheduler import Scheduler
from agent_r1.engines.local.weights import LowRank
from agent_r1.errors import ConfigError
from agent_r1.vision.picture_format import PictureFormat

logger = logging.getLogger(__name__)

# Turns of the event loop before a step while nothing is in flight. An answered episode needs one to wake up and a few
# for each task or timeout around its tool call; a turn costs some microseconds.
SETTLE_TURNS = 32
POLL_SECONDS = 0.0005  # between checks whether the GPU is done; the next step is already launched, so nothing waits
# Requests answered before the next step is planned, on a GPU. Each answer wakes an episode, whose parsing, tools and
# rendering take 0.15 to 0.25 ms, so these take about as long as a burst. With fewer, steps of few rows cost the host
# more than they gain; answering all at once would leave the GPU idle, and episodes would then stay in lockstep.
ANSWERS_AT_ONCE = 96
ANSWERS_PER_CHECK = 8  # requests answered between two checks whether the GPU is done

InFlight = tuple[list[Chunk], ReadDraws]


class LocalEngine(RequestEngine):
    """Takes over its model: attention is replaced in place, so pass a copy of the learner's model.

    max_running: requests computed at the same time.
    max_batch_tokens: prompt tokens run in one step; longer prompts take several, so they do not stall the others.
    max_cached_tokens: size of the cache, for running requests and idle sessions, in whole blocks.
    burst: most tokens that a GPU samples for each request before the host looks at them.
    threads: torch threads of the worker thread on a CPU; None leaves torch's setting.
    compile_layers: whether to torch.compile the layers; None compiles on a GPU.
    kernels: run as on a GPU, with these kernels; None uses Triton's on a GPU.
    adapters: the only weights that `load_weights` will change; None: it changes all of them.
    pictures: how the model takes pictures; None: prompts are text only.
    """

    def __init__(  # noqa: PLR0913 (the settings of the engine)
        self,
        model: PreTrainedModel,
        *,
        seed: int,
        max_running: int,
        max_batch_tokens: int,
        max_cached_tokens: int,
        burst: int,
        threads: int | None = None,
        block_size: int = BLOCK_SIZE,
        compile_layers: bool | None = None,
        kernels: Kernels | None = None,
        adapters: LowRank | None = None,
        pictures: PictureFormat | None = None,
    ) -> None:
        num_blocks = max_cached_tokens // block_size
        self.pictures, self._device = pictures, model.device
        on_gpu = model.device.type == "cuda"
        if on_gpu and kernels is None:
            kernels = load_triton_kernels()
        self._scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            burst=1 if kernels is None else burst,
            share_decoding=kernels is None,
        )
        super().__init__(self._scheduler, model, seed=seed, threads=threads if kernels is None else None)
        self._runner: ModelRunner
        if kernels is None:
            self._runner = CpuRunner(model, num_blocks=num_blocks, block_size=block_size, pictures=pictures)
        else:
            with self._on_device():
                self._runner = GpuRunner(
                    model,
                    kernels,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    max_running=max_running,
                    max_batch_tokens=max_batch_tokens,
                    max_length=min(self._max_positions, self._scheduler.capacity),
                    burst=burst,
                    graphs=on_gpu,
                    pictures=pictures,
                )
        self._max_stop_ids = self._runner.max_stop_ids
        compiled = on_gpu if compile_layers is None else compile_layers
        self._verify(fuse=kernels is not None, compiled=compiled, adapters=adapters)
        self._on_worker(self._runner.prepare)
        self.startup_seconds = time.perf_counter() - self._started

    def _on_device(self) -> AbstractContextManager[None]:
        """Make the engine's GPU the current one, on which kernels run: it may be the learner's."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _verify(self, *, fuse: bool, compiled: bool, adapters: LowRank | None) -> None:
        """Fuse and compile the layers, and check that the logits equal the original model's."""
        expected = self._on_worker(self._runner.plain_logits)
        # Probes show no pictures, so they could not verify a tower with fused layers.
        fused = fuse_linears(self._runner.decoder) if fuse else []
        if adapters is not None:
            adapters.add_to(self._runner.model)
        if compiled:
            compile_each(repeated_layers(self._runner.decoder))
            if self._runner.eyes is not None:
                self._runner.eyes.compile(self._runner.model.dtype)
        try:
            self._on_worker(lambda: self._runner.verify(expected))
        except ConfigError as error:
            if not fused:
                raise
            restore_linears(fused)
            if adapters is not None:  # fused layers took theirs with them
                adapters.add_to(self._runner.model)
            self._on_worker(lambda: self._runner.verify(expected))
            logger.warning("the linear layers of this model cannot be fused: %s", error)

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    @property
    def free_blocks(self) -> int:
        """Cache blocks that hold nothing, not even an idle session."""
        return self._scheduler.free_blocks

    def _copy_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        self._runner.load_weights(source)

    def _free(self) -> None:
        self._runner.close()

    async def _drive(self) -> None:
        in_flight: InFlight | None = None
        while True:
            self._deliver(ANSWERS_AT_ONCE if self._runner.overlaps else None)
            for _ in range(SETTLE_TURNS if in_flight is None else 1):
                await asyncio.sleep(0)
            chunks = self._scheduler.plan()
            if not chunks and in_flight is None:
                if self._answers:
                    continue
                return
            launched = (chunks, await self._launch(chunks)) if chunks else None
            if launched is not None and not self._runner.overlaps:
                in_flight, launched = launched, None
            if in_flight is not None:
                self._record(in_flight[0], await self._read(in_flight[1]))
            in_flight = launched

    async def _launch(self, chunks: list[Chunk]) -> ReadDraws:
        if self._runner.overlaps:
            # On this thread: launching is short, and another thread would compete for the interpreter.
            with self._on_device():
                return self._runner.launch(chunks)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._runner.launch, chunks)

    async def _read(self, read: ReadDraws) -> Sequence[Draw]:
        while (drawn := read()) is None:
            await asyncio.sleep(0 if self._deliver(ANSWERS_PER_CHECK) else POLL_SECONDS)
        return drawn

    def _record(self, chunks: Sequence[Chunk], drawn: Sequence[Draw]) -> None:
        """Take over the results of a step, and fail requests whose logits were not finite."""
        finished = self._scheduler.apply(chunks, drawn)
        all_finite = math.isfinite(sum(sum(logprobs) for _, logprobs, _ in drawn))
        sampled = [] if all_finite else [request for chunk in chunks for request in chunk.draws]
        broken = [
            request
            for request, (_, logprobs, _) in zip(sampled, drawn, strict=False)
            if not all(map(math.isfinite, logprobs)) and request in self._futures
        ]
        for request in broken:
            self._fail_broken(request)
        if broken:  # the cache may hold the cause, or a consequence
            self._scheduler.forget()
            self._on_worker(self._runner.clear_cache)
        self._report()
        for request in finished:
            self._answer(request)
