"""Scoring: outcome rewards for finished trajectories.

A reward is a function `reward(row, trajectory) -> float | dict`, sync or async. A dict names its components; the one
called "reward" is what is trained on, the others are reported. A reward that raises, hangs or returns NaN fails its
own episode, loudly, and not the run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.agent.tool import call_with_timeout
from agent_r1.errors import ConfigError
from agent_r1.rollout.collect import with_failure
from agent_r1.types import Group, TaskRow, Trajectory

logger = logging.getLogger(__name__)

RewardValue = float | Mapping[str, float]
RewardFunction = Callable[[TaskRow, Trajectory], RewardValue | Awaitable[RewardValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    reward: RewardFunction
    timeout: float = 30.0  # seconds per trajectory

    async def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with outcome rewards filled in; trajectories that failed earlier are left as they are."""
        return list(await asyncio.gather(*(self._score_group(group) for group in groups)))

    async def _score_group(self, group: Group) -> Group:
        scored = await asyncio.gather(*(self._score(group.row, trajectory) for trajectory in group.trajectories))
        return replace(group, trajectories=list(scored))

    async def _score(self, row: TaskRow, trajectory: Trajectory) -> Trajectory:
        if trajectory.stop.is_failure:
            return trajectory
        name = getattr(self.reward, "__name__", "reward")
        try:
            value = await call_with_timeout(self.reward, (row, trajectory), timeout=self.timeout)
            components = _components(name, value)
        except TimeoutError:
            return with_failure(trajectory, f"reward {name!r} did not return within {self.timeout:g} s")
        except Exception as error:
            logger.exception("reward %s failed on %s", name, trajectory.trajectory_id)
            return with_failure(trajectory, f"reward {name!r} failed: {type(error).__name__}: {error}")
        return replace(trajectory, outcome_reward=components["reward"], reward_components=components)


def _components(name: str, value: Any) -> dict[str, float]:
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in named:
        raise ValueError(f"a dict of components needs the key 'reward' (what is trained on); got {sorted(named)}")
    checked: dict[str, float] = {}
    for key, part in named.items():
        if not isinstance(part, int | float) or not math.isfinite(part):
            raise ValueError(f"component {key!r} is {part!r}; rewards must be finite numbers")
        checked[str(key)] = float(part)
    return checked


def check_reward_signature(reward: Any, name: str) -> None:
    """Say before the run, not after the first batch, that a reward cannot be called with (row, trajectory)."""
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is {reward!r}, not a function (row, trajectory) -> float")
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"reward {name!r} must accept (row, trajectory): {error}") from error
