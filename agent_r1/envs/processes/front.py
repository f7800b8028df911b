"""`WorkerEnv`: what a flow sees of an env in another process. Everything it is asked for is its pool's to do."""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.hosting import Hosted
from agent_r1.types import Action, Observation, TaskRow, Transition

if TYPE_CHECKING:
    from agent_r1.envs.processes.pool import EnvPool


class WorkerEnv(AgentEnv):
    """An env in another process. `EnvPool.env` makes them, in classes that are called like the env's own."""

    def __init__(self, pool: EnvPool, hosted: Hosted) -> None:
        self._pool = pool
        self._hosted = hosted
        # If nobody closes it. May happen in any thread, so it is only noted.
        self._finalizer = weakref.finalize(self, pool.forgotten.append, hosted)
        self._finalizer.atexit = False

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """As of the last answer: before `reset` there are none."""
        return self._hosted.schemas

    async def reset(self, row: TaskRow) -> Observation:
        return await self._pool.play(self._hosted, row, Observation)

    async def step(self, action: Action) -> Transition:
        return await self._pool.play(self._hosted, action, Transition)

    async def close(self) -> None:
        """Waits for nothing: what the env still does about it is of no interest to the episode."""
        self._pool.leave(self._hosted)
        self._finalizer.detach()


@cache
def front_class(cls: type[AgentEnv]) -> type[WorkerEnv]:
    """With the name and the flags of the env's own class, for people who read logs and flows that ask."""
    flags = {"sees_ground_truth": cls.sees_ground_truth, "deterministic": cls.deterministic}
    return type(cls.__name__, (WorkerEnv,), flags)
