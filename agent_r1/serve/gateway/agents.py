"""The user's agent: a function of the recipe, or a program (`command.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agent_r1.errors import RolloutError
from agent_r1.guard import blame, call
from agent_r1.rollout.scoring import named_components
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.types import TaskRow

KeepLog = Callable[[str], None]


class AgentFailed(RolloutError):
    """The agent died, or left something that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an agent ended."""

    result: Any = None  # the return value of a function, or the stdout of a program
    reward: dict[str, float] | None = None  # reward by component, if the agent gave one
    failure: Exception | None = None


class Agent(Protocol):
    async def play(self, row: TaskRow, client: ClientSettings, keep_log: KeepLog) -> Ended:
        """Let the agent solve one row. Cancelled at the episode's deadline; what it wrote is kept even then."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAgent:
    """A function `agent(row, client)`, sync (in a thread) or async. A number that it returns is the reward."""

    function: Callable[[TaskRow, ClientSettings], Any]
    name: str

    async def play(self, row: TaskRow, client: ClientSettings, keep_log: KeepLog) -> Ended:
        try:
            result = await call(self.function, row, client)
        except Exception as error:  # noqa: BLE001 (user code; the flow decides what becomes of the episode)
            blame(error, f"agent {self.name!r}")
            return Ended(failure=error)
        return Ended(result=result, reward=_reward_in(result))


def _reward_in(result: Any) -> dict[str, float] | None:
    """A number, or a dict with the key "reward"; True and False are answers, not rewards."""
    is_number = isinstance(result, int | float) and not isinstance(result, bool)
    return named_components(result) if is_number or (isinstance(result, dict) and "reward" in result) else None
