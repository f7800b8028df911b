"""Environments that talk: write the first text and the replies, and `TextEnv` keeps the conversation.

    class Echo(TextEnv):
        def begin(self, row):
            return "Say something."

        def reply(self, said):
            return Reply(text=f"You said {said!r}.", done=said == "bye", reward=1.0)

Knows messages, not tokens. The conversation only grows; a context policy (`flows/context.py`) may show less of it.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agent_r1.envs.base import AgentEnv
from agent_r1.types import (
    Action,
    Message,
    Observation,
    TaskRow,
    Transition,
    check_bool,
    check_reward,
    check_type,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an environment."""

    text: str = ""  # shown to the policy next; after the end, kept in the trajectory
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("Reply.text", self.text, str, "a text")
        check_reward("Reply.reward", self.reward)
        check_bool("Reply.done", self.done)
        check_type("Reply.info", self.info, Mapping, "a dict")


class TextEnv(AgentEnv):
    """Implement `begin` and `reply`, sync or async. Code that blocks belongs in worker processes (`task.workers`)."""

    system: ClassVar[str] = ""  # system message; "" for none

    @abstractmethod
    def begin(self, row: TaskRow) -> str | Awaitable[str]:
        """Start the episode and return the first text. Decides what the policy sees of the row's prompt."""

    @abstractmethod
    def reply(self, said: str) -> Reply | Awaitable[Reply]:
        """Answer what the policy said."""

    async def reset(self, row: TaskRow) -> Observation:
        shown = self.begin(row)
        first = await shown if inspect.isawaitable(shown) else shown
        check_type(f"what {type(self).__name__}.begin returns", first, str, "a text")
        system = [{"role": "system", "content": self.system}] if self.system else []
        self._messages: list[Message] = [*system, {"role": "user", "content": first}]
        return Observation(messages=self._messages)

    async def step(self, action: Action) -> Transition:
        answered = self.reply(action.text)
        reply = await answered if inspect.isawaitable(answered) else answered
        check_type(f"what {type(self).__name__}.reply returns", reply, Reply, "a Reply")
        said = {"role": "assistant", "content": action.text}
        self._messages = [*self._messages, said, {"role": "user", "content": reply.text}]
        return Transition(
            observation=None if reply.done else Observation.grown(self._messages, by=2),
            reward=reply.reward,
            terminated=bool(reply.done),
            feedback=reply.text,
            info=reply.info,
        )
