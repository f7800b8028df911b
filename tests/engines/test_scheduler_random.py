"""In any order of calls, every request ends, no block is lost, and every cache position that is read holds the right
tokens. The device is a dictionary from cache positions to the sequence they were computed for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.blocks import START, Name, name_after
from agent_r1.engines.local.request import Chunk, Request
from agent_r1.engines.local.scheduler import Scheduler
from tests.engines.scheduler_steps import drawn, has_requests

SIZE = 4  # tokens in a block
BLOCKS = 6  # 24 tokens
STOP = 999
MAX_RUNNING, MAX_BATCH_TOKENS = 3, 6

# The first two begin with the same 2 blocks, the third shares one with them, the fourth 3 tokens, the last nothing.
STEM = [1, 2, 3, 4, 5, 6, 7, 8]
PROMPTS = [
    [*STEM, *range(10, 22)],
    [*STEM, *range(30, 42)],
    [*STEM[:4], *range(50, 66)],
    [*STEM[:3], *range(70, 87)],
    list(range(100, 120)),
]


@dataclass(frozen=True)
class Mode:
    """How an engine uses the scheduler."""

    overlaps: bool
    burst: int
    share_decoding: bool = False


MODES = [
    Mode(overlaps=False, burst=1, share_decoding=True),  # CPU
    *(Mode(overlaps=True, burst=burst) for burst in (1, 2, 3, 4)),  # GPU
    Mode(overlaps=False, burst=4),
]

History = tuple[int, ...]
Writers = Counter[tuple[int, int]]  # how many requests write to (block, offset)


class Device:
    """Runs steps in order, and checks the cache positions they read."""

    def __init__(self, seed: int) -> None:
        self.memory: dict[tuple[int, int], History] = {}  # (block, offset) -> tokens up to the one there
        self.truth: dict[Request, list[int]] = {}  # the prompt and all drawn tokens
        self._ended: dict[Request, bool] = {}  # for requests that drew in the previous step
        self._seed = seed

    def run(self, chunks: list[Chunk]) -> list[list[int]]:
        """The first pass writes all tokens of all chunks before it reads any. Later passes run sampled tokens."""
        copied = [(pair, i) for chunk in chunks for pair in chunk.copies for i in range(SIZE)]
        self.memory |= {(to, i): self.memory[source, i] for (source, to), i in copied if (source, i) in self.memory}
        dead = [not chunk.ids and self._ended[chunk.request] for chunk in chunks]  # KeyError: not in the previous step
        alive = [
            (chunk, *row) for chunk, is_dead in zip(chunks, dead, strict=True) if not is_dead for row in rows(chunk)
        ]
        writers: Writers = Counter()
        for chunk, request, blocks in alive:
            for i in range(chunk.start, chunk.end):
                self._write(blocks, i, self.truth[request], writers)
        for chunk, request, blocks in alive:
            self._check_read(chunk, self.truth[request], blocks)
        self._ended = {}
        drawn: list[list[int]] = []
        for chunk, is_dead in zip(chunks, dead, strict=True):
            for request, blocks in rows(chunk) if chunk.count else ():
                drawn.append([] if is_dead else self._sample(chunk, request, blocks, writers))
                self._ended[request] = is_dead or drawn[-1][-1] == STOP
        assert set(writers.values()) <= {1}
        return drawn

    def _write(self, blocks: list[int], i: int, truth: list[int], writers: Writers) -> None:
        place = blocks[i // SIZE], i % SIZE
        self.memory[place] = tuple(truth[: i + 1])
        writers[place] += 1

    def _check_read(self, chunk: Chunk, truth: list[int], blocks: list[int]) -> None:
        assert chunk.ids == truth[chunk.start : chunk.end] if chunk.ids else chunk.start == len(truth) - 1
        for i in range(chunk.start):
            assert self.memory[blocks[i // SIZE], i % SIZE] == tuple(truth[: i + 1])

    def _sample(
        self, chunk: Chunk, request: Request, blocks: list[int], writers: Counter[tuple[int, int]]
    ) -> list[int]:
        truth, new = self.truth[request], list[int]()
        for i in range(chunk.end - 1, chunk.end - 1 + chunk.count):
            if i >= chunk.end:
                self._write(blocks, i, truth, writers)
            new.append(self._draw(request))
            truth.append(new[-1])
            if new[-1] == STOP:
                break
        return new

    def _draw(self, request: Request) -> int:
        """Sessions 0 and 1 draw equal tokens for a while, and so do 2 and 3; some tokens continue other prompts."""
        at = len(self.truth[request])
        value = (self._seed + 5 * at + int(request.session) // 2 + int(request.session) * (at > 12)) % 11
        return STOP if value == 0 else PROMPTS[value % 2][at % 20]


def rows(chunk: Chunk) -> Iterable[tuple[Request, list[int]]]:
    return zip((chunk.request, *chunk.twins), (chunk.blocks, *chunk.twin_blocks), strict=True)


class Driver:
    """Drives a scheduler as an engine does, with a step in flight whenever anything else happens."""

    def __init__(self, mode: Mode, seed: int) -> None:
        self.mode = mode
        self.engine = Scheduler(
            num_blocks=BLOCKS,
            block_size=SIZE,
            max_running=MAX_RUNNING,
            max_batch_tokens=MAX_BATCH_TOKENS,
            burst=mode.burst,
            share_decoding=mode.share_decoding,
        )
        self.device = Device(seed)
        self.submitted: list[Request] = []
        self.finished: list[Request] = []
        self.cancelled: list[Request] = []
        self.in_flight: tuple[list[Chunk], list[list[int]]] | None = None

    def submit(self, session: int, kind: int, length: int, max_tokens: int) -> None:
        """A new prompt, or one that extends the session."""
        past = [each.tokens for each in self.finished if each.session == str(session)] if kind == len(PROMPTS) else []
        tokens = [*past[-1], *range(90, 90 + length % 4)] if past else PROMPTS[kind % len(PROMPTS)][:length]
        if len(tokens) + max_tokens > BLOCKS * SIZE:
            tokens = tokens[: BLOCKS * SIZE - max_tokens]
        sampling = Sampling(max_tokens=max_tokens, stop_ids=(STOP,))
        request = Request(session=str(session), tokens=tokens, sampling=sampling, uniforms=np.zeros(max_tokens))
        self.device.truth[request] = list(tokens)
        self.submitted.append(request)
        self.engine.submit(request)

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.mode.overlaps:  # the next one is planned and launched, then this one is read
                launched = self._launch()
                self._apply()
            else:
                self._apply()
                launched = self._launch()
            self.in_flight = launched

    def cancel(self, number: int) -> None:
        if self.submitted:
            target = self.submitted[number % len(self.submitted)]
            self.cancelled += [target] if target.live else []
            self.engine.cancel(target)

    def release(self, session: int) -> None:
        self.engine.release(str(session))

    def forget(self) -> None:
        self.engine.forget()
        self.device.memory.clear()

    def _launch(self) -> tuple[list[Chunk], list[list[int]]] | None:
        chunks = self.engine.plan()
        check_plan(chunks)
        assert chunks or self.in_flight or not has_requests(self.engine)  # or the engine would stop and forget them
        return (chunks, self.device.run(chunks)) if chunks else None

    def _apply(self) -> None:
        if self.in_flight is not None:
            chunks, tokens = self.in_flight
            self.in_flight = None
            self.finished += self.engine.apply(chunks, drawn(*tokens))

    def check_blocks(self) -> None:
        """Check the number of users of each block, and that cached tokens are there."""
        engine, pool = self.engine, self.engine._pool
        users = Counter(block for idle in engine._idle.values() for block in idle.blocks)
        for request in engine._running:
            users.update(request.blocks)
            users.update(source for source, _ in request.copies)
        assert [users[block] for block in range(BLOCKS)] == pool._users
        assert pool.num_blank == pool._users.count(0)
        for idle in engine._idle.values():
            for i in range(len(idle.tokens) - 1):  # the last one was sampled but not run
                assert self.device.memory[idle.blocks[i // SIZE], i % SIZE] == tuple(idle.tokens[: i + 1])
        promised = [block for request in engine._running for block in request.promised]
        assert sorted(promised) == sorted(engine._unplanned)
        for block, names in pool._names.items():
            for name, count in names:
                assert pool.find(name) == block
                if block not in engine._unplanned:  # else a step that is yet to be planned will compute it
                    assert named(self.device.memory[block, count - 1]) == name
        assert len(pool._held) == sum(map(len, pool._names.values()))
        assert set(engine._being_computed.values()) <= set(engine._running)


def named(history: History) -> Name:
    name = START
    for start in range(0, len(history), SIZE):
        name = name_after(name, history[start : start + SIZE])
    return name


def check_plan(chunks: list[Chunk]) -> None:
    """Check that single tokens come first, and that others read a written block only if a prompt fills it."""
    assert sum(1 + len(chunk.twins) for chunk in chunks) <= MAX_RUNNING
    lengths = [chunk.length for chunk in chunks]
    assert lengths == sorted(lengths, key=lambda length: length > 1)
    assert sum(length for length in lengths if length > 1) <= MAX_BATCH_TOKENS
    held = [(chunk, block, i) for chunk in chunks for _, blocks in rows(chunk) for i, block in enumerate(blocks)]
    used = Counter(block for _, block, _ in held)
    written = Counter(block for chunk, block, i in held if (i + 1) * SIZE > chunk.start)
    for chunk in chunks:
        end = chunk.end + max(chunk.count - 1, 0)
        for request, blocks in rows(chunk):
            assert request.live
            assert len(blocks) * SIZE >= end
            for i in range(chunk.start // SIZE, -(-end // SIZE)):
                assert used[blocks[i]] == 1 or (written[blocks[i]] == 1 and (i + 1) * SIZE <= chunk.end)
        assert not {to for _, to in chunk.copies} & {source for other in chunks for source, _ in other.copies}


action = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(0, 5), st.integers(1, 20), st.integers(1, 10)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 7)),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("forget")),
)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(MODES), st.integers(0, 10), st.lists(action, min_size=5, max_size=60))
def test_whatever_happens_everything_finishes_and_no_block_is_lost(
    mode: Mode, seed: int, actions: list[tuple[str, ...]]
) -> None:
    driver = Driver(mode, seed)
    for name, *numbers in actions:
        getattr(driver, name)(*numbers)
        driver.check_blocks()
    for _ in range(2000):
        if has_requests(driver.engine) or driver.in_flight:
            driver.step(1)
            driver.check_blocks()
    assert Counter(driver.finished + driver.cancelled) == Counter(driver.submitted)
    for request in driver.finished:
        response = request.tokens[request.prompt_length :]
        assert request.tokens == driver.device.truth[request]
        assert len(response) == len(request.logprobs)
        assert STOP not in response[:-1]
        assert response[-1] == STOP or len(response) == request.sampling.max_tokens
    driver.engine.forget()
    assert driver.engine.free_blocks == BLOCKS
    assert not driver.engine._pool._held
    assert not driver.engine._being_computed
    assert not driver.engine._unplanned
