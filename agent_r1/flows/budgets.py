"""The budgets of an episode, and the exception that is raised when one is used up."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.guard import Signal
from agent_r1.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The budgets of an episode."""

    max_steps: int  # actions
    max_response_tokens: int  # per step; a role may have a limit of its own
    max_context_tokens: int  # prompt plus response of one step
    episode_seconds: float


class EpisodeLimit(Signal):
    """Raised by `Episode.act` when a budget is used up. It ends the episode, but is not a failure."""

    def __init__(self, stop: StopReason, reason: str, *, setting: str = "") -> None:
        super().__init__(reason)
        self.stop = stop
        self.setting = setting  # the field of `Limits` that was reached
