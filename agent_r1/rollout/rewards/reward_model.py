"""Models that score: what one has to offer, and how concurrent episodes reach it in batches.

    reward = BatchedReward(my_model, max_batch=32)

A `BatchScorer` turns finished episodes into numbers, many at a time. `BatchedReward` makes a reward function of it: it
gathers the episodes that are being scored at once, limits and repeats attempts, and of a batch that fails finds the
episodes at fault. Nothing is kept of an event loop after its last call.

Not known here: any model (`classifier_reward.py` is one) and the time limit of the whole, `task.reward_seconds`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from inspect import isawaitable
from numbers import Real
from typing import Any, Protocol

from agent_r1.errors import ConfigError
from agent_r1.guard import TimedOut, describe, guarded
from agent_r1.rollout.rewards.attempts import Attempts, OutOfAttempts, PerLoop, ScoringError
from agent_r1.types import TaskRow, Trajectory

Item = tuple[TaskRow, Trajectory]


class BatchScorer(Protocol):
    """A model that scores. Raise TransientError (or a timeout or connection error) to be asked again.

    An attempt whose time is up is cancelled. The next one begins when it has ended: end when the model is free.
    """

    async def score(self, items: Sequence[Item]) -> Sequence[float | Exception]:
        """Per item, in order: a finite number, or the exception that this item alone failed with."""
        ...


@dataclass(frozen=True, slots=True)
class BatchedReward:
    """A reward function: concurrent calls reach the scorer together."""

    scorer: BatchScorer
    _: KW_ONLY
    max_batch: int = 32
    max_wait_seconds: float = 0.05  # for a batch to fill, after its first episode
    max_concurrent: int = 1  # batches at the scorer at once; the time of an attempt runs only then
    attempts: int = 3
    seconds_per_attempt: float = 8.0
    backoff_seconds: float = 0.5
    _queues: PerLoop[_Queue] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.scorer, type) or not callable(getattr(self.scorer, "score", None)):
            raise ConfigError(f"BatchedReward needs an object with a method score(items), got {self.scorer!r:.80}")
        whole = isinstance(self.max_batch, int) and isinstance(self.max_concurrent, int)
        if not (whole and self.max_batch >= 1 and self.max_concurrent >= 1 and self.max_wait_seconds >= 0):
            raise ConfigError(
                "BatchedReward needs max_batch and max_concurrent of at least 1, whole numbers, and max_wait_seconds "
                f"not negative: got {self.max_batch}, {self.max_concurrent} and {self.max_wait_seconds}"
            )
        patience = Attempts(self.attempts, self.seconds_per_attempt, self.backoff_seconds)
        object.__setattr__(self, "_queues", PerLoop(lambda: _Queue(self, patience), _Queue.close))

    async def __call__(self, row: TaskRow, trajectory: Trajectory) -> float:
        async with self._queues.use() as queue:
            return await queue.put((row, trajectory))


Waiting = tuple[Item, asyncio.Future[float]]


class _Queue:
    """The episodes of one event loop that wait for their batch, and the batches under way."""

    def __init__(self, settings: BatchedReward, patience: Attempts) -> None:
        self._settings = settings
        self._patience = patience
        self._gate = asyncio.Semaphore(settings.max_concurrent)
        self._waiting: list[Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def put(self, item: Item) -> float:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == self._settings.max_batch:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._settings.max_wait_seconds, self._send)
        return await future

    async def close(self) -> None:
        """Nobody waits any more: what is still under way was given up by all its episodes."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._running:
            task.cancel()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, batch: list[Waiting]) -> None:
        name = type(self._settings.scorer).__name__
        try:
            scored = await self._patience.run(lambda: self._attempt(batch), who=f"scorer {name}")
        except Exception as error:  # noqa: BLE001 (raised to the episodes at fault)
            batch = [(item, future) for item, future in batch if not future.done()]
            if len(batch) <= 1 or isinstance(error, OutOfAttempts):
                for _, future in batch:
                    _settle(future, error, name)
                return
        else:
            for future, score in scored:
                _settle(future, score, name)
            return
        # What will not pass may be the fault of one episode: halves of halves find it, and score the others.
        middle = len(batch) // 2
        await self._run(batch[:middle])
        await self._run(batch[middle:])

    async def _attempt(self, batch: list[Waiting]) -> list[tuple[asyncio.Future[float], Any]]:
        over = asyncio.Event()
        async with self._gate:
            wanted = [(item, future) for item, future in batch if not future.done()]  # the others ran out of time
            if not wanted:
                return []
            try:
                scores = await guarded(self._score([item for item, _ in wanted], over), seconds=self._patience.seconds)
            except TimedOut:
                await over.wait()  # cancelled, and perhaps still computing: nobody's time should run meanwhile
                raise
        # Of a dict the keys would be taken for scores, of a set any order.
        if isinstance(scores, Mapping | Set) or not hasattr(scores, "__len__"):
            raise ScoringError(f"score returned {type(scores).__name__} {scores!r:.80}; return a list of numbers")
        if len(scores) != len(wanted):
            raise ScoringError(f"{len(scores)} scores came back for a batch of {len(wanted)}; return one per episode")
        return [(future, score) for (_, future), score in zip(wanted, scores, strict=True)]

    async def _score(self, items: list[Item], over: asyncio.Event) -> Sequence[float | Exception]:
        try:
            running = self._settings.scorer.score(items)
            if not isawaitable(running):
                raise ScoringError("score is not async; write `async def score`, and asyncio.to_thread for what blocks")
            return await running
        finally:
            over.set()


def _settle(future: asyncio.Future[float], score: Any, name: str) -> None:
    if future.done():
        return
    if isinstance(score, Real) and math.isfinite(score):
        future.set_result(float(score))
    elif isinstance(score, Exception):
        failure = ScoringError(f"this episode could not be scored by {name}: {describe(score)}")
        future.set_exception(failure.with_traceback(score.__traceback__))
    else:
        wrong = f"scorer {name} returned {score!r:.80} for this episode; scores must be finite numbers"
        future.set_exception(ScoringError(wrong))
