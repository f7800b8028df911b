"""Decides which requests run in the next step, and which cache blocks hold their keys and values.

Pure bookkeeping without tensors or a clock, so the same submissions always give the same batches. All of it runs on the
event loop's thread. The model runners only see `Chunk`s, which do not change once planned.

A step runs chunks of tokens and may sample several tokens (`burst`) for each request whose last token it runs. The next
step may be planned before the results of this one are known (`Request.ahead`): it continues from tokens that only the
device has seen, and its results for requests that turn out to have ended are dropped.

When blocks run out, idle sessions are evicted, least recently used first. Then the youngest request goes back to
waiting, to be recomputed. The oldest request can always run, so there is always progress.

Requests that begin alike share work. A request finds cached blocks by the names of its tokens (`prefix_cache.py`). On a
GPU, blocks are shared, even before they are computed: a pass writes the keys and values of all its tokens before it
reads any, so a request may run in the same step as the one that computes its prefix, or later, but not earlier
(`Request.sources`). On a CPU, each request has its own copies, waits for a request that is computing the next block it
needs, and is decoded as one with running requests that have equal tokens (`share_decoding`): these twins sample from
the same logits with different noise, and keys and values are written to the blocks of each, so they can part at any
token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import chain

from agent_r1.engines.local.blocks import START, BlockPool, Name, name_after, num_blocks
from agent_r1.engines.local.prefix_cache import Idle, find_prefix, name_blocks
from agent_r1.engines.local.request import Chunk, Draw, EngineStats, Request, RequestQueue

SHORTEST_BURST = 4  # tokens; a shorter one takes a GPU less time than the host needs to plan the next
RECENT = 1 / 64  # weight of a response in the typical length


class Scheduler(RequestQueue):
    """Continuous batching over a fixed number of cache blocks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_batch_tokens: int,
        burst: int = 1,
        share_decoding: bool = False,
    ) -> None:
        """
        burst: most tokens sampled for a request in one step.
        share_decoding: copy blocks instead of sharing them, and decode equal requests as one. The results of each step
            must be known before the next one is planned.
        """
        self.stats = EngineStats()
        self.capacity = num_blocks * block_size  # tokens of the longest request that fits, response included
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._burst = burst
        self._share_decoding = share_decoding
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._idle: OrderedDict[str, Idle] = OrderedDict()
        self._live: Counter[str] = Counter()  # number of live requests of each session
        self._being_computed: dict[Name, Request] = {}
        self._unplanned: dict[int, int] = {}  # promised blocks, with the number of tokens up to the end of each
        self._typical = 2.0 * burst  # typical length of recent responses, in tokens

    @property
    def free_blocks(self) -> int:
        return self._pool.num_blank

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._live[request.session] += 1

    def cancel(self, request: Request) -> None:
        """Remove a request and free its blocks."""
        if request.live:
            self._remove(request)
            self._free_cache(request)

    def release(self, session: str) -> None:
        if session in self._idle:
            self._pool.give_back(self._idle.pop(session).blocks)
        for request in chain(self._waiting, self._running) if session in self._live else ():
            if request.session == session:
                request.keep_cache = False

    def forget(self) -> None:
        """Drop all cached tokens. Running requests are recomputed and keep what they have sampled."""
        self._drop_idle()
        while self._running:
            self._preempt(self._running[-1])

    def known_tokens(self, session: str) -> list[int]:
        return self._idle[session].tokens if session in self._idle else []

    def plan(self) -> list[Chunk]:
        """The next step: single tokens first, then longer chunks. Empty if all remaining work is in flight."""
        postponed = self._admit()
        singles: list[Chunk] = []
        longer: list[Chunk] = []
        decoding: dict[object, Chunk] = {}
        budget = self._max_batch_tokens
        to_prefill = sum(pending for request in self._running if (pending := request.pending) > 1)
        # About half a response: then the host sees its end, and admits the next request, soon after it. But prompts
        # left for the next step should not wait long for it: the batch is not full until then.
        usual = min(self._burst, max(SHORTEST_BURST, round(self._typical / 2)))
        burst = 1 if postponed or to_prefill > budget else usual
        for request in list(self._running):
            if request.left <= 0:  # its last tokens are in flight
                continue
            pending = request.pending
            if self._share_decoding and pending == 1:
                twin = decoding.get((request.branch or request.whole, request.cached))
                if twin is not None:
                    self._join(request, twin)
                    continue
            length = 1 if pending == 1 else min(pending, budget)
            ready = self._unplanned.keys().isdisjoint(request.sources)
            chunk = self._chunk(request, length, burst) if length and ready else None
            if chunk is None:
                continue
            if length == 1:
                singles.append(chunk)
                if self._share_decoding:
                    decoding[request.branch or request.whole, chunk.start] = chunk
            else:
                longer.append(chunk)
            if pending > 1:
                budget -= length
        return singles + longer

    def _chunk(self, request: Request, length: int, burst: int) -> Chunk | None:
        """The next tokens of a request; None if there is no room for them."""
        start, left = request.cached, request.left
        count = min(burst, left) if length == request.pending else 0
        end = start + length + max(count - 1, 0)
        copies = self._plan_copies(request) if request.copies else []  # before growing into the blocks they read
        fits = request.running and end <= len(request.blocks) * self._block_size
        if not fits and not self._grow(request, end):
            return None
        chunk = Chunk(
            request,
            request.tokens[start : start + length],  # empty if the token is not known yet
            start,
            request.blocks,
            count,
            request.sampling.max_tokens - left,
            copies=copies,
            admission=request.admissions,
        )
        request.cached = end
        request.ahead += count
        while request.promised and self._unplanned[request.promised[0]] <= end:
            del self._unplanned[request.promised.popleft()]
        return chunk

    def _join(self, request: Request, twin: Chunk) -> None:
        copies = self._plan_copies(request)
        if self._grow(request, twin.end):
            twin.twins.append(request)
            twin.twin_blocks.append(request.blocks)
            twin.copies.extend(copies)
            request.cached += 1
            request.ahead += 1

    def _plan_copies(self, request: Request) -> list[tuple[int, int]]:
        """Copies are made before the step writes anything, so their sources may be freed now."""
        copies, request.copies = request.copies, []
        self._pool.give_back(source for source, _ in copies)
        return copies

    def apply(self, chunks: Sequence[Chunk], drawn: Sequence[Draw]) -> list[Request]:
        """Record the results of a step. Returns the completed requests."""
        finished: list[Request] = []
        self.stats.steps += 1
        draws = iter(drawn)
        for chunk in chunks:
            branches: dict[int, object] = {}
            for request in (chunk.request, *chunk.twins):
                new, new_logprobs, new_kept = next(draws) if chunk.count else ((), (), None)
                if not request.live:  # cancelled or completed while the step ran
                    continue
                if request is not chunk.request:
                    self.stats.shared_tokens += chunk.length
                elif chunk.start < request.prefill_end:
                    self.stats.prefilled_tokens += chunk.length
                request.ahead -= chunk.count
                request.tokens.extend(new)
                request.logprobs.extend(new_logprobs)
                if new_kept is not None and request.sampling.keep_support:
                    request.kept.append(new_kept)
                self.stats.decoded_tokens += len(new)
                if request.running and (request is not chunk.request or request.admissions == chunk.admission):
                    self._publish(request, chunk.end + max(len(new) - 1, 0))
                if new and self._share_decoding:
                    request.branch = branches.setdefault(new[-1], object())
                if new and (new[-1] in request.sampling.stop_ids or request.left + request.ahead == 0):
                    self._typical += RECENT * (len(request.logprobs) - self._typical)
                    self._finish(request)
                    finished.append(request)
        return finished

    def _publish(self, request: Request, end: int) -> None:
        """Let other requests find the blocks computed up to `end`."""
        size = self._block_size
        while (request.published + 1) * size <= end:
            index = request.published
            if index >= request.prefill_end // size:  # sampled since the request was admitted
                before = request.names[index - 1] if index else START
                request.names[index:] = [name_after(before, request.tokens[index * size : (index + 1) * size])]
            self._pool.publish(request.names[index], request.blocks[index], size)
            self._mark_computed(request, request.names[index])
            request.published += 1
        filled, inside = divmod(request.prefill_end, size)
        if inside and end >= request.prefill_end and self._being_computed.get(request.whole) is request:
            self._pool.publish(request.whole, request.blocks[filled], inside)
            self._mark_computed(request, request.whole)

    def _mark_computed(self, request: Request, name: Name) -> None:
        if self._being_computed.get(name) is request:
            del self._being_computed[name]

    def _finish(self, request: Request) -> None:
        self._remove(request)
        if not request.keep_cache or not request.blocks:
            self._free_cache(request)
            return
        if request.session in self._idle:  # two requests of a session ran concurrently: keep the later one
            self._pool.give_back(self._idle.pop(request.session).blocks)
        # The last token was sampled but not run, so it has no keys and values.
        cached = len(request.tokens) - 1
        needed = self._blocks_for(cached)
        self._pool.give_back(request.blocks[needed:])
        names = request.names[: min(request.published, cached // self._block_size)]
        self._idle[request.session] = Idle(request.tokens, request.blocks[:needed], names)

    def _admit(self) -> int:
        """Move waiting requests to running, oldest first, while their tokens fit.

        Returns how many were postponed because other requests are computing what they need."""
        postponed: list[Request] = []
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            if request.ahead or self._should_wait(request):
                postponed.append(self._waiting.popleft())
                continue
            if not self._find_cache(request):
                break
            self._waiting.popleft()
            self._running.append(request)
            request.running = True
            request.admissions += 1
        self._waiting.extendleft(reversed(postponed))
        return len(postponed)

    def _should_wait(self, request: Request) -> bool:
        """Whether another request is computing the first block that this one lacks. On a GPU, they share it."""
        name_blocks(request, self._idle.get(request.session), self._block_size)
        if not self._share_decoding:
            return False
        names = (*request.names, request.whole)
        missing = next((name for name in names if self._pool.find(name) is None), None)
        return missing is not None and missing in self._being_computed

    def _find_cache(self, request: Request) -> bool:
        """Give the request blocks for its tokens, filled as far as possible; False if there is no room."""
        idle = self._idle.pop(request.session, None)
        due = None if self._share_decoding else self._unplanned
        known = find_prefix(request, idle, self._pool, self._block_size, due)
        held, copied = known.blocks, known.copied
        wanted = self._blocks_for(len(request.tokens) + 1) - len(held) + copied
        for block in held[known.kept :]:  # first, so that making room cannot evict them
            self._pool.share(block)
        # One spare block per running request; otherwise the new one would soon be preempted.
        if not self._make_room(wanted + len(self._running), spared=held):
            self._pool.give_back(held[known.kept :])
            if idle is not None:  # kept for the next try to admit the request
                self._idle[request.session] = idle
            if self._running or (not held and idle is None):
                return False
            self._drop_idle()  # nothing else runs: the blocks it would copy from take the room it needs
            return self._find_cache(request)
        if idle is not None:  # the request takes over the others
            self._pool.give_back(idle.blocks[known.kept :])
        new, inside = self._pool.take(wanted), known.cached % self._block_size
        if copied:
            held, sources = held[:-copied], held[-copied:]
            request.copies = list(zip(sources, new[:copied], strict=True))
        elif inside:
            self._pool.rewrite(held[-1], kept=inside)
        request.sources = [block for block in held if block in self._unplanned]
        request.blocks, request.cached, request.published = held + new, known.cached, known.cached // self._block_size
        self._announce(request)
        self.stats.reused_tokens += known.own
        self.stats.shared_tokens += known.cached - known.own
        return True

    def _announce(self, request: Request) -> None:
        """Let other requests share the blocks that this one has been admitted to compute, or wait for them."""
        size = self._block_size
        shared = () if self._share_decoding else range(request.published, request.prefill_end // size)
        for index in shared:
            if self._pool.find(request.names[index]) is None:
                self._pool.publish(request.names[index], request.blocks[index], size)
                self._unplanned[request.blocks[index]] = (index + 1) * size
                request.promised.append(request.blocks[index])
        for name in (*request.names[request.published :], request.whole):
            if self._pool.find(name) is None:
                self._being_computed.setdefault(name, request)

    def _grow(self, request: Request, length: int) -> bool:
        """Make the request's blocks hold `length` tokens; False if the request was preempted."""
        if not request.running:
            return False  # an older request has preempted it while this step was planned
        wanted = self._blocks_for(length) - len(request.blocks)
        if wanted <= 0:
            return True
        while not self._make_room(wanted):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks = request.blocks + self._pool.take(wanted)
        return True

    def _make_room(self, wanted: int, spared: Sequence[int] = ()) -> bool:
        """Evict idle sessions until `wanted` blocks are free. Evicts none if that would not be enough."""
        if wanted <= self._pool.num_blank:
            return True
        in_use = {block for request in self._running for block in request.blocks}.union(spared)
        if wanted > self._pool.num_blocks - len(in_use):
            return False
        while wanted > self._pool.num_blank and self._idle:
            _, idle = self._idle.popitem(last=False)
            self._pool.give_back(idle.blocks)
            self.stats.evictions += 1
        return wanted <= self._pool.num_blank

    def _drop_idle(self) -> None:
        for idle in self._idle.values():
            self._pool.give_back(idle.blocks)
        self._idle.clear()

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._free_cache(request)
        request.running, request.branch = False, None
        self._waiting.appendleft(request)
        self.stats.preemptions += 1

    def _remove(self, request: Request) -> None:
        (self._running if request.running else self._waiting).remove(request)
        request.live = request.running = False
        self._live[request.session] -= 1
        if not self._live[request.session]:
            del self._live[request.session]

    def _free_cache(self, request: Request) -> None:
        if request.promised:
            self._break_promises(request)
        for name in (*request.names[request.published :], request.whole):
            self._mark_computed(request, name)
        self._pool.give_back(request.blocks)
        self._pool.give_back(source for source, _ in request.copies)
        request.blocks, request.cached, request.copies, request.published, request.sources = [], 0, [], 0, []

    def _break_promises(self, request: Request) -> None:
        """Nobody will compute these blocks: requests that share them begin again, the youngest first."""
        lost = set(request.promised)
        request.promised.clear()
        for block in lost:
            del self._unplanned[block]
        for other in reversed(self._running):
            if other.running and not lost.isdisjoint(other.sources):
                self._preempt(other)

    def _blocks_for(self, length: int) -> int:
        return num_blocks(length, self._block_size)
