"""Batching of concurrent calls: tools, rewards and the search server share this one implementation.

batcher = Batcher(score_all, max_items=32, max_wait=0.05)
score = await batcher.submit(episode)  # runs as score_all([episode, ...]) together with other callers' items
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

IDLE_ROUNDS = 5  # an episode needs a few rounds of the event loop to get from its observation to its next call


class Batcher(Generic[Item, Result]):
    """Runs items that are submitted concurrently as batches, in order of arrival. Belongs to one event loop.

    A batch is due when `max_items` are waiting or `max_wait` seconds after its first item; with `max_wait=0`, once the
    event loop has added no item for a few rounds. It starts when fewer than `max_concurrent` batches are running, with
    everything that waits by then. Items whose callers have been cancelled are dropped.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Awaitable[Sequence[Result]]],  # one result per item; an exception fails all callers
        *,
        max_items: int | None = None,
        max_wait: float = 0.0,
        max_concurrent: int | None = None,
    ) -> None:
        self._run = run
        self._max_items, self._max_wait = max_items or sys.maxsize, max_wait
        self._slots = asyncio.Semaphore(max_concurrent or sys.maxsize)
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds tasks only weakly
        self._starting = 0  # tasks that have not taken their items yet
        self.num_unanswered = 0

    @property
    def num_waiting(self) -> int:
        """Items that are not in a running batch yet."""
        return len(self._waiting)

    def submit(self, item: Item) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._count_answer)
        self._waiting.append((item, future))
        self.num_unanswered += 1
        self._schedule()
        return future

    def close(self) -> None:
        """Cancel running batches and all callers, including those whose items still wait."""
        self._stop_timer()
        for task in self._tasks:
            task.cancel()
        for _, future in self._waiting:
            future.cancel()

    def _count_answer(self, _: object) -> None:
        self.num_unanswered -= 1

    def _schedule(self) -> None:
        """Make sure that every waiting item belongs to a batch that will start."""
        unassigned = len(self._waiting) - self._starting * self._max_items
        if unassigned >= self._max_items:
            self._start()
        elif unassigned > 0 and self._timer is None:
            loop = asyncio.get_running_loop()
            if self._max_wait > 0:
                self._timer = loop.call_later(self._max_wait, self._start)
            else:
                self._timer = loop.call_soon(self._start_when_idle, len(self._waiting), 0)

    def _start_when_idle(self, num_seen: int, idle_rounds: int) -> None:
        idle_rounds = idle_rounds + 1 if len(self._waiting) == num_seen else 0
        if idle_rounds == IDLE_ROUNDS:
            self._start()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_soon(self._start_when_idle, len(self._waiting), idle_rounds)

    def _start(self) -> None:
        self._stop_timer()
        self._starting += 1
        task = asyncio.get_running_loop().create_task(self._run_batch())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run_batch(self) -> None:
        async with self._slots:
            self._starting -= 1
            batch = self._take()
            if not batch:
                return
            futures = [future for _, future in batch]
            try:
                results = await self._run([item for item, _ in batch])
                for future, result in zip(futures, results, strict=True):
                    if not future.done():
                        future.set_result(result)
            except Exception as error:  # noqa: BLE001 (raised to the callers)
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
            finally:  # only if this task was cancelled
                for future in futures:
                    future.cancel()

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while self._waiting and len(batch) < self._max_items:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch
