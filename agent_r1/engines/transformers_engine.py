"""A slower engine for models that the local engine cannot compute: transformers' own `generate`, sampling by us.

`generate` brings the cache that a model needs, whatever it holds. Requests are computed in batches, padded on the left
if the model's logits stay the same, and of equal length otherwise. A batch runs until all its requests have ended, or
until as many requests wait as still run: then those continue from their tokens in the next batch, beside the waiting
ones. Nothing is kept between the requests of a session.

Everything that requests know changes on the event loop; the worker thread only computes. So batches, and with them
results, do not depend on timing as long as tools do not wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from agent_r1.compute.attention import short_windows
from agent_r1.engines.local.model_runner import NUM_PROBES, describe_difference, fix_rope
from agent_r1.engines.local.request import Request, RequestQueue
from agent_r1.engines.local.request_engine import RequestEngine
from agent_r1.engines.local.sampling import Kept, sample
from agent_r1.engines.local.weights import copy_weights
from agent_r1.errors import UnsupportedModelError

SETTLE_TURNS = 32  # turns of the event loop after an answer, in which the episode can send its next request
LOOP_CHECK_SECONDS = 1.0  # between checks whether the event loop still exists
# Ways to compute, fastest first: transformers' attention, and whether sequences are padded to one length.
WAYS = (("sdpa", True), ("eager", True), ("sdpa", False), ("eager", False))
FORCED = 3  # tokens that each probe is continued by

Draws = list[tuple[Request, int, float, Kept | None]]
Choose = Callable[[Tensor], list[int] | None]  # logits, [B, V] -> the next tokens, or None to stop


class Batcher(RequestQueue):
    """Forms batches. Nothing is cached."""

    def __init__(self, *, max_running: int, max_cached_tokens: int) -> None:
        self.capacity = max_cached_tokens
        self.pads = True  # whether a batch may hold requests of different lengths
        self.waiting: deque[Request] = deque()
        self._max_running = max_running

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        request.live = False
        if request in self.waiting:
            self.waiting.remove(request)

    def take(self) -> list[Request]:
        """Remove and return the next batch: the oldest request, and those that fit beside it."""
        batch: list[Request] = []
        longest = 0
        for request in self.waiting:
            size = max(longest, len(request.tokens) + request.left)
            fits = len(batch) < self._max_running and size * (len(batch) + 1) <= self.capacity
            if fits and (self.pads or not batch or len(request.tokens) == len(batch[0].tokens)):
                batch.append(request)
                longest = size
        self.waiting = deque(request for request in self.waiting if request not in batch)
        return batch


class TransformersEngine(RequestEngine):
    """Takes over its model, so pass a copy of the learner's.

    max_running: requests computed at the same time.
    max_cached_tokens: bound on the requests of a batch times the longest of them, response included.
    threads: torch threads of the worker thread; None leaves torch's setting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        seed: int,
        max_running: int,
        max_cached_tokens: int,
        threads: int | None = None,
    ) -> None:
        self._batcher = Batcher(max_running=max_running, max_cached_tokens=max_cached_tokens)
        super().__init__(self._batcher, model, seed=seed, threads=threads)
        self._model: Any = model.eval().requires_grad_(False)
        self._model.generation_config = GenerationConfig()  # the model's own would add penalties and stop tokens
        self._playing: asyncio.Future[None] | None = None  # the batch on the worker
        self._on_worker(self._choose_way)
        self.startup_seconds = time.perf_counter() - self._started

    def _copy_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self._model, source)

    async def _settle(self) -> None:
        while self._playing is not None:  # its requests have ended, but the worker may still wait for this loop
            await asyncio.wait([self._playing])

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await _settle_turns()
            batch = self._batcher.take()
            if not batch:
                return
            self._playing = loop.run_in_executor(self._worker, self._play, batch, loop)
            try:
                await self._playing
            finally:
                self._playing = None
            self._batcher.waiting.extendleft(request for request in reversed(batch) if request.live)

    def _play(self, batch: list[Request], loop: asyncio.AbstractEventLoop) -> None:
        """Sample for all requests of a batch, on the worker."""

        def choose(scores_BV: Tensor) -> list[int] | None:
            rows = [row for row, request in enumerate(batch) if request.live]
            if not rows:
                return None
            running = [batch[row] for row in rows]
            uniforms = [request.uniforms[len(request.logprobs)] for request in running]
            scores_RV = scores_BV[torch.tensor(rows, device=scores_BV.device)]
            drawn = sample(scores_RV, [request.sampling for request in running], uniforms)
            chosen = dict(zip(rows, drawn[0], strict=True))
            goes_on = self._wait_for(loop, list(zip(running, *drawn, strict=True)))
            return [chosen.get(row, 0) for row in range(len(batch))] if goes_on else None

        with torch.inference_mode():
            self._generate([request.tokens for request in batch], max(request.left for request in batch), choose)

    def _wait_for(self, loop: asyncio.AbstractEventLoop, draws: Draws) -> bool:
        """Have the event loop record the draws; returns whether to go on with the batch."""
        if loop.is_closed():
            return False
        recorded = asyncio.run_coroutine_threadsafe(self._record(draws), loop)
        while True:
            try:
                return recorded.result(LOOP_CHECK_SECONDS)
            except TimeoutError:
                if loop.is_closed():
                    return False
            except CancelledError:
                return False

    async def _record(self, draws: Draws) -> bool:
        for request, token, logprob, kept in draws:
            if not request.live:
                continue
            if not math.isfinite(logprob):
                self._fail_broken(request)
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.kept += [kept] if kept is not None else []
            if token in request.sampling.stop_ids or not request.left:
                request.live = False
                self._answer(request)
        self._report()
        self._deliver()
        running = sum(request.live for request, *_ in draws)
        if running == len(draws):
            return True
        await _settle_turns()
        return len(self._batcher.waiting) < running

    def _generate(self, prompts: Sequence[list[int]], most: int, choose: Choose) -> None:
        """Run transformers' generate with the tokens that `choose` returns."""
        width, device = max(map(len, prompts)), self._model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        steps = _Steps(choose)
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(max_new_tokens=most, do_sample=False, pad_token_id=0, use_cache=True),
            logits_processor=[steps],
            stopping_criteria=[_Stop(steps)],
        )

    @torch.inference_mode()
    def _choose_way(self) -> None:
        """Find the fastest way whose logits are those of the model's plain forward pass, without a cache."""
        model, errors = self._model, list[str]()
        with short_windows(model):
            model.set_attn_implementation("eager")  # the model's own definition, without fused kernels
            expected = [[self._plain_logits(ids) for ids in probes] for probes in self._probes()]
            fix_rope(model)
            for attention, self._batcher.pads in WAYS:
                try:
                    model.set_attn_implementation(attention)
                except ValueError:  # the model has no such attention
                    continue
                # One set that agrees is enough: in half precision, the last bit can decide between activations.
                found = [self._compare(*each) for each in zip(self._probes(), expected, strict=True)]
                if None in found:
                    return
                errors += [error for error in found if error is not None]
        raise UnsupportedModelError(
            f"the logits of {type(model).__name__} with its cache differ from those without, by {errors[-1]}"
        )

    def _probes(self) -> list[list[list[int]]]:
        """Sets of two sequences of one length and a longer one, from the middle of the vocabulary."""
        starts = [self._vocab * (3 + number) // 10 for number in range(NUM_PROBES)]
        shapes = [(5, 5), (7, 5), (11, 9)]  # step, length before the forced tokens
        return [
            [[(start + step * i) % self._vocab for i in range(length + FORCED)] for step, length in shapes]
            for start in starts
        ]

    def _plain_logits(self, ids: list[int]) -> Tensor:
        batch = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._model(input_ids=batch, use_cache=False).logits[0, -FORCED - 1 : -1]
        return logits.float()

    def _compare(self, probes: list[list[int]], expected: list[Tensor]) -> str | None:
        """Describe how far off the logits are; None if they agree."""
        got: list[Tensor] = []
        for part in [probes] if self._batcher.pads else [probes[:2], probes[2:]]:
            seen: list[Tensor] = []

            def force(scores_BV: Tensor, seen: list[Tensor] = seen, part: list[list[int]] = part) -> list[int]:
                seen.append(scores_BV.float())
                return [ids[len(ids) - FORCED + len(seen) - 1] for ids in part]

            self._generate([ids[:-FORCED] for ids in part], FORCED, force)
            got += torch.stack(seen, dim=1).unbind(0)
        return describe_difference(self._model, torch.cat(got), torch.cat(expected))


async def _settle_turns() -> None:
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


class _Steps(LogitsProcessor):  # type: ignore[misc]
    """Leaves only the chosen tokens possible."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.stopped = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._choose(scores)
        self.stopped = chosen is None
        ids_B1 = torch.tensor(chosen or [0] * len(scores), device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter(1, ids_B1, 0.0)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._steps.stopped, device=input_ids.device)
