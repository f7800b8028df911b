"""Conversations for tests in which every prompt gets its response before the next."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.tokens.conversations import Conversations, Pending
from agent_r1.tokens.rendering import ToolSchemas
from agent_r1.types import Observation


class Talk(Conversations):
    pending: Pending

    def prompt(self, observation: Observation, tools: ToolSchemas = ()) -> list[int]:
        self.pending = self.begin(observation, tools)
        return self.pending.ids

    def record(self, response_ids: Sequence[int], text: str) -> None:
        self.finish(self.pending, response_ids, text)

    @property
    def extended(self) -> bool:
        return self.pending.earlier is not None
