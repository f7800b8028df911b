"""The asynchronous training loop: episodes go on while the learner updates.

    tickets -> groups played and scored -> the oldest that are ready -> credit, update (in a thread) -> weights swapped

Responses that are being sampled when weights change continue with the new ones; every token knows its version. At most
(1 + max_staleness) steps' worth of groups are open at a time, and a group with a token older than `max_staleness`
versions is dropped. With `max_staleness=0`, a step trains on what `loop.py` would train on.

An evaluation has the engine to itself: the groups being played end first, and new ones start after it.

Several ranks claim tickets from one counter. Whenever enough groups have arrived on all of them together, they exchange
these, so that all know the same groups, take the same ones, and update as one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agent_r1.guard import call
from agent_r1.learn.rewards import is_valid
from agent_r1.train.async_trainer import AsyncTrainer
from agent_r1.train.evaluate import in_order
from agent_r1.train.loop import Schedule
from agent_r1.train.tickets import Fate, oldest_version, staleness_metrics
from agent_r1.types import Group

POLL_SECONDS = 0.02  # between checks for groups that arrived on other ranks
MANY = 2**40  # more groups than any rank waits for


@dataclass(kw_only=True)
class Rollout:
    """Keeps groups in play and hands out those that are ready."""

    parts: AsyncTrainer
    steps: int  # steps of the run: no group starts that no step would train on
    max_staleness: int
    dropped: dict[int, Group] = field(default_factory=dict)  # groups dropped since the last batch
    _playing: dict[int, asyncio.Task[Group]] = field(default_factory=dict)
    _arrived: dict[int, Group] = field(default_factory=dict)
    _ready: dict[int, Group] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _exchanged: int = 0  # groups of all ranks that arrived and were exchanged
    _claimed: int | None = None  # a start that this rank has claimed and that has to wait
    _error: BaseException | None = None
    _fruitless: int = 0  # groups dropped since the last batch although they were fresh
    _stopped: bool = False

    def __post_init__(self) -> None:
        self.crew = self.parts.crew
        self._claim, self._announce = self.crew.counter(), self.crew.counter()

    async def take(self, version: int) -> dict[int, Group]:
        """Wait for the groups of a step; `version` is the policy before it. Oldest tickets first."""
        wanted, self.dropped, self._fruitless = self.parts.rows_per_step, {}, 0
        while True:
            self._sort(version)
            considered = len(self._ready) + self._fruitless
            if len(self._ready) >= wanted or considered >= self.parts.max_rounds * wanted:
                break
            self.fill(version)
            # A single process looks at each group when it arrives, so that a dropped one is replaced at once.
            needed = wanted - len(self._ready) if self.crew.ranks.size > 1 else 1
            for arrived in await self.crew.all(self._arrivals(needed)):
                self._ready |= arrived
                self._exchanged += len(arrived)
        return {ticket: self._ready.pop(ticket) for ticket in sorted(self._ready)[:wanted]}

    async def _arrivals(self, needed: int) -> dict[int, Group]:
        """Wait for `needed` groups on all ranks together, and return this rank's groups."""
        alone = self.crew.ranks.size == 1
        while self._error is None and self._announce(0) - self._exchanged < needed:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if alone else POLL_SECONDS)
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _sort(self, version: int) -> None:
        """Drop groups that cannot be trained on. Groups that waited may have become too old since."""
        for ticket, group in sorted(self._ready.items()):
            fate = self._reason_to_drop(group, version)
            if fate is not None:
                self.parts.ledger.end(ticket, fate)
                self.dropped[ticket] = self._ready.pop(ticket)
                self._fruitless += fate != "stale"

    def _reason_to_drop(self, group: Group, version: int) -> Fate | None:
        oldest = oldest_version(group)
        if oldest is not None and version - oldest > self.max_staleness:
            return "stale"
        if self.parts.drops(group):
            return "uniform" if any(map(is_valid, group.trajectories)) else "failed"
        return None

    def fill(self, version: int) -> None:
        """Start as many groups as may be open, and on each rank at most its share of them."""
        if self._stopped:
            return
        ledger = self.parts.ledger
        most = min(1 + self.max_staleness, self.steps - version) * self.parts.rows_per_step
        limit, share = ledger.limit(most), self.crew.share(most)
        ledger.start(limit)  # other ranks claim the starts that this rank does not claim
        # No other rank can start what this rank has claimed. So this rank starts it, even if that exceeds its share,
        # which shrinks at the end.
        while self._claimed is not None or share is None or len(self._playing) < share:
            start = self._claim(1) - 1 if self._claimed is None else self._claimed
            self._claimed = start if start >= limit else None
            if start >= limit:
                return
            ticket = ledger.ticket(start)
            self._playing[ticket] = asyncio.create_task(self.parts.play(ticket))
            self._playing[ticket].add_done_callback(partial(self._arrive, ticket))

    def _arrive(self, ticket: int, task: asyncio.Task[Group]) -> None:
        del self._playing[ticket]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._arrived[ticket] = task.result()
            self._announce(1)
        else:
            self._error = self._error or error
            self._announce(MANY)  # releases other ranks, which wait for groups that will not come
        self._changed.set()

    async def drain(self) -> None:
        """Let all groups in play end."""
        while self._playing:
            await asyncio.wait(list(self._playing.values()))

    async def stop(self) -> None:
        """Cancel all groups in play and start no others. Their tickets stay open."""
        self._stopped = True
        for task in self._playing.values():
            task.cancel()
        await self.drain()


