"""What engines in this process have in common: requests and their futures, policy versions, weights, checks.

`generate` queues a request and waits for its future. While there are requests, one task on the event loop, the driver,
has them computed. How they are scheduled and computed is up to the subclass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.compute.attention import position_limit
from agent_r1.engines.base import Completion, OnTokens, Prompt, Sampling, check_fits
from agent_r1.engines.local.request import Request, RequestQueue
from agent_r1.engines.local.sampling import as_support, uniform_stream
from agent_r1.errors import DataError, RolloutError
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import by_key

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RequestEngine(ABC):
    """An `Engine` without the computation. Subclasses set `startup_seconds` once they are ready."""

    startup_seconds: float
    pictures: PictureFormat | None = None  # how the model takes them; None: it takes text only
    _max_stop_ids: int | None = None  # limit on the stop ids of a request

    def __init__(self, queue: RequestQueue, model: PreTrainedModel, *, seed: int, threads: int | None) -> None:
        self._queue = queue
        self._vocab = model.get_input_embeddings().num_embeddings
        self._max_positions = position_limit(model.config) or queue.capacity
        self._seeds = np.random.default_rng(seed)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent_r1-engine")
        if threads is not None:
            self._on_worker(lambda: torch.set_num_threads(threads))
        if model.device.type == "cuda":
            self._on_worker(lambda: torch.cuda.set_device(model.device))  # torch remembers it per thread
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._listeners: dict[Request, tuple[OnTokens, int]] = {}  # and how many tokens they have got
        self._answers: deque[tuple[Request, Completion]] = deque()  # completed, not yet delivered
        self._driver: asyncio.Task[None] | None = None
        self._version: int | None = 0  # None: `load_weights` has failed
        self._loading: asyncio.Future[None] | None = None  # resolved when `load_weights` ends
        self._closed = False
        self._started = time.perf_counter()

    @abstractmethod
    async def _drive(self) -> None:
        """Compute requests until there are none. The next `generate` starts another driver."""

    @abstractmethod
    def _copy_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, on the worker thread."""

    def _free(self) -> None:  # noqa: B027 (nothing to do by default)
        """Free device memory when the engine is closed."""

    async def _settle(self) -> None:  # noqa: B027 (nothing to do by default)
        """Wait until the worker does not need the event loop."""

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered yet."""
        return len(self._futures)

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Log-probs are those of the distribution it was drawn from; see `sampling.sample`."""
        return await self._request(prompt, sampling, session, None)

    async def stream(self, prompt: Prompt, sampling: Sampling, *, session: str, on_tokens: OnTokens) -> Completion:
        """Like `generate`; `on_tokens` gets the new tokens after every step. If it raises, only this request fails."""
        return await self._request(prompt, sampling, session, on_tokens)

    async def _request(
        self, prompt: Prompt, sampling: Sampling, session: str, on_tokens: OnTokens | None
    ) -> Completion:
        known = self._queue.known_tokens(session)
        extended = self._check(prompt, sampling, known)
        if self._driver is not None and self._driver.get_loop() is not asyncio.get_running_loop():
            raise RolloutError(f"this {type(self).__name__} is running in another event loop; use one engine per loop")
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
            pictures=by_key(prompt.media),
            compared=(known, len(known)) if extended else ([], 0),
        )
        if self.pictures is not None:
            request.positions_AL = self.pictures.positions(np.array(prompt.ids, np.int64), request.pictures)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        if on_tokens is not None:
            self._listeners[request] = on_tokens, 0
        self._queue.submit(request)
        if self._driver is None:
            self._driver = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self._futures.pop(request, None)
            self._queue.cancel(request)
            raise
        finally:
            self._listeners.pop(request, None)

    async def _run(self) -> None:
        error: RolloutError | None = None
        try:
            await self._drive()
        except Exception as failure:
            logger.exception("a step of the engine failed")
            error = RolloutError(f"the engine's step failed: {failure!r}")
            error.__cause__ = failure
        finally:
            self._end(error)

    def _report(self) -> None:
        """Tell listeners what was sampled. Called after each step, before its requests are answered."""
        for request, (on_tokens, heard) in list(self._listeners.items()):
            if request not in self._futures or len(request.logprobs) == heard:
                continue
            self._listeners[request] = on_tokens, len(request.logprobs)
            try:
                on_tokens(request.tokens[request.prompt_length + heard :], request.logprobs[heard:])
            except Exception as error:  # noqa: BLE001 (must not end the other requests)
                self._fail(request, error)

    def release(self, session: str) -> None:
        self._queue.release(session)

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
            await self._settle()
            self._check_open(weights=False)  # it may have been closed in the meantime
            self._version = None
            # Blocks the event loop, so that it cannot be cancelled half-way. Runs on the worker, after any step whose
            # requests have all been cancelled.
            self._on_worker(lambda: self._copy_weights(source))
            self._queue.forget()
            self._version = version
        finally:
            self._loading = None
            loading.set_result(None)

    def abort(self, session: str | None = None) -> None:
        for request, future in list(self._futures.items()):
            if request.live and session in (None, request.session) and not future.done():
                self._queue.cancel(request)
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
        self._free()

    def _end(self, error: RolloutError | None = None) -> None:
        """Deliver what is complete and fail all other requests."""
        self._driver = None
        self._deliver()
        closed = "the engine was closed, or its event loop ended, with requests running"
        for request in list(self._futures):
            self._fail(request, error or RolloutError(closed))

    def _answer(self, request: Request) -> None:
        """Queue the completion of a request that has ended."""
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
        self._queue.cancel(request)
        if not future.done():
            future.set_exception(error)

    def _fail_broken(self, request: Request) -> None:
        self._fail(request, RolloutError(f"the logits of the model (version {self._version}) are not finite"))

    def _on_worker(self, work: Callable[[], Result]) -> Result:
        return self._worker.submit(work).result()

    def _check_open(self, *, weights: bool = True) -> None:
        name = type(self).__name__
        if self._closed:
            raise RolloutError(f"this {name} has been closed")
        if weights and self._version is None:
            raise RolloutError(f"this {name} has incomplete weights because load_weights failed: call it again")

    def _check(self, prompt: Prompt, sampling: Sampling, known: list[int]) -> bool:
        """Refuse a request that could never be answered, before it affects others. Returns whether it extends the
        `known` tokens: then only the tokens after these are checked."""
        self._check_open()
        ids, most = prompt.ids, self._max_stop_ids
        if prompt.media and self.pictures is None:
            name = type(self).__name__
            raise DataError(f"the prompt has {len(prompt.media)} images or other media; {name} takes only text")
        if not ids:
            raise DataError("the prompt is empty; a model needs at least one token to continue")
        extends = bool(known) and ids[: len(known)] == known
        new = ids[len(known) :] if extends else ids
        if prompt.media:  # their ids are checked together with their positions
            new = [token for token in new if type(token) is not int or token >= 0]
        if new and (set(map(type, new)) != {int} or min(new) < 0 or max(new) >= self._vocab):
            bad = next(token for token in new if type(token) is not int or not 0 <= token < self._vocab)
            raise DataError(f"the prompt contains {bad!r}; token ids are integers from 0 to {self._vocab - 1}")
        if most is not None and len(sampling.stop_ids) > most:
            raise DataError(f"a request has {len(sampling.stop_ids)} stop ids; on a GPU the engine allows {most}")
        limits = {"max_cached_tokens": self._queue.capacity, "the model's context": self._max_positions}
        check_fits(prompt, sampling, limits)
        return extends
