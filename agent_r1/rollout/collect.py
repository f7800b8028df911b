"""Collect: rows in, groups of finished trajectories out, with no turn barrier.

Every episode is its own task and advances as soon as its own tool returns. A failed episode is data: its error is kept
on the trajectory, it is never trained on, and only when too many of a batch fail does the run stop.

Not covered: code that blocks the event loop itself. Blocking tools run in threads (`agent/tool.py`); an env that must
block should do so in `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent_r1.agent.flow import AgentFlowBase, Episode, EpisodeLimit, Limits, stable_seed
from agent_r1.agent.rendering import Renderer
from agent_r1.agent.sampler import Sampler, Sampling
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.types import Group, StopReason, TaskRow, Trajectory

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 2.0  # how long a cancelled episode may take to clean up before it is abandoned
MAX_ERROR_CHARS = 2000

OnEpisode = Callable[[Trajectory], None]


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
    max_error_fraction: float = 0.5  # of one batch; more than this is a broken run, not bad luck

    async def __call__(self, rows: Sequence[TaskRow], *, seed: int, on_episode: OnEpisode | None = None) -> list[Group]:
        """`seed` fixes all sampling noise of the batch: the same rows, seed and weights give the same trajectories."""
        gate = asyncio.Semaphore(self.max_concurrent)
        attempts = [(row, attempt) for row in rows for attempt in range(self.group_size)]

        async def play(index: int, row: TaskRow, attempt: int) -> Trajectory:
            async with gate:
                episode_seed = stable_seed(seed, index, row.row_id, attempt)
                trajectory = await self._play(row, f"{row.row_id}#{attempt}@{seed:x}.{index}", episode_seed)
            if on_episode is not None:
                on_episode(trajectory)
            return trajectory

        tasks = [asyncio.create_task(play(i, row, attempt)) for i, (row, attempt) in enumerate(attempts)]
        try:
            played = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self._check_failures(played)
        size = self.group_size
        return [Group(row=row, trajectories=list(played[i * size : (i + 1) * size])) for i, row in enumerate(rows)]

    async def _play(self, row: TaskRow, episode_id: str, seed: int) -> Trajectory:
        episode = Episode(
            episode_id=episode_id,
            sampler=self.sampler,
            sampling=self.sampling,
            renderer=self.renderer,
            limits=self.limits,
            seed=seed,
        )
        started = time.perf_counter()
        stop, error = await self._outcome(row, episode)
        self.sampler.release(episode_id)
        return Trajectory(
            row_id=row.row_id,
            trajectory_id=episode_id,
            steps=list(episode.steps),
            stop=stop,
            error=error,
            seconds=time.perf_counter() - started,
        )

    async def _outcome(self, row: TaskRow, episode: Episode) -> tuple[StopReason, str | None]:
        """Why the episode ended. A task of its own, so that one that ignores cancellation can be left behind."""
        task = asyncio.create_task(_run_flow(self.make_flow, row, episode))
        try:
            await asyncio.wait({task}, timeout=self.limits.episode_seconds)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            limit = f"{self.limits.episode_seconds:g} s"
            return StopReason.TIMEOUT, f"the episode was not finished after {limit} (rollout.episode_seconds)"
        finally:
            task.cancel()

    def _check_failures(self, played: Sequence[Trajectory]) -> None:
        failed = [trajectory for trajectory in played if trajectory.stop.is_failure]
        if len(failed) > self.max_error_fraction * len(played):
            cause, count = Counter(trajectory.error for trajectory in failed).most_common(1)[0]
            raise RolloutError(
                f"{len(failed)} of {len(played)} episodes failed (rollout.max_error_fraction is "
                f"{self.max_error_fraction:g}); most common cause, {count} times: {cause}"
            )


async def _run_flow(
    make_flow: Callable[[TaskRow], AgentFlowBase], row: TaskRow, episode: Episode
) -> tuple[StopReason, str | None]:
    try:
        stop = await make_flow(row).run(row, episode)
    except EpisodeLimit as limit:
        return limit.stop, None
    except ConfigError:
        raise  # a wrong recipe is wrong for every row: stop the run with its message
    except (Exception, SystemExit) as error:  # a tool that calls exit() must not end the run
        logger.exception("episode %s failed", episode.episode_id)
        return StopReason.ERROR, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    if not isinstance(stop, StopReason):
        return StopReason.ERROR, f"the flow returned {stop!r} instead of a StopReason"
    if not episode.steps:
        return StopReason.ERROR, "the flow ended without a single model call"
    return stop, None


def with_failure(trajectory: Trajectory, error: str) -> Trajectory:
    """The trajectory as failed after the fact, for example by its reward function."""
    return replace(trajectory, stop=StopReason.ERROR, error=error[:MAX_ERROR_CHARS])
