"""Scoring: outcome rewards for finished trajectories.

A reward is a function `reward(row, trajectory) -> float | dict`, sync or async. A dict names its components: "reward"
is trained on, the others are reported. A reward that raises, hangs or returns NaN fails its episode, not the run.

`rewards/` has rewards made of parts, reward models and judges.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.guard import TimedOut, call, explain, guarded, is_async, trace
from agent_r1.rollout.collect import with_failure
from agent_r1.types import Failure, Group, TaskRow, Trajectory

logger = logging.getLogger(__name__)

SYNC_THREADS = 4
MAX_CONCURRENT = 64

RewardValue = float | Mapping[str, float]
RewardFunction = Callable[[TaskRow, Trajectory], RewardValue | Awaitable[RewardValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scores finished episodes with the reward of the task, with a time limit for each."""

    reward: RewardFunction
    timeout: float  # seconds per trajectory, from the moment its turn comes
    max_concurrent: int = MAX_CONCURRENT

    async def __call__(self, groups: Sequence[Group], gate: asyncio.Semaphore | None = None) -> list[Group]:
        """Return the groups with outcome rewards; trajectories that failed earlier stay as they are.

        Calls that overlap share a `gate`.
        """
        gate = gate or self.gate()
        return list(await asyncio.gather(*(self._score_group(group, gate) for group in groups)))

    def gate(self) -> asyncio.Semaphore:
        """Return a semaphore that limits how many rewards are computed at once."""
        # Sync rewards share the interpreter: with more threads they would only use up each other's time.
        return asyncio.Semaphore(self.max_concurrent if is_async(self.reward) else SYNC_THREADS)

    async def _score_group(self, group: Group, gate: asyncio.Semaphore) -> Group:
        scored = await asyncio.gather(*(self._score(group.row, trajectory, gate) for trajectory in group.trajectories))
        return replace(group, trajectories=list(scored))

    async def _score(self, row: TaskRow, trajectory: Trajectory, gate: asyncio.Semaphore) -> Trajectory:
        if trajectory.stop.is_failure:
            return trajectory
        name = getattr(self.reward, "__name__", type(self.reward).__name__)
        try:
            async with gate:
                value = await guarded(call(self.reward, row, trajectory), seconds=self.timeout)
            components = named_components(value)
        except TimedOut:
            message = f"reward {name!r} did not return within {self.timeout:g} s"
            return with_failure(trajectory, Failure(kind="timeout", message=message))
        except Exception as error:  # noqa: BLE001 (user code: any failure is this episode's, and is logged)
            logger.error("reward %s failed on %s\n%s", name, trajectory.trajectory_id, trace(error))
            return with_failure(trajectory, explain(error, f"reward {name!r}"))
        return replace(trajectory, outcome_reward=components["reward"], reward_components=components)


def named_components(value: Any) -> dict[str, float]:
    """Return the result of a reward as finite floats by name; a plain number is the component "reward"."""
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in named:
        raise ValueError(f"a dict of components needs the key 'reward', which is trained on; got {sorted(named)}")
    checked: dict[str, float] = {}
    for key, part in named.items():
        if not isinstance(part, Real) or not math.isfinite(part):  # numpy's scalars are Real
            raise ValueError(f"component {key!r} is {part!r:.80}; rewards must be finite numbers")
        checked[str(key)] = float(part)
    return checked


def check_reward_signature(reward: Any, name: str) -> None:
    """Raise ConfigError before the run if a reward cannot be called with (row, trajectory)."""
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is {reward!r}, not a function (row, trajectory) -> float")
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"reward {name!r} must accept (row, trajectory): {error}") from error
