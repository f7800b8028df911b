"""What a client asked and what it is told, whatever the wire format. The dialects translate.

body --dialect.read--> Request --Session.answer--> Answer --dialect.write--> body or events
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_r1.types import Message

Finish = Literal["stop", "tool_calls", "length"]


class ApiError(Exception):
    """An answer that refuses. Each dialect has its own form of it."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call, as a session reads it."""

    # Roles system, user, assistant, tool; texts or lists of parts; calls as in chat completions.
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": {...}}
    max_tokens: int | None = None
    stop_texts: tuple[str, ...] = ()
    wants_logprobs: bool = False
    one_call: bool = False  # the client takes at most one call per answer
    model: str = ""
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of the dialect, for its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call that the client is to run."""

    call_id: str
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the policy said, for the client."""

    answer_id: str
    created: int  # Unix time
    content: str  # without calls and thinking
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: Finish = "stop"
    stop_text: str | None = None  # the client's stop text that ended it
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: tuple[tuple[str, float], ...] = ()  # text and log-prob of each, if the client wants them
