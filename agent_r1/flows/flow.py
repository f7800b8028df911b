"""Flows: how one row becomes one trajectory.

A flow decides what the policy sees and when. The `Episode` it is given makes the model calls.

    AgentEnvLoop     reset, act, step, act, step ...: any `AgentEnv`, including `ToolEnv`
    SingleStepFlow   one prompt, one answer
    AgentFlowBase    anything else: several calls, branches, several agents
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

from agent_r1.envs.base import AgentEnv, reset_env
from agent_r1.flows.context import ContextPolicy
from agent_r1.flows.episode import Episode
from agent_r1.guard import guarded, trace
from agent_r1.registry import Registry
from agent_r1.types import Observation, StopReason, TaskRow

logger = logging.getLogger(__name__)

FlowClass = TypeVar("FlowClass", bound="type[AgentFlowBase]")

_FLOWS: Registry[type[AgentFlowBase]] = Registry("flow")
CLOSE_SECONDS = 5.0  # an env that does not close in this time is abandoned


class AgentFlowBase(ABC):
    """Everything between a row and its trajectory. Each episode gets its own flow object."""

    # Whether `run` passes `context=self.context` to `episode.act`. A class with its own `run` must set it again.
    uses_context: ClassVar[bool] = False
    uses_env: ClassVar[bool] = True  # False: settings of environments are refused
    roles: ClassVar[tuple[str, ...]] = ()  # roles that `episode.act(..., role=...)` may name
    context: ContextPolicy | None = None  # this episode's policy; None: everything is shown

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.roles, str):  # with a string, `role in roles` would match substrings
            raise TypeError(f"{cls.__name__}.roles must be a tuple: write roles = ({cls.roles!r},)")
        first = next(each for each in cls.__mro__ if {"run", "uses_context"} & vars(each).keys())
        if "uses_context" not in vars(first):  # the class, or a mixin, defines `run` without setting `uses_context`
            cls.uses_context = False

    def __init__(self, make_env: Callable[[TaskRow], AgentEnv]) -> None:
        self.make_env = make_env  # creates the recipe's env with this row's settings

    @abstractmethod
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        """Play one row with `await episode.act(observation)` and return why it ended."""

    @asynccontextmanager
    async def playing(self, row: TaskRow) -> AsyncIterator[tuple[AgentEnv, Observation]]:
        """`async with self.playing(row) as (env, observation)`: the row's env and its first observation.

        The env gets no ground truth unless it sets `sees_ground_truth`. It is always closed.
        """
        env = self.make_env(row)
        try:
            observation = await reset_env(env, row if env.sees_ground_truth else row.without_ground_truth())
            yield env, observation
        finally:
            try:
                if getattr(env.close, "__func__", None) is not AgentEnv.close:  # the default does nothing
                    await guarded(env.close(), seconds=CLOSE_SECONDS)
            except Exception as error:  # noqa: BLE001 (the episode has ended, and its outcome counts)
                logger.error("closing %s failed\n%s", type(env).__name__, trace(error))

    @staticmethod
    def register(*names: str) -> Callable[[FlowClass], FlowClass]:
        """Class decorator: make the flow available to recipes (`task.flow`) and rows (`agent_name`)."""

        def add(cls: FlowClass) -> FlowClass:
            for name in names:
                _FLOWS.add(name, cls)
            return cls

        return add


def flow_class(name: str) -> type[AgentFlowBase]:
    return _FLOWS[name]


@AgentFlowBase.register("single_step", "single_step_agent")
class SingleStepFlow(AgentFlowBase):
    """One prompt, one answer, no environment."""

    uses_env = False

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        await episode.act(Observation(messages=[dict(message) for message in row.prompt]))
        return StopReason.ANSWERED


@AgentFlowBase.register("agent_env_loop")
class AgentEnvLoop(AgentFlowBase):
    """The generic loop between the policy and an environment."""

    uses_context = True

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row) as (env, observation):
            while True:
                action = await episode.act(observation, tools=env.tool_schemas, context=self.context)
                transition = await episode.step(env, action)
                if transition.terminated:
                    return transition.stop
                assert transition.observation is not None  # Transition checks it
                observation = transition.observation
