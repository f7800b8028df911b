"""Context policies: what of a conversation the model sees before each action.

An env goes on giving complete conversations. A policy turns each into what is shown, the flow renders that, and what is
recorded is, as always, the exact ids shown and sampled. To show everything, and only ever add to it, needs no policy.

    Window        the head and the last exchanges
    DropResults   everything, with a placeholder for older results
    Notes         the head, those of the earlier exchanges that bear on the latest observation, the last exchanges
    Summary       the head, what the model itself wrote down about the rest, the last exchanges
    Rewrite       whatever a function makes of it

The head is all that comes before the first reply; an exchange is a reply with everything that was answered to it, so a
call is never shown without its results. Knows messages; tokens are counted, and summaries written, by the `Author` that
a policy is handed.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from agent_r1.agent.messages import is_from_tool
from agent_r1.agent.relevance import relevance
from agent_r1.errors import DataError
from agent_r1.types import Message

SUMMARY_TITLE = "What you wrote down about the conversation so far:"
NOTES_TITLE = "Notes from earlier in the conversation:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    messages: list[Message]
    hidden: int  # messages of the conversation that are not in there as they were


class Author(Protocol):
    """The model that plays, as a policy may use it."""

    def count_tokens(self, messages: list[Message]) -> int:
        """Tokens of the prompt that shows these messages."""
        ...

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        """Let it respond, in a step that is recorded and trained like any other but is no action."""
        ...


class ContextPolicy(ABC):
    """One object per episode."""

    async def prepare(self, messages: list[Message], author: Author) -> None:  # noqa: B027 (most need nothing)
        """Called once before each action, and only if it will be taken: the place to ask the model for something."""

    @abstractmethod
    async def show(self, messages: list[Message]) -> Shown:
        """What is shown of this conversation. The messages given are left as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(ContextPolicy):
    turns: int  # here and below: 1 at least, or the latest observation would not be shown

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges = split(messages)
        left_out = _flat(exchanges[: -self.turns])
        return Shown(messages=head + messages[len(head) + len(left_out) :], hidden=len(left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResults(ContextPolicy):
    keep: int  # exchanges whose results stay
    placeholder: str

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges = split(messages)
        before = len(head) + len(_flat(exchanges[: -self.keep]))
        shown = [*head, *map(self._without_result, messages[len(head) : before]), *messages[before:]]
        return Shown(messages=shown, hidden=before - len(head) - len(exchanges[: -self.keep]))

    def _without_result(self, message: Message) -> Message:
        if message.get("role") == "assistant":
            return message
        as_parts = isinstance(message.get("content"), list)  # some templates take nothing else
        return {**message, "content": [_part(self.placeholder)] if as_parts else self.placeholder}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes(ContextPolicy):
    turns: int
    notes: int  # exchanges shown of those that left the window
    note_chars: int  # of each

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges = split(messages)
        left_out = exchanges[: -self.turns]
        if not left_out:
            return Shown(messages=messages, hidden=0)
        latest = "\n".join(map(_text, exchanges[-1][1:]))
        texts = ["\n".join(map(_line, exchange)) for exchange in left_out]
        scores = relevance(latest, texts)
        # Of equals the later ones: where nothing bears on the observation, the most recent is the best guess.
        best = sorted(range(len(texts)), key=lambda index: (scores[index], index))[-self.notes :]
        chosen = [f"[{index + 1}] {_cut(texts[index], self.note_chars)}" for index in sorted(best)]
        noted = with_text(head, "\n".join([NOTES_TITLE, *chosen]), from_tool=True)
        return Shown(messages=noted + _flat(exchanges[-self.turns :]), hidden=len(_flat(left_out)))


class Summary(ContextPolicy):
    """When the prompt outgrows `max_tokens`, the model is asked to write down what it needs; that then takes the place
    of all but the last exchanges, and of the summary before it. It is asked once per action at most, and only where
    there is something to be left out."""

    def __init__(self, *, max_tokens: int, summary_tokens: int, keep_turns: int, instruction: str) -> None:
        self._max_tokens = max_tokens
        self._summary_tokens = summary_tokens
        self._keep_turns = keep_turns
        self._instruction = instruction
        self._text = ""
        self._covered: list[Message] = []  # what the conversation began with, that the text stands for

    async def prepare(self, messages: list[Message], author: Author) -> None:
        head, exchanges = split(messages)
        covered = len(head) + len(_flat(exchanges[: -self._keep_turns]))
        shown = self._shown(messages)
        if covered <= max(len(head), len(self._covered)) or author.count_tokens(shown) <= self._max_tokens:
            return
        text = await author.write(with_text(shown, self._instruction), max_tokens=self._summary_tokens)
        self._text, self._covered = text.strip(), deepcopy(messages[:covered])

    async def show(self, messages: list[Message]) -> Shown:
        shown = self._shown(messages)
        hidden = max(0, len(self._covered) - len(split(messages)[0]))
        return Shown(messages=shown, hidden=hidden)

    def _shown(self, messages: list[Message]) -> list[Message]:
        if messages[: len(self._covered)] != self._covered:  # the env tells another story now
            self._text, self._covered = "", []
        if not self._covered:
            return messages
        head, _ = split(messages)
        # As if a tool had written it: it may quote one.
        begun = with_text(head, f"{SUMMARY_TITLE}\n{self._text}", from_tool=True) if self._text else head
        return begun + messages[len(self._covered) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite(ContextPolicy):
    function: Callable[[list[Message]], list[Message] | Awaitable[list[Message]]]

    async def show(self, messages: list[Message]) -> Shown:
        made = self.function(deepcopy(messages))
        shown = self._checked(await made if inspect.isawaitable(made) else made)
        kept = set(map(_as_json, shown))
        return Shown(messages=shown, hidden=sum(_as_json(message) not in kept for message in messages))

    def _checked(self, made: Any) -> list[Message]:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if not isinstance(made, list) or not made:
            raise DataError(f"rewrite {name!r} returned {made!r:.80}; it must return a list of at least one message")
        for message in made:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(
                    f"rewrite {name!r} returned {message!r:.80} among its messages; each is a dict with a role"
                )
            try:
                _as_json(message)
            except (TypeError, ValueError) as error:
                raise DataError(f"rewrite {name!r} returned a message that is not JSON: {error}") from error
        if made[-1]["role"] == "assistant":
            raise DataError(
                f"rewrite {name!r} returned messages that end with the assistant's; the next one is the model's"
            )
        return made


def split(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The head and the exchanges."""
    replies = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    bounds = [*replies, len(messages)]
    return messages[: bounds[0]], [messages[start:end] for start, end in pairwise(bounds)]


def with_text(messages: list[Message], text: str, *, from_tool: bool = False) -> list[Message]:
    """The messages and then `text`: in the last message if that is the user's, since many templates refuse two of them
    in a row, else in one of its own. `from_tool`: nothing in that message may become a control token."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        return [*messages, _marked({"role": "user", "content": text}, from_tool)]
    content = last.get("content")
    longer = [*content, _part(text)] if isinstance(content, list) else f"{content}\n\n{text}" if content else text
    return [*messages[:-1], _marked({**last, "content": longer}, from_tool)]


def _marked(message: Message, from_tool: bool) -> Message:
    return {**message, "from_tool": True} if from_tool and not is_from_tool(message) else message


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _flat(exchanges: Sequence[list[Message]]) -> list[Message]:
    return [message for exchange in exchanges for message in exchange]


def _line(message: Message) -> str:
    return f"{'You' if message.get('role') == 'assistant' else 'Then'}: {_text(message)}"


def _text(message: Message) -> str:
    """All that a message says, calls included."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or []]
    return " ".join(filter(None, [*said, *calls]))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _as_json(message: Message) -> str:
    return json.dumps(message, sort_keys=True)
