"""The default engine: any Hugging Face causal LM in this process, with continuous batching.

`generate` queues a request. While there are requests, one task on the event loop plans a step, has it computed, and
answers the requests that are complete. Requests join and leave between steps, a session's cache is kept for its next
request, and what requests have in common is computed once. `scheduler.py` decides what runs, `cpu/` and `gpu/` compute
it; this module handles futures and versions.

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.compiling import compile_each, repeated_layers
from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.blocks import BLOCK_SIZE
from agent_r1.engines.local.cpu.cpu_runner import CpuRunner
from agent_r1.engines.local.gpu.fused_linear import fuse_linears, restore_linears
from agent_r1.engines.local.gpu.gpu_attention import Kernels
from agent_r1.engines.local.gpu.gpu_runner import GpuLimits, GpuRunner, load_triton_kernels
from agent_r1.engines.local.model_runner import ModelRunner
from agent_r1.engines.local.request import Chunk, Draw, EngineStats, ReadDraws, Request
from agent_r1.engines.local.sampling import as_support, uniform_stream
from agent_r1.engines.local.scheduler import Scheduler
from agent_r1.errors import ConfigError, DataError, RolloutError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Turns of the event loop before a step while nothing is in flight. An answered episode needs one to wake up and a few
# for each task or timeout around its tool call; a turn costs some microseconds.
SETTLE_TURNS = 32
POLL_SECONDS = 0.0005  # between checks whether the GPU is done; the next step is already launched, so nothing waits
# Requests answered before the next step is planned, on a GPU. Each answer wakes an episode, whose parsing, tools and
# rendering take about half a millisecond, while a burst takes about twenty. Answering all at once would leave the GPU
# idle, and episodes would then stay in lockstep.
ANSWERS_AT_ONCE = 32

InFlight = tuple[list[Chunk], ReadDraws]


class LocalEngine:
    """Takes over its model: attention is replaced in place, so pass a copy of the learner's model.

    max_running: requests computed at the same time.
    max_batch_tokens: prompt tokens run in one step; longer prompts take several, so they do not stall the others.
    max_cached_tokens: size of the cache, for running requests and idle sessions, in whole blocks.
    burst: tokens that a GPU samples for each request before the host looks at them.
    threads: torch threads of the worker thread on a CPU; None leaves torch's setting.
    compile_layers: whether to torch.compile the decoder layers; None compiles on a GPU.
    kernels: run as on a GPU, with these kernels; None uses Triton's on a GPU.
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
    ) -> None:
        num_blocks = max_cached_tokens // block_size
        sizes = {
            "num_blocks": num_blocks,
            "max_running": max_running,
            "max_batch_tokens": max_batch_tokens,
            "burst": burst,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"LocalEngine needs {name} >= 1, got {value}")
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
        capacity = self._scheduler.capacity
        self._max_positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or capacity
        self._runner: ModelRunner
        if kernels is None:
            self._runner = CpuRunner(model, num_blocks=num_blocks, block_size=block_size)
        else:
            limits = GpuLimits(**sizes, block_size=block_size, max_length=min(self._max_positions, capacity))
            self._runner = GpuRunner(model, kernels, limits, graphs=on_gpu)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent_r1-engine")
        if threads is not None and kernels is None:
            self._on_worker(lambda: torch.set_num_threads(threads))
        self._vocab: int = self._runner.model.get_input_embeddings().num_embeddings
        self._seeds = np.random.default_rng(seed)
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._answers: deque[tuple[Request, Completion]] = deque()  # completed, not yet delivered
        self._driver: asyncio.Task[None] | None = None
        self._version: int | None = 0  # None: `load_weights` has failed
        self._loading: asyncio.Future[None] | None = None  # done when `load_weights` is
        self._closed = False
        started = time.perf_counter()
        self._verify(fuse=kernels is not None, compiled=on_gpu if compile_layers is None else compile_layers)
        self._on_worker(self._runner.prepare)
        self.startup_seconds = time.perf_counter() - started

    def _verify(self, *, fuse: bool, compiled: bool) -> None:
        """Fuse and compile the layers, and check that the logits are those of the original model."""
        expected = self._on_worker(self._runner.plain_logits)
        fused = fuse_linears(self._runner.model) if fuse else []
        if compiled:
            compile_each(repeated_layers(self._runner.model))
        try:
            self._on_worker(lambda: self._runner.verify(expected))
        except ConfigError as error:
            if not fused:
                raise
            restore_linears(fused)
            self._on_worker(lambda: self._runner.verify(expected))
            logger.warning("the linear layers of this model cannot be fused: %s", error)

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    @property
    def free_blocks(self) -> int:
        """Cache blocks that hold nothing, not even an idle session."""
        return self._scheduler.free_blocks

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._futures)

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Log-probs are those of the distribution it was drawn from; see `sampling.sample`."""
        self._check(prompt, sampling)
        if self._driver is not None and self._driver.get_loop() is not asyncio.get_running_loop():
            raise RolloutError("this LocalEngine is running in another event loop; use one engine per loop")
        while self._loading is not None:
            await asyncio.wait([self._loading])
            self._check_open()
        # Drawn after waiting, so that seeds follow the order of submission.
        seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        request = Request(
            session=session,
            tokens=list(prompt.ids),
            sampling=sampling,
            uniforms=uniform_stream(seed, sampling.max_tokens),
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        self._scheduler.submit(request)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        except asyncio.CancelledError:
            self._futures.pop(request, None)
            self._scheduler.cancel(request)
            raise

    def release(self, session: str) -> None:
        self._scheduler.release(session)

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Wait for running requests, then copy the weights and drop the cache.

        New requests wait until then, so no response mixes weights. To load at once, call `abort` first.
        """
        while self._loading is not None:
            await asyncio.wait([self._loading])
        self._check_open(weights=False)
        loading = self._loading = asyncio.get_running_loop().create_future()
        try:
            while self._futures:
                await asyncio.wait(list(self._futures.values()))
            self._check_open(weights=False)  # it may have been closed in the meantime
            self._version = None
            # Blocks the event loop, so that it cannot be cancelled half-way. Runs on the worker, after any step whose
            # requests have all been cancelled.
            self._on_worker(lambda: self._runner.load_weights(source))
            self._scheduler.forget()
            self._version = version
        finally:
            self._loading = None
            loading.set_result(None)

    def abort(self, session: str | None = None) -> None:
        for request, future in list(self._futures.items()):
            if request.live and session in (None, request.session) and not future.done():
                self._scheduler.cancel(request)
                del self._futures[request]
                future.set_result(self._completion(request, "abort"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        driver = self._driver
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
            self._end()  # a driver that is cancelled before its first turn does not
        await asyncio.to_thread(self._worker.shutdown)
        self._runner.close()

    async def _drive(self) -> None:
        """Run steps while there are requests. The next `generate` starts another driver."""
        error: RolloutError | None = None
        in_flight: InFlight | None = None
        try:
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
        except Exception as failure:
            logger.exception("a step of the local engine failed")
            error = RolloutError(f"the engine's step failed: {failure!r}")
            error.__cause__ = failure
        finally:
            self._end(error)

    def _end(self, error: RolloutError | None = None) -> None:
        """Deliver what is complete and fail all other requests."""
        self._driver = None
        self._deliver()
        closed = "the engine was closed, or its event loop ended, with requests running"
        for request in list(self._futures):
            self._fail(request, error or RolloutError(closed))

    async def _launch(self, chunks: list[Chunk]) -> ReadDraws:
        if self._runner.overlaps:
            # On this thread: launching is short, and another thread would compete for the interpreter.
            return self._runner.launch(chunks)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._runner.launch, chunks)

    async def _read(self, read: ReadDraws) -> Sequence[Draw]:
        while (drawn := read()) is None:
            await asyncio.sleep(0 if self._deliver(1) else POLL_SECONDS)
        return drawn

    def _record(self, chunks: Sequence[Chunk], drawn: Sequence[Draw]) -> None:
        """Take over the results of a step, and fail requests whose logits were not finite."""
        finished = self._scheduler.apply(chunks, drawn)
        sampled = [request for chunk in chunks for request in chunk.draws]
        broken = [
            request
            for request, (_, logprobs, _) in zip(sampled, drawn, strict=True)
            if not all(map(math.isfinite, logprobs)) and request in self._futures
        ]
        for request in broken:
            self._fail(request, RolloutError(f"the logits of the model (version {self._version}) are not finite"))
        if broken:  # the cache may hold what caused it, or what followed
            self._scheduler.forget()
            self._on_worker(self._runner.clear_cache)
        for request in finished:
            if request in self._futures:
                stopped = request.tokens[-1] in request.sampling.stop_ids
                self._answers.append((request, self._completion(request, "stop" if stopped else "length")))

    def _deliver(self, most: int | None = None) -> int:
        """Answer completed requests; returns how many."""
        count = len(self._answers) if most is None else min(most, len(self._answers))
        for _ in range(count):
            request, completion = self._answers.popleft()
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(completion)
        return count

    def _completion(self, request: Request, stop: Literal["stop", "length", "abort"]) -> Completion:
        response = request.tokens[request.prompt_length :]
        assert self._version is not None  # weights do not change while a request runs
        return Completion(
            token_ids=response,
            logprobs=request.logprobs,
            stop=stop,
            versions=((self._version, len(response)),) if response else (),
            support=as_support(request.kept) if request.sampling.keep_support else None,
        )

    def _fail(self, request: Request, error: BaseException) -> None:
        future = self._futures.pop(request)
        self._scheduler.cancel(request)
        if not future.done():
            future.set_exception(error)

    def _on_worker(self, work: Callable[[], Result]) -> Result:
        return self._worker.submit(work).result()

    def _check_open(self, *, weights: bool = True) -> None:
        if self._closed:
            raise RolloutError("this LocalEngine has been closed")
        if weights and self._version is None:
            raise RolloutError("this LocalEngine has incomplete weights because load_weights failed: call it again")

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Refuse a request that could never be answered, before it affects others."""
        self._check_open()
        ids, most = prompt.ids, self._runner.max_stop_ids
        if prompt.media:
            raise DataError(f"the prompt has {len(prompt.media)} images or other media; LocalEngine takes only text")
        if not ids:
            raise DataError("the prompt is empty; a model needs at least one token to continue")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= self._vocab:
            bad = next(token for token in ids if type(token) is not int or not 0 <= token < self._vocab)
            raise DataError(f"the prompt contains {bad!r}; token ids are integers from 0 to {self._vocab - 1}")
        if most is not None and len(sampling.stop_ids) > most:
            raise DataError(f"a request has {len(sampling.stop_ids)} stop ids; on a GPU the engine allows {most}")
        limits = {"max_cached_tokens": self._scheduler.capacity, "the model's context": self._max_positions}
        for name, limit in limits.items():
            if len(ids) + sampling.max_tokens > limit:
                raise DataError(
                    f"a prompt of {len(ids)} tokens and a response of up to {sampling.max_tokens} do not fit into "
                    f"{name} ({limit}). Shorten the prompt or lower max_tokens."
                )
