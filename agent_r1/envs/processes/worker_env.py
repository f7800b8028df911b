"""`WorkerEnv`: the flow's proxy for an env in another process. The pool does the work."""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.hosts import HostedEnv
from agent_r1.types import Action, Observation, TaskRow, Transition

if TYPE_CHECKING:
    from agent_r1.envs.processes.pool import EnvPool


class WorkerEnv(AgentEnv):
    """An env in another process. `EnvPool.env` creates them, in classes with the name of the env's own."""

    def __init__(self, pool: EnvPool, hosted: HostedEnv) -> None:
        self._pool = pool
        self._hosted = hosted
        # If it is never closed. May run in any thread, so the pool closes it later.
        self._finalizer = weakref.finalize(self, pool.forgotten.append, hosted)
        self._finalizer.atexit = False

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas in the last answer; empty before `reset`."""
        return self._hosted.schemas

    async def reset(self, row: TaskRow) -> Observation:
        observation: Observation = await self._pool.play(self._hosted, "reset", row)
        return observation

    async def step(self, action: Action) -> Transition:
        transition: Transition = await self._pool.play(self._hosted, "step", action)
        return transition

    async def close(self) -> None:
        """Returns immediately; the worker closes the environment."""
        self._pool.leave(self._hosted)
        self._finalizer.detach()


@cache
def front_class(cls: type[AgentEnv]) -> type[WorkerEnv]:
    """Return a class with the name and flags of the env's own, for logs and flows."""
    flags = {"sees_ground_truth": cls.sees_ground_truth, "deterministic": cls.deterministic}
    return type(cls.__name__, (WorkerEnv,), flags)
