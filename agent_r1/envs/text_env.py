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
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agent_r1.envs.base import AgentEnv
from agent_r1.types import (
    MAPPING,
    Action,
    Message,
    Observation,
    TaskRow,
    Transition,
    check_bool,
    check_reward,
    check_type,
)
from agent_r1.vision.contents import shown_content


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an environment."""

    text: str = ""  # shown to the policy next; after the end, kept in the trajectory
    images: Sequence[Any] = ()  # shown after the text: PIL images, arrays, bytes, paths or data URLs
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("Reply.text", self.text, str, "a string")
        check_type("Reply.images", self.images, list | tuple, "a list of pictures")
        check_reward("Reply.reward", self.reward)
        check_bool("Reply.done", self.done)
        check_type("Reply.info", self.info, MAPPING, "a dict")


class TextEnv(AgentEnv):
    """Implement `begin` and `reply`, sync or async. Code that blocks belongs in worker processes (`task.workers`)."""

    system: ClassVar[str] = ""  # system message; "" for none

    @abstractmethod
    def begin(self, row: TaskRow) -> str | Reply | Awaitable[str | Reply]:
        """Start the episode and return the first text, or a `Reply` with a text and pictures. Decides what the policy
        sees of the row's prompt."""

    @abstractmethod
    def reply(self, said: str) -> Reply | Awaitable[Reply]:
        """Answer the policy's text."""

    async def reset(self, row: TaskRow) -> Observation:
        shown = self.begin(row)
        first = await shown if inspect.isawaitable(shown) else shown
        source = f"what {type(self).__name__}.begin returns"
        check_type(source, first, str | Reply, "a string or a Reply")
        given = first if isinstance(first, Reply) else Reply(text=first)
        if given.reward or given.done or given.info:
            raise ValueError(f"{source} is shown before the first action: it has no reward, done or info")
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = shown_content(given.text, given.images, what=source)
        self._messages: list[Message] = [*system, {"role": "user", "content": content}]
        return Observation(messages=self._messages)

    async def step(self, action: Action) -> Transition:
        answered = self.reply(action.text)
        reply = answered if isinstance(answered, Reply) or not inspect.isawaitable(answered) else await answered
        check_type(f"what {type(self).__name__}.reply returns", reply, Reply, "a Reply")
        said = {"role": "assistant", "content": action.text}
        content = shown_content(reply.text, reply.images, what="a Reply")
        self._messages = [*self._messages, said, {"role": "user", "content": content}]
        return Transition(
            observation=None if reply.done else Observation.grown(self._messages, by=2),
            reward=reply.reward,
            terminated=bool(reply.done),
            feedback=reply.text,
            info=reply.info,
        )
