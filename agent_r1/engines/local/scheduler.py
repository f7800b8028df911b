"""Which requests run in the next step, and which blocks of the cache hold whose keys and values.

Pure bookkeeping: no tensors, no clock, so the same submissions always give the same batches. All of it runs on the
event loop's thread; a `Chunk` is what the model's side gets to see, and nothing in it changes later.

A step runs chunks of tokens and may sample several tokens for each request whose last token it runs (`burst`). The
next step may be planned before the results of this one are known (`Request.ahead`): it goes on from tokens that only
the device has seen yet, and what it computes for requests that turn out to have ended is dropped.

When blocks run out, idle sessions go first (least recently used), then the request that was admitted last goes back to
waiting with the tokens it has sampled, to be recomputed; the first can always run, so there is always progress.

Prompts that begin alike share blocks: a request begins where the cache ends that it finds under the names of its
blocks (`blocks.py`), and waits for a request that is just computing what it needs next. With `share_decoding`, running
requests whose tokens are equal are also decoded as one: these twins sample from the same logits with their own noise,
and each has keys and values written to its own blocks, so nothing is left to do when they part.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.engines.local.blocks import START, BlockPool, Name, name_after
from agent_r1.engines.local.request import Chunk, EngineStats, Request
from agent_r1.engines.local.sampling import Kept


@dataclass(frozen=True, slots=True)
class Idle:
    """What a session left behind for its next request."""

    tokens: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Where the first tokens of a request are to be found."""

    blocks: list[int]
    cached: int  # tokens in them
    own: int  # of these, in the session's own cache
    copied: int  # of the blocks, from the end: not to be used as they are


