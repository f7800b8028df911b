"""Which tokens run in the next step, and which blocks of the cache hold whose keys and values.

Pure bookkeeping: no tensors, no clock, no event loop, so the same submissions always give the same batches. All of it
runs on the event loop's thread; a `Chunk` is what the model's thread gets to see, and nothing in it changes later.

Running requests are kept in submission order, and every running one was submitted before every waiting one. When
blocks run out, idle sessions go first (least recently used), then the youngest running request goes back to waiting
with the tokens it has sampled, to be recomputed; the oldest can always run, so there is always progress.

Running requests whose tokens are equal, as those of a group are at first, are twins: their tokens run once, for the
oldest of them, and each samples from the same logits with its own noise and has the keys and values written to its own
blocks. So nothing is left to do when they part, which is when they sample different tokens. A request that comes later
than an equal one gets copies of the blocks that hold the prompt, as long as these are not given back.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent_r1.agent.sampler import Sampling
from agent_r1.rollout.engines.known_prompts import KnownPrompts, Prompt


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One response being sampled."""

    session: str
    tokens: list[int]  # the prompt, then what has been sampled
    sampling: Sampling
    uniforms: NDArray[np.float64]  # one per token that may be sampled
    prompt_length: int = field(init=False)
    known_as: Prompt = field(init=False)  # stands for the tokens it was submitted with, or preempted with
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # replaced, not emptied, when freed: a running step may read them
    cached: int = 0  # leading tokens whose keys and values are in `blocks`
    prefill_end: int = 0  # tokens before this one were known when the request was admitted
    branch: object = None  # the same object on two requests: they sampled it together, so their tokens are equal
    copies: list[tuple[int, int]] = field(default_factory=list)  # what `Chunk.copies` says, until there is a chunk
    keep: bool = True  # keep the cache for the session's next request
    live: bool = True  # neither finished nor cancelled

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.known_as = Prompt.of(self.tokens)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request, and of its twins, that run in one step."""

    request: Request
    ids: list[int]
    start: int  # position of the first id
    blocks: list[int]  # enough for the tokens before the chunk and its own
    samples: bool  # the chunk ends at the request's last token, so its logits give the next one
    twins: list[Request] = field(default_factory=list)
    twin_blocks: list[list[int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks, before anything is written

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def draws(self) -> list[Request]:
        """Who samples from the logits after the last id."""
        return [self.request, *self.twins] if self.samples else []


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made."""

    steps: int = 0
    prefilled_tokens: int = 0  # run through the model to fill the cache, recomputation included
    reused_tokens: int = 0  # prompt tokens found in the session's cache
    shared_tokens: int = 0  # not run, because they ran for a request with equal tokens
    decoded_tokens: int = 0  # sampled
    preemptions: int = 0
    evictions: int = 0  # idle sessions whose cache was dropped to make room


