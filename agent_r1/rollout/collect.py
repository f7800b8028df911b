"""Collect: rows in, groups of finished trajectories out, with no turn barrier.

Every episode is a task and advances as soon as its tool returns. A failed episode keeps its cause and is never trained
on; `check_failures` stops the run when too many of a batch fail.

Not covered: code that blocks the event loop. Blocking tools run in threads (`guard.py`); environments that block belong
in worker processes (`envs/processes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, TypeVar

from agent_r1.engines.base import Sampler, Sampling
from agent_r1.envs.base import copy_row
from agent_r1.errors import RolloutError
from agent_r1.flows.budgets import EpisodeLimit, Limits
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.guard import CANCEL_SECONDS, TimedOut, explain, guarded, trace
from agent_r1.seeds import stable_seed
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Failure, Group, StopReason, TaskRow, Trajectory

logger = logging.getLogger(__name__)

OnEpisode = Callable[[Trajectory], None]
EpisodeKind = TypeVar("EpisodeKind", bound=Episode)


class RowQueue:
    """Rows to claim, each with a ticket: its position in the step or stream over all ranks.

    `next_ticket` returns `first`, `first` + 1, ... and never the same number twice, on whichever rank. By default, this
    process claims all rows.
    """

    def __init__(
        self,
        rows: Sequence[TaskRow],
        next_ticket: Callable[[], int] | None = None,
        share: int | None = None,  # rows that a process may hold at once, so that others get some too; None: no limit
        *,
        first: int = 0,
    ) -> None:
        tickets = count(first) if next_ticket is None else iter(next_ticket, None)
        own = takewhile(lambda ticket: ticket - first < len(rows), tickets)
        self._claims = ((ticket, rows[ticket - first]) for ticket in own)
        self.share = share

    def claim(self) -> tuple[int, TaskRow] | None:
        """Return the next ticket and its row, or None if no row is left."""
        return next(self._claims, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Plays rows with a flow. One object per purpose: training and evaluation differ in sampling and group size."""

    make_flow: Callable[[TaskRow], AgentFlowBase]
    sampler: Sampler
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    group_size: int
    max_concurrent: int = 1024
    role_sampling: Mapping[str, Sampling] = field(default_factory=dict)  # for roles that have their own settings

    async def __call__(self, rows: Sequence[TaskRow], *, seed: int, on_episode: OnEpisode | None = None) -> list[Group]:
        """Play all rows and return their groups in row order. Arguments as for `stream`."""
        groups = await self.claimed(RowQueue(rows), seed=seed, on_episode=on_episode)
        return [groups[position] for position in range(len(rows))]

    async def claimed(
        self, queue: RowQueue, *, seed: int, on_episode: OnEpisode | None = None, gate: asyncio.Semaphore | None = None
    ) -> dict[int, Group]:
        """Play the rows that this process claims and return their groups by ticket. Arguments as for `stream`."""
        finished = self.stream(queue, seed=seed, on_episode=on_episode, gate=gate)
        return {ticket: group async for ticket, group in finished}

    async def stream(
        self, queue: RowQueue, *, seed: int, on_episode: OnEpisode | None = None, gate: asyncio.Semaphore | None = None
    ) -> AsyncGenerator[tuple[int, Group], None]:
        """Yield (ticket, group) as soon as the last episode of a group has ended.

        Closing the generator ends the episodes that still run; use `contextlib.aclosing` to leave its loop early.
        `seed` fixes all sampling noise: the same rows, seed and weights give the same trajectories, whichever process
        plays them. Collectors that play at the same time share a `gate`, so that together they play `max_concurrent`
        episodes at once.
        """
        size, gate = self.group_size, gate or asyncio.Semaphore(self.max_concurrent)
        ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        running: dict[asyncio.Task[Trajectory], None] = {}  # in the order in which they were created
        groups: dict[asyncio.Task[Group], int] = {}

        async def play(row: TaskRow, index: int) -> Trajectory:
            attempt = index % size
            async with gate:
                name = f"{row.row_id}#{attempt}@{seed:x}.{index}"
                episode = self.episode(Episode, name, stable_seed(seed, index, row.row_id, attempt))
                trajectory = await self.play(row, episode)
            if on_episode is not None:
                on_episode(trajectory)
            return trajectory

        async def finish(row: TaskRow, episodes: list[asyncio.Task[Trajectory]]) -> Group:
            return Group(row=row, trajectories=await asyncio.gather(*episodes))

        def start() -> None:
            """Claim rows while there is room for them."""
            while self._has_room(queue, len(running)) and (claimed := queue.claim()) is not None:
                ticket, row = claimed
                episodes = [asyncio.create_task(play(row, ticket * size + attempt)) for attempt in range(size)]
                group = asyncio.create_task(finish(row, episodes))
                running.update(dict.fromkeys(episodes))
                groups[group] = ticket
                for task in (*episodes, group):
                    task.add_done_callback(ended.put_nowait)

        try:
            start()
            while groups:
                task = await ended.get()
                running.pop(task, None)
                if task in groups:
                    yield groups.pop(task), await task
                start()
        finally:
            await _end(list(running))

    def _has_room(self, queue: RowQueue, running: int) -> bool:
        """Whether to claim another row: always without a limit, otherwise only if its first episode could start now."""
        if queue.share is None or running == 0:
            return True
        return running < self.max_concurrent and running + self.group_size <= queue.share * self.group_size

    def episode(self, kind: type[EpisodeKind], episode_id: str, seed: int) -> EpisodeKind:
        """Create an episode with this collector's engine, sampling and limits, for `play`."""
        return kind(
            episode_id=episode_id,
            sampler=self.sampler,
            sampling=self.sampling,
            renderer=self.renderer,
            limits=self.limits,
            seed=seed,
            role_sampling=self.role_sampling,
        )

    async def play(self, row: TaskRow, episode: Episode) -> Trajectory:
        """Run the row's flow until it ends or fails, then close the episode. The flow gets its own copy of the row."""
        started, started_at = time.perf_counter(), time.time()
        try:
            stop, failure = await self._outcome(row, episode)
        finally:
            self.sampler.release(episode.episode_id)
            await episode.close()  # code left behind must not sample any more
        return Trajectory(
            row_id=row.row_id,
            trajectory_id=episode.episode_id,
            steps=list(episode.steps),
            stop=stop,
            failure=failure,
            started=started_at,
            seconds=time.perf_counter() - started,
            next_prompt_ids=episode.unanswered.ids,
            next_pictures=episode.unanswered.media,
            opening=episode.opening,
            counts=dict(episode.counts),
            log=episode.log,
        )

    async def _outcome(self, row: TaskRow, episode: Episode) -> tuple[StopReason, Failure | None]:
        """Run the flow and return why the episode ended, with the cause if it failed."""
        try:
            who, stop = await guarded(self._run(copy_row(row), episode), seconds=self.limits.episode_seconds)
        except EpisodeLimit as reached:
            who, stop, episode.limit = "", reached.stop, reached
        except TimedOut as late:
            return _failed("timeout", f"the episode was {late} (rollout.episode_seconds)", StopReason.TIMEOUT)
        except Exception as error:  # noqa: BLE001 (user code: any failure is this episode's, and is logged)
            failure = explain(error)
            logger.error("episode %s failed: %s\n%s", episode.episode_id, failure, trace(error))
            return StopReason.ERROR, failure
        if not isinstance(stop, StopReason):  # flows are written by users
            return _failed("no stop reason", f"the flow returned {type(stop).__name__} instead of a StopReason")
        if stop.is_failure:  # the flow or env reported a failure without raising
            return _failed("reported failure", episode.fault or f"{who}.run returned StopReason.{stop.name}", stop)
        limit = episode.limit  # the flow may have caught it and sampled nothing more
        if not episode.steps and limit is not None:
            return _failed("nothing sampled", f"nothing was sampled: {limit}")
        if not episode.steps:
            return _failed("no model call", "the flow ended without a single model call")
        return stop if limit is None else limit.stop, None

    async def _run(self, row: TaskRow, episode: Episode) -> tuple[str, StopReason]:
        """Create and run the row's flow, both user code; return its name and its stop reason."""
        flow = self.make_flow(row)
        episode.roles = flow.roles
        return type(flow).__name__, await flow.run(row, episode)