class Scheduler:
    """Continuous batching over a fixed number of cache blocks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_batch_tokens: int,
        burst: int = 1,
        share_blocks: bool = True,
        share_decoding: bool = False,
    ) -> None:
        """
        burst: tokens sampled for a request in one step, at most.
        share_blocks: let requests that begin alike read the same blocks, instead of copies.
        share_decoding: decode equal requests as one; only where each step's results are known before the next.
        """
        self.stats = EngineStats()
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._burst = burst
        self._share_blocks = share_blocks
        self._share_decoding = share_decoding
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._idle: OrderedDict[str, Idle] = OrderedDict()
        self._open: dict[str, list[Request]] = {}  # session -> its requests that are neither finished nor cancelled
        self._being_computed: dict[Name, Request] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def free_blocks(self) -> int:
        return self._pool.num_blank

    @property
    def capacity(self) -> int:
        """Tokens one request may grow to, its response included."""
        return self._pool.num_blocks * self._block_size

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._open.setdefault(request.session, []).append(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if not request.live:
            return
        self._take_out(request)
        self._free_cache(request)

    def release(self, session: str) -> None:
        """Free what is kept for a session, now or when its running request ends."""
        if session in self._idle:
            self._pool.give_back(self._idle.pop(session).blocks)
        for request in self._open.get(session, ()):
            request.keep = False

    def forget(self) -> None:
        """Drop every cached token. Running requests start over, keeping what they have sampled."""
        self._drop_idle()
        while self._running:
            self._preempt(self._running[-1])

    def plan(self) -> list[Chunk]:
        """The next step: single tokens first, then longer chunks. Empty when all there is to do is under way."""
        postponed = self._admit()
        singles: list[Chunk] = []
        longer: list[Chunk] = []
        decoding: dict[object, Chunk] = {}
        budget = self._max_batch_tokens
        to_prefill = sum(pending for request in self._running if (pending := request.pending) > 1)
        # Prompts that remain for the next step should not wait long for it: until then the batch is not full.
        burst = 1 if postponed or to_prefill > budget else self._burst
        for request in list(self._running):
            pending = request.pending
            if request.left <= 0:  # what is under way completes it
                continue
            if self._share_decoding and pending == 1:
                twin = decoding.get((request.branch or request.whole, request.cached))
                if twin is not None:
                    self._join(request, twin)
                    continue
            length = 1 if pending == 1 else min(pending, budget)
            chunk = self._chunk(request, length, burst) if length else None
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
        """The next tokens of a request; None when there is no room for them."""
        start, left = request.cached, request.left
        count = min(burst, left) if length == request.pending else 0
        end = start + length + max(count - 1, 0)
        copies = self._planned_copies(request) if request.copies else []  # first: it may grow into what they read from
        if not self._grow(request, end):
            return None
        chunk = Chunk(
            request,
            request.tokens[start : start + length],  # none where the token is not known yet
            start,
            request.blocks,
            count,
            request.sampling.max_tokens - left,
            copies=copies,
            admission=request.admissions,
        )
        request.cached = end
        request.ahead += count
        return chunk

    def _join(self, request: Request, twin: Chunk) -> None:
        copies = self._planned_copies(request)
        if self._grow(request, twin.end):
            twin.twins.append(request)
            twin.twin_blocks.append(request.blocks)
            twin.copies.extend(copies)
            request.cached += 1
            request.ahead += 1

    def _planned_copies(self, request: Request) -> list[tuple[int, int]]:
        """They will be made before anything is written, so what they read from may go from now on."""
        copies, request.copies = request.copies, []
        self._pool.give_back(source for source, _ in copies)
        return copies

    def apply(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        kept: Sequence[Kept | None] | None = None,
    ) -> list[Request]:
        """Record a finished step; the other arguments belong to `draws`. Returns the completed requests."""
        finished: list[Request] = []
        self.stats.steps += 1
        drawn = iter(zip(tokens, logprobs, [None] * len(tokens) if kept is None else kept, strict=True))
        for chunk in chunks:
            branches: dict[int, object] = {}
            for request in (chunk.request, *chunk.twins):
                new, new_logprobs, new_kept = next(drawn) if chunk.count else ((), (), None)
                if not request.live:  # cancelled, or found to have ended, while the step ran
                    continue
                self._count(request, chunk)
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
                    self._finish(request)
                    finished.append(request)
        return finished

    def _count(self, request: Request, chunk: Chunk) -> None:
        if request is not chunk.request:
            self.stats.shared_tokens += chunk.length
        elif chunk.start < request.prefill_end:
            self.stats.prefilled_tokens += chunk.length

    def _publish(self, request: Request, end: int) -> None:
        """Let others find what has been computed up to `end`."""
        size = self._block_size
        while (request.published + 1) * size <= end:
            index = request.published
            if index >= request.prefill_end // size:  # sampled since it was admitted
                before = request.names[index - 1] if index else START
                request.names[index:] = [name_after(before, request.tokens[index * size : (index + 1) * size])]
            self._pool.publish(request.names[index], request.blocks[index], size)
            self._computed(request, request.names[index])
            request.published += 1
        filled, inside = divmod(request.prefill_end, size)
        if inside and end >= request.prefill_end and self._being_computed.get(request.whole) is request:
            self._pool.publish(request.whole, request.blocks[filled], inside)
            self._computed(request, request.whole)

    def _computed(self, request: Request, name: Name) -> None:
        if self._being_computed.get(name) is request:
            del self._being_computed[name]

    def _finish(self, request: Request) -> None:
        self._take_out(request)
        if not request.keep or not request.blocks:
            self._free_cache(request)
            return
        if request.session in self._idle:  # two requests of one session ran side by side: the later one is kept
            self._pool.give_back(self._idle.pop(request.session).blocks)
        # The last token was sampled but never run, so it has no keys and values.
        cached = len(request.tokens) - 1
        needed = self._blocks_for(cached)
        self._pool.give_back(request.blocks[needed:])
        self._idle[request.session] = Idle(request.tokens[:cached], request.blocks[:needed])

    def _admit(self) -> int:
        """Move waiting requests to running, oldest first, while the tokens they already have would fit.

        Returns how many could not join yet because what they need is still being computed."""
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
        """Somebody is just computing the first of its blocks that are not there."""
        self._name(request)
        missing = next((name for name in (*request.names, request.whole) if self._pool.find(name) is None), None)
        return missing is not None and missing in self._being_computed

    def _name(self, request: Request) -> None:
        """The names of the full blocks and of all tokens. Once per admission, because it reads the whole prompt."""
        if request.prefill_end == len(request.tokens):
            return
        size, length, names = self._block_size, len(request.tokens), [START]
        for start in range(0, length - size + 1, size):
            names.append(name_after(names[-1], request.tokens[start : start + size]))
        tail = request.tokens[length // size * size :]
        request.names, request.prefill_end = names[1:], length
        request.whole = name_after(names[-1], tail) if tail else names[-1]

    def _find_cache(self, request: Request) -> bool:
        """Give the request blocks for its tokens, with as much in them as is known; False if there is no room."""
        idle = self._idle.pop(request.session, None)
        known = self._known(request, idle)
        held, copied = known.blocks, known.copied
        wanted = self._blocks_for(len(request.tokens) + 1) - len(held) + copied
        for block in held:  # now, so that making room cannot take them away
            self._pool.share(block)
        # One spare block per running request, or the newcomer would soon push itself out again.
        if not self._make_room(wanted + len(self._running), spared=held):
            self._pool.give_back(held)
            if idle is not None:  # its own cache stays usable for the next attempt
                self._idle[request.session] = idle
            if self._running or (not held and idle is None):
                return False
            self._drop_idle()  # it is alone and still in its own way: what it would copy from takes the last block
            return self._find_cache(request)
        if idle is not None:
            self._pool.give_back(idle.blocks)
        new, inside = self._pool.take(wanted), known.cached % self._block_size
        if copied:
            held, sources = held[:-copied], held[-copied:]
            request.copies = list(zip(sources, new[:copied], strict=True))
        elif inside:
            self._pool.rewritten(held[-1], kept=inside)
        request.blocks, request.cached, request.published = held + new, known.cached, known.cached // self._block_size
        for name in (*request.names[request.published :], request.whole):
            if self._pool.find(name) is None:
                self._being_computed.setdefault(name, request)
        self.stats.reused_tokens += known.own
        self.stats.shared_tokens += known.cached - known.own
        return True

    def _known(self, request: Request, idle: Idle | None) -> Known:
        """What the session or others have in their blocks of the tokens that the request begins with."""
        size, last = self._block_size, len(request.tokens) - 1  # at least one token must run to give logits
        own = min(common_prefix(idle.tokens, request.tokens), last) if idle is not None else 0
        blocks, shared = self._found(request)
        cached = max(own, min(shared, last))
        kept = self._blocks_for(own) if own == cached else own // size  # of the session's own blocks
        held = (idle.blocks[:kept] if idle is not None else []) + blocks[kept : self._blocks_for(cached)]
        # Blocks that are written, or may not be shared, must be the request's own: if others use them, copies of them.
        inside, foreign = cached % size, len(held) - kept
        if inside and not foreign:
            foreign = int(self._pool.is_shared(held[-1]))
        copied = min(foreign, int(inside > 0)) if self._share_blocks else foreign
        return Known(blocks=held, cached=cached, own=own, copied=copied)

    def _found(self, request: Request) -> tuple[list[int], int]:
        """The blocks others hold that the request's tokens begin with, and how many tokens that is."""
        blocks: list[int] = []
        for name in request.names:
            block = self._pool.find(name)
            if block is None:
                return blocks, len(blocks) * self._block_size
            blocks.append(block)
        tail = self._pool.find(request.whole)
        if tail is None or len(blocks) * self._block_size == len(request.tokens):
            return blocks, len(blocks) * self._block_size
        return [*blocks, tail], len(request.tokens)

    def _grow(self, request: Request, length: int) -> bool:
        """Make the request's blocks hold `length` tokens; False when it had to go back to waiting itself."""
        if not request.running:
            return False  # an older request took its blocks a moment ago
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
        """Evict idle sessions, least recently used first, until `wanted` blocks are free; none if that cannot do."""
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

    def _take_out(self, request: Request) -> None:
        (self._running if request.running else self._waiting).remove(request)
        request.live = request.running = False
        others = self._open[request.session]
        others.remove(request)
        if not others:
            del self._open[request.session]

    def _free_cache(self, request: Request) -> None:
        for name in (*request.names[request.published :], request.whole):
            self._computed(request, name)
        self._pool.give_back(request.blocks)
        self._pool.give_back(source for source, _ in request.copies)
        request.blocks, request.cached, request.copies, request.published = [], 0, [], 0

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many leading tokens two lists share."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # the usual case: a prompt that extends what the session has seen
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