class Scheduler:
    """Continuous batching over a fixed number of cache blocks."""

    def __init__(self, *, num_blocks: int, block_size: int, max_running: int, max_batch_tokens: int) -> None:
        self.stats = EngineStats()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._idle: OrderedDict[str, tuple[list[int], list[int]]] = OrderedDict()  # session -> cached tokens, blocks
        self._known = KnownPrompts()
        # A heap, so that the lowest block is taken first and the blocks in use stay close together.
        self._free = list(range(num_blocks))

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens one request may grow to, its response included."""
        return self._num_blocks * self._block_size

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if not request.live:
            return
        request.live = False
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._free_cache(request)

    def release(self, session: str) -> None:
        """Free what is kept for a session, now or when its running request ends."""
        if session in self._idle:
            self._give_back(self._idle.pop(session)[1])
        for request in (*self._running, *self._waiting):
            if request.session == session:
                request.keep = False

    def forget(self) -> None:
        """Drop every cached token. Running requests start over, keeping what they have sampled."""
        for _, blocks in self._idle.values():
            self._give_back(blocks)
        self._idle.clear()
        while self._running:
            self._preempt(self._running[-1])

    def plan(self) -> list[Chunk]:
        """The next step: single tokens first, then longer chunks. Empty only when there are no requests."""
        self._admit()
        singles: list[Chunk] = []
        longer: list[Chunk] = []
        planned: dict[object, list[Chunk]] = {}  # of requests with equal tokens, some of them further along
        budget = self._max_batch_tokens
        for request in list(self._running):
            equals = planned.setdefault(request.branch or request.known_as, [])
            twin = next((chunk for chunk in equals if chunk.start <= request.cached < chunk.end), None)
            if twin is not None:
                if self._grow(request, twin.end):
                    twin.twins.append(request)
                    twin.twin_blocks.append(request.blocks)
                    twin.copies.extend(request.copies)
                continue
            pending = request.pending
            count = 1 if pending == 1 else min(pending, budget)
            if count == 0 or not self._grow(request, request.cached + count):
                continue
            start = request.cached
            ids = request.tokens[start : start + count]
            chunk = Chunk(request, ids, start, request.blocks, count == pending, copies=list(request.copies))
            if count == 1:
                singles.append(chunk)
            else:
                longer.append(chunk)
            equals.append(chunk)
            if pending > 1:
                budget -= count
        return singles + longer

    def apply(self, chunks: Sequence[Chunk], tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Book a finished step; `tokens` and `logprobs` are those of all `draws`. Returns what is complete."""
        finished: list[Request] = []
        self.stats.steps += 1
        drawn = zip(tokens, logprobs, strict=True)
        for chunk in chunks:
            branches: dict[int, object] = {}
            for request in (chunk.request, *chunk.twins):
                token, logprob = next(drawn) if chunk.samples else (None, 0.0)
                if not request.live:  # cancelled while the step ran
                    continue
                self._book(request, chunk)
                if token is None:
                    continue
                request.branch = branches.setdefault(token, object())
                request.tokens.append(token)
                request.logprobs.append(logprob)
                self.stats.decoded_tokens += 1
                if token in request.sampling.stop_ids or len(request.logprobs) == request.sampling.max_tokens:
                    self._finish(request)
                    finished.append(request)
        return finished

    def _book(self, request: Request, chunk: Chunk) -> None:
        count = chunk.end - request.cached
        if request is not chunk.request:
            self.stats.shared_tokens += count
        elif request.cached < request.prefill_end:
            self.stats.prefilled_tokens += count
        request.cached = chunk.end
        request.copies = []
        if chunk.end == request.prefill_end:
            self._known.add(request.known_as, request.blocks[: self._blocks_for(chunk.end)])

    def _finish(self, request: Request) -> None:
        request.live = False
        self._running.remove(request)
        if not request.keep:
            self._free_cache(request)
            return
        if request.session in self._idle:  # two requests of one session ran side by side: the later one is kept
            self._give_back(self._idle.pop(request.session)[1])
        # The last token was sampled but never run, so it has no keys and values.
        self._idle[request.session] = (request.tokens[: request.cached], request.blocks)

    def _admit(self) -> None:
        """Move waiting requests to running, oldest first, while the tokens they already have would fit."""
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            kept = self._idle.pop(request.session, None)
            if kept is not None:
                request.cached, request.blocks = self._reusable(request, *kept)
            # One spare block per running request, or the newcomer would soon push itself out again.
            wanted = self._blocks_for(len(request.tokens) + 1) - len(request.blocks)
            if not self._make_room(wanted + len(self._running)):
                if kept is not None:  # its own cache stays usable for the next attempt
                    self._idle[request.session] = (request.tokens[: request.cached], request.blocks)
                    request.cached, request.blocks = 0, []
                return
            self._waiting.popleft()
            self._running.append(request)
            request.blocks = self._extended(request.blocks, wanted)
            request.prefill_end = len(request.tokens)
            self.stats.reused_tokens += request.cached
            self._copy_prompt(request)

    def _reusable(self, request: Request, tokens: list[int], blocks: list[int]) -> tuple[int, list[int]]:
        """Length of the common prefix and its blocks; at least one prompt token must run to give logits."""
        common = min(common_prefix(tokens, request.tokens), len(request.tokens) - 1)
        needed = self._blocks_for(common)
        self._give_back(blocks[needed:])
        if needed:
            self._known.rewritten(blocks[needed - 1], kept=common)
        return common, blocks[:needed]

    def _copy_prompt(self, request: Request) -> None:
        """Plan copies of what an equal prompt has in its blocks, except for the last token, which must run."""
        held, last = self._known.find(request.known_as), len(request.tokens) - 1
        if held is None or request.cached >= last:
            return
        missing = slice(request.cached // self._block_size, self._blocks_for(last))
        request.copies = list(zip(held[missing], request.blocks[missing], strict=True))
        self.stats.shared_tokens += last - request.cached
        request.cached = last

    def _grow(self, request: Request, length: int) -> bool:
        """Make the request's blocks hold `length` tokens; False when it had to go back to waiting itself."""
        wanted = self._blocks_for(length) - len(request.blocks)
        if wanted <= 0:
            return True
        if request not in self._running:
            return False  # an older request took its blocks a moment ago
        while not self._make_room(wanted):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks = self._extended(request.blocks, wanted)
        return True

    def _make_room(self, wanted: int) -> bool:
        """Evict idle sessions, least recently used first, until `wanted` blocks are free; none if that cannot do."""
        idle_blocks = sum(len(blocks) for _, blocks in self._idle.values()) if wanted > len(self._free) else 0
        if wanted > len(self._free) + idle_blocks:
            return False
        while wanted > len(self._free):
            _, (_, blocks) = self._idle.popitem(last=False)
            self._give_back(blocks)
            self.stats.evictions += 1
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._free_cache(request)
        request.branch, request.known_as = None, Prompt.of(request.tokens)
        self._waiting.appendleft(request)
        self.stats.preemptions += 1

    def _free_cache(self, request: Request) -> None:
        self._give_back(request.blocks)
        request.blocks, request.cached, request.copies = [], 0, []

    def _extended(self, blocks: list[int], count: int) -> list[int]:
        return blocks + [heapq.heappop(self._free) for _ in range(count)]

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._known.rewritten(block)
            heapq.heappush(self._free, block)

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many leading tokens two lists share."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # the usual case: a prompt that extends what the session has seen
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
