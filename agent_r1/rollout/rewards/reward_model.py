"""Reward models: concurrent episodes reach a model in batches.

    reward = BatchedReward(my_model, max_batch=32)

A `BatchScorer` turns finished episodes into numbers, many at a time; `classifier.py` has one. `BatchedReward` makes it
a reward function: it batches episodes, limits and repeats attempts, and finds the episodes that make a batch fail.
`task.reward_seconds` limits everything together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Protocol

from agent_r1.batching import Batcher
from agent_r1.errors import ConfigError, at_least
from agent_r1.guard import TimedOut, describe, guarded, is_async
from agent_r1.rollout.rewards.attempts import Attempts, OutOfAttempts, PerLoop, ScoringError
from agent_r1.types import TaskRow, Trajectory

Item = tuple[TaskRow, Trajectory]


class BatchScorer(Protocol):
    """A model that scores. Raise TransientError, or a timeout or connection error, to be asked again.

    An attempt that runs out of time is cancelled; the retry starts once it has stopped.
    """

    async def score(self, items: Sequence[Item]) -> Sequence[float | Exception]:
        """Return, per item, a finite number or the exception that this item failed with."""
        ...


@dataclass(frozen=True, slots=True)
class BatchedReward:
    """A reward function whose concurrent calls reach the scorer together."""

    scorer: BatchScorer
    _: KW_ONLY
    max_batch: int = 32
    max_wait_seconds: float = 0.05  # time for a batch to fill, after its first episode
    max_concurrent: int = 1  # batches at the scorer at once; waiting for one does not count as an attempt's time
    attempts: int = 3
    seconds_per_attempt: float = 8.0
    backoff_seconds: float = 0.5
    _attempts: Attempts = field(init=False, repr=False, compare=False)
    _batchers: PerLoop[Batcher[Item, float | Exception]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.scorer, type) or not is_async(getattr(self.scorer, "score", None)):
            raise ConfigError(
                "BatchedReward needs an object with a method `async def score(self, items)`, which may run blocking "
                f"code in asyncio.to_thread; got {self.scorer!r:.80}"
            )
        at_least(1, "BatchedReward", max_batch=self.max_batch, max_concurrent=self.max_concurrent)
        at_least(0, "BatchedReward", max_wait_seconds=self.max_wait_seconds)
        attempts = Attempts(self.attempts, self.seconds_per_attempt, self.backoff_seconds)
        object.__setattr__(self, "_attempts", attempts)
        object.__setattr__(self, "_batchers", PerLoop(self._make_batcher, _close))

    def _make_batcher(self) -> Batcher[Item, float | Exception]:
        return Batcher(
            self._score,
            max_items=self.max_batch,
            max_wait=self.max_wait_seconds,
            max_concurrent=self.max_concurrent,
        )

    async def __call__(self, row: TaskRow, trajectory: Trajectory) -> float:
        async with self._batchers.use() as batcher:
            score = await batcher.submit((row, trajectory))
        if isinstance(score, Exception):
            raise score
        return score

    async def _score(self, items: list[Item]) -> list[float | Exception]:
        """Score a batch. If it fails for good, score its halves to find the episode at fault."""
        name = type(self.scorer).__name__
        try:
            scores = await self._attempts.run(lambda: self._attempt(items), name=f"scorer {name}")
        except Exception as error:  # noqa: BLE001 (raised to the episodes at fault)
            if len(items) > 1 and not isinstance(error, OutOfAttempts):
                middle = len(items) // 2
                return [*await self._score(items[:middle]), *await self._score(items[middle:])]
            scores = [error] * len(items)
        return [_check(score, name) for score in scores]

    async def _attempt(self, items: list[Item]) -> Sequence[float | Exception]:
        ended = asyncio.Event()
        try:
            scores = await guarded(self._ask(items, ended), seconds=self.seconds_per_attempt)
        except TimedOut:
            await ended.wait()  # a cancelled scorer may still be computing: the next attempt's time must not run yet
            raise
        # The keys of a dict are not scores, and a set has no order.
        if isinstance(scores, Mapping | Set) or not hasattr(scores, "__len__"):
            raise ScoringError(f"score returned {type(scores).__name__} {scores!r:.80}; return a list of numbers")
        if len(scores) != len(items):
            raise ScoringError(f"{len(scores)} scores came back for a batch of {len(items)}; return one per episode")
        return scores

    async def _ask(self, items: list[Item], ended: asyncio.Event) -> Sequence[float | Exception]:
        try:
            return await self.scorer.score(items)
        finally:
            ended.set()


async def _close(batcher: Batcher[Item, float | Exception]) -> None:
    batcher.close()


def _check(score: Any, name: str) -> float | Exception:
    if isinstance(score, Real) and math.isfinite(score):
        return float(score)
    if isinstance(score, Exception):
        ours = isinstance(score, ScoringError)
        text = str(score) if ours else f"{name} could not score this episode: {describe(score)}"
        # A new one for each episode: the traceback of a shared exception grows with every raise.
        return ScoringError(text).with_traceback(score.__traceback__)
    return ScoringError(f"{name} returned {score!r:.80} for this episode; scores must be finite numbers")
