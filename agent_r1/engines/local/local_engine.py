"""The default engine: any Hugging Face causal LM in this process, with continuous batching.

`generate` queues a request; while there are requests, one task on the event loop plans a step, has it computed, and
hands out what is complete. Requests join and leave between steps, a session's cache is kept for its next request, and
what requests have in common is computed once. What runs when is `scheduler.py`'s business, how it is computed
that of `cpu/` and `gpu/`; this module knows futures and versions.

On a CPU a step is computed on the engine's own thread, so tools go on meanwhile. Results do not depend on the clock as
long as tools do not wait: before each step the loop turns a fixed number of times, so that an episode that has just
been answered can ask again. On a GPU the next step is launched before the last one is read, and what the host does
with a step's results, tools included, it does while the GPU computes the next.
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
from agent_r1.engines.local.cpu.cpu_runner import CpuRunner
from agent_r1.engines.local.gpu.fused_linear import fuse_linears, restore_linears
from agent_r1.engines.local.gpu.gpu_attention import Kernels
from agent_r1.engines.local.gpu.gpu_runner import GpuLimits, GpuRunner, load_triton_kernels
from agent_r1.engines.local.model_runner import Drawn, ModelRunner
from agent_r1.engines.local.request import Chunk, EngineStats, Request
from agent_r1.engines.local.sampling import Kept, as_support, uniform_stream
from agent_r1.engines.local.scheduler import Scheduler
from agent_r1.errors import ConfigError, DataError, RolloutError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Turns of the event loop before a step that nothing else runs beside. An answered episode needs one to wake up and a
# few for each task or timeout its tool call is wrapped in; a turn costs some microseconds.
SETTLE_TURNS = 32
BLOCK_SIZE = 32  # tokens of a sequence that are cached, and given up, together
POLL_SECONDS = 0.0005  # between looks whether the GPU is done; the next step is under way then, so nothing waits
# Answers handed out before the next step is planned, on a GPU. Each wakes an episode, whose parsing, tools and
# rendering the loop finishes before it comes back here: some half a millisecond, where a burst takes some twenty.
# Episodes that are all answered at once leave the GPU idle, and then ask all at once again: for ever in step.
ANSWERS_AT_ONCE = 32

UnderWay = tuple[list[Chunk], Callable[[], Drawn | None]]


class LocalEngine:
    """Owns its model: attention is replaced in place, so pass a copy of the learner's, not the same object.

    max_running: requests computed at the same time.
    max_batch_tokens: prompt tokens run in one step; longer prompts take several, so they do not stall the others.
    max_cached_tokens: keys and values kept in all, of running requests and idle sessions, in whole blocks.
    burst: tokens that a GPU samples for each request before the host looks at them.
    threads: torch threads of the engine's own thread, on a CPU; None leaves torch's setting.
    compile_layers: torch.compile the decoder layers; None: on a GPU.
    kernels: run as on a GPU, with these kernels; None: Triton's on a GPU.
    """

    def __init__(  # noqa: PLR0913 (one place where the engine's knobs stand)
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
        _check_at_least_one(
            max_running=max_running, max_batch_tokens=max_batch_tokens, block_size=block_size, burst=burst
        )
        num_blocks = max_cached_tokens // block_size
        if num_blocks < 1:
            raise ConfigError(f"max_cached_tokens={max_cached_tokens} is less than one block of {block_size} tokens")
        on_gpu = model.device.type == "cuda"
        if on_gpu and kernels is None:
            kernels = load_triton_kernels()
        self._scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            burst=1 if kernels is None else burst,
            share_blocks=kernels is not None,
            share_decoding=kernels is None,
        )
        positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._positions = positions
        limits = GpuLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            max_length=min(positions or self._scheduler.capacity, self._scheduler.capacity),
            burst=burst,
        )
        self._runner: ModelRunner = (
            CpuRunner(model, num_blocks=num_blocks, block_size=block_size)
            if kernels is None
            else GpuRunner(model, kernels, limits, graphs=on_gpu)
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent_r1-engine")
        if threads is not None and kernels is None:
            self._on_worker(lambda: torch.set_num_threads(threads))
        self._vocab: int = self._runner.model.get_input_embeddings().num_embeddings
        self._seeds = np.random.default_rng(seed)
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._answers: deque[tuple[Request, Completion]] = deque()  # complete, to be handed out
        self._driver: asyncio.Task[None] | None = None
        self._version: int | None = 0  # None: loading weights has failed
        self._loading: asyncio.Future[None] | None = None  # done when `load_weights` is
        self._closed = False
        started = time.perf_counter()
        self._verify(fuse=kernels is not None, compiled=on_gpu if compile_layers is None else compile_layers)
        self._on_worker(self._runner.prepare)
        self._startup_seconds = time.perf_counter() - started

    def _verify(self, *, fuse: bool, compiled: bool) -> None:
        """What will run is compared with what the model itself says: its layers fused and compiled."""
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
            logger.warning("this model calls its linear layers in a way of its own, so they are not fused: %s", error)

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    @property
    def free_blocks(self) -> int:
        """Blocks of the cache that hold nothing, not even for an idle session."""
        return self._scheduler.free_blocks

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._futures)

    @property
    def startup_seconds(self) -> float:
        """What compiling and capturing took."""
        return self._startup_seconds

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Its log-probs are those of the distribution drawn from; see `sampling.sample`."""
        self._check(prompt, sampling)
        if self._driver is not None and self._driver.get_loop() is not asyncio.get_running_loop():
            raise RolloutError("this LocalEngine serves another event loop now: wait for it, or make one for each")
        while self._loading is not None:
            await asyncio.wait([self._loading])
            self._check_open()
        # Drawn here, so that the stream follows the order of submission.
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
        """Wait for running requests, then copy the weights in and drop what was cached under the old ones.

        New requests are held back until then, so no response mixes weights. To load at once, `abort` first.
        """
        while self._loading is not None:
            await asyncio.wait([self._loading])
        self._check_open(weights=False)
        loading = self._loading = asyncio.get_running_loop().create_future()
        try:
            while self._futures:
                await asyncio.wait(list(self._futures.values()))
            self._check_open(weights=False)  # it may have been closed meanwhile
            self._version = None
            # Blocks the event loop, so that nothing can cancel it half-way. On the worker, so that a step whose
            # requests have all been cancelled is over before the weights change.
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
            self._end()  # a driver that is cancelled before its first turn has not
        await asyncio.to_thread(self._worker.shutdown)
        self._runner.close()

    async def _drive(self) -> None:
        """Run steps until there are no requests. Ends with the event loop; the next `generate` starts another."""
        error: RolloutError | None = None
        under_way: UnderWay | None = None
        try:
            while True:
                self._answer(ANSWERS_AT_ONCE if self._runner.overlaps else None)
                for _ in range(SETTLE_TURNS if under_way is None else 1):
                    await asyncio.sleep(0)
                chunks = self._scheduler.plan()
                if not chunks and under_way is None:
                    if self._answers:
                        continue
                    return
                launched = (chunks, await self._launch(chunks)) if chunks else None
                if launched is not None and not self._runner.overlaps:
                    under_way, launched = launched, None
                if under_way is not None:
                    self._take(under_way[0], *await self._drawn(under_way))
                under_way = launched
        except Exception as failure:
            logger.exception("a step of the local engine failed")
            error = RolloutError(f"the engine's step failed: {failure!r}")
            error.__cause__ = failure
        finally:
            self._end(error)

    def _end(self, error: RolloutError | None = None) -> None:
        """Nothing drives any more: what is complete is handed out, what is not fails."""
        self._driver = None
        self._answer()
        closed = "the engine was closed, or its event loop ended, with requests running"
        for request in list(self._futures):
            self._fail(request, error or RolloutError(closed))

    async def _launch(self, chunks: list[Chunk]) -> Callable[[], Drawn | None]:
        if self._runner.overlaps:
            # Here: it takes no longer than the next step is away, and another thread would fight for the interpreter.
            return self._runner.launch(chunks)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._runner.launch, chunks)

    async def _drawn(self, under_way: UnderWay) -> Drawn:
        while (drawn := under_way[1]()) is None:
            await asyncio.sleep(0 if self._answer(1) else POLL_SECONDS)
        return drawn

    def _take(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        kept: Sequence[Kept | None] | None,
    ) -> None:
        """What a step has drawn. Responses that are complete now wait to be handed out."""
        finished = self._scheduler.apply(chunks, tokens, logprobs, kept)
        if not all(math.isfinite(value) for values in logprobs for value in values):
            sampled = [request for chunk in chunks for request in chunk.draws]
            broken = [not all(map(math.isfinite, values)) for values in logprobs]
            self._drop_broken([request for request, bad in zip(sampled, broken, strict=True) if bad])
        for request in finished:
            if request in self._futures:
                stopped = request.tokens[-1] in request.sampling.stop_ids
                self._answers.append((request, self._completion(request, "stop" if stopped else "length")))

    def _answer(self, most: int | None = None) -> int:
        """Hand out what is complete; returns how many were."""
        count = len(self._answers) if most is None else min(most, len(self._answers))
        for _ in range(count):
            request, completion = self._answers.popleft()
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result(completion)
        return count

    def _drop_broken(self, requests: Sequence[Request]) -> None:
        """Non-finite logits fail their requests, and the cache is emptied: it may hold what caused or followed them."""
        requests = [request for request in requests if request in self._futures]
        if not requests:
            return
        for request in requests:
            message = f"the model (version {self._version}) gave logits that are not finite; are its weights?"
            self._fail(request, RolloutError(message))
        self._scheduler.forget()
        self._on_worker(self._runner.clear_cache)

    def _completion(self, request: Request, stop: Literal["stop", "length", "abort"]) -> Completion:
        response = request.tokens[request.prompt_length :]
        assert self._version is not None  # it does not change while a request runs
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
            raise RolloutError("this LocalEngine has been closed; make a new one")
        if weights and self._version is None:
            raise RolloutError("this LocalEngine has no complete weights, because load_weights failed: call it again")

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Refuse what could never be answered, before it can disturb the others."""
        self._check_open()
        prompt_ids = prompt.ids
        if prompt.media:
            raise DataError(f"the prompt has {len(prompt.media)} images or other media; LocalEngine takes text only")
        if not prompt_ids:
            raise DataError("the prompt is empty; a model needs at least one token to continue from")
        if set(map(type, prompt_ids)) != {int}:
            bad_type = next(type(token).__name__ for token in prompt_ids if type(token) is not int)
            raise DataError(f"the prompt holds a {bad_type} among its token ids; ids are plain ints")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab:
            bad = next(token for token in prompt_ids if not 0 <= token < self._vocab)
            raise DataError(f"the prompt holds token id {bad}, the model's vocabulary has {self._vocab} ids")
        most = self._runner.max_stop_ids
        if most is not None and len(sampling.stop_ids) > most:
            raise DataError(f"a request has {len(sampling.stop_ids)} stop ids; on a GPU the engine allows {most}")
        length = len(prompt_ids) + sampling.max_tokens
        for limit, name in ((self._scheduler.capacity, "max_cached_tokens"), (self._positions, "the model's context")):
            if limit is not None and length > limit:
                raise DataError(
                    f"a prompt of {len(prompt_ids)} tokens and a response of up to {sampling.max_tokens} do not fit "
                    f"into {name} ({limit}). Shorten the prompt or lower max_tokens."
                )


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"LocalEngine needs {name} >= 1, got {value}")