async def train_async(parts: AsyncTrainer, schedule: Schedule, *, max_staleness: int) -> int:
    """Run the steps of the schedule, until the time is up; return the last one, evaluated and saved."""
    crew, start = parts.crew, schedule.start
    time_is_up = schedule.start_clock(crew.ranks)
    rollout = Rollout(parts=parts, steps=schedule.steps, max_staleness=max_staleness)
    finished, updating, draining, evaluating = start, False, 0.0, 0.0
    last = start >= schedule.steps

    async def finish(step: int, groups: dict[int, Group], began: float) -> None:
        """Train on the groups and replace the weights."""
        nonlocal finished, updating, last
        updating, taken = True, time.perf_counter()
        credited, metrics = await call(parts.learn, list(groups.values()))
        updated = time.perf_counter()
        last = step == schedule.steps or time_is_up()
        if last:
            await rollout.stop()
        stopped = time.perf_counter()
        await parts.swap_weights(step)
        now = time.perf_counter()
        for ticket, group in groups.items():
            parts.ledger.end(ticket, "trained" if any(map(is_valid, group.trajectories)) else "failed")
        metrics |= {"time/collect": now - began, "time/wait": taken - began, "time/update": updated - taken}
        metrics |= {"time/paused": evaluating + now - stopped} | parts.ledger.metrics
        metrics |= staleness_metrics(list(groups.values()), step - 1)
        played = in_order([groups, rollout.dropped])
        parts.report(step, played, credited, metrics)
        parts.ledger.commit()
        finished, updating = step, False
        parts.tell(step, played, metrics)

    try:
        while not last:
            began = time.perf_counter() - draining
            groups = await rollout.take(finished)
            parts.check(in_order([groups, rollout.dropped]))
            await _complete(finish(finished + 1, groups, began), rollout.stop)
            draining = evaluating = 0.0
            if finished % schedule.eval_every == 0 or last:
                began = time.perf_counter()
                await crew.all(rollout.drain())  # the step is finished: a stop while waiting here saves it
                drained = time.perf_counter()
                await parts.evaluate(finished)
                draining, evaluating = drained - began, time.perf_counter() - drained
                last = last or time_is_up()  # the evaluation may have used up the time
            if not last:
                rollout.fill(finished)
            if finished % schedule.save_every == 0 or last:
                await _complete(call(parts.save, finished), rollout.stop)
    except BaseException as error:  # save the last finished step, unless its weights have changed since
        await rollout.stop()
        if finished > start and not updating and crew.is_common(error):
            parts.save(finished)
        raise
    return finished


async def _complete(work: Coroutine[Any, Any, None], on_cancel: Callable[[], Awaitable[None]]) -> None:
    """Await `work` to its end. If this is cancelled meanwhile, the cancellation is raised afterwards."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await on_cancel()
        await asyncio.wait([task])
        task.result()
        raise