def _failed(kind: str, message: str, stop: StopReason = StopReason.ERROR) -> tuple[StopReason, Failure]:
    return stop, Failure(kind=kind, message=message)


async def _end(tasks: Sequence[asyncio.Task[Trajectory]]) -> None:
    """Cancel running episodes and wait a bounded time, so that every episode can close its environment."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        if not task.cancelling():  # a second cancel would interrupt its cleanup
            task.cancel()
    if running:
        await asyncio.wait(running, timeout=2 * CANCEL_SECONDS)


def check_failures(groups: Iterable[Group], max_error_fraction: float) -> None:
    """Raise RolloutError with the most common cause if more than `max_error_fraction` of all episodes failed."""
    played = [t for group in groups for t in (*group.trajectories, group.greedy) if t is not None]
    failed = [trajectory for trajectory in played if trajectory.stop.is_failure]
    if too_many(failed, played, max_error_fraction):
        failure, count = most_common_failure(failed)
        raise RolloutError(
            f"{len(failed)} of {len(played)} episodes failed (rollout.max_error_fraction is "
            f"{max_error_fraction:g}); most common cause, {count} times: {failure}"
        )


def too_many(failed: Sized, played: Sized, max_error_fraction: float) -> bool:
    return len(failed) > max_error_fraction * len(played)


def most_common_failure(failed: Iterable[Trajectory]) -> tuple[Failure, int]:
    """Return the first failure with the most common cause, and how many share that cause."""
    failures = [each.failure or Failure(kind=each.stop.value, message=each.stop.value) for each in failed]
    [(key, count)] = Counter(failure.key for failure in failures).most_common(1)
    return next(failure for failure in failures if failure.key == key), count


def with_failure(trajectory: Trajectory, failure: Failure) -> Trajectory:
    """Return a finished trajectory as failed, because its reward could not be computed."""
    return replace(trajectory, stop=StopReason.ERROR, failure=failure)
