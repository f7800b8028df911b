"""Context policies: what of a conversation the model sees before each action.

An env goes on giving complete conversations. A policy turns each into what is shown, the flow renders that, and what is
recorded is, as always, the exact ids shown and sampled. To show everything, and only ever add to it, needs no policy.

    Window        the head and the last exchanges
    DropResults   everything, with a placeholder for older results
    Notes         the head, those of the earlier exchanges that bear on the latest observation, the last exchanges
    Summary       the head, what the model itself wrote down about the rest, the last exchanges
    Rewrite       whatever a function makes of it

The head is the first observation, all of it; an exchange is a reply with everything that was answered to it, so a call
is never shown without its results. The exchange that ends with the question at hand, which in a chat is not the first,
is never left out. Knows messages; tokens are counted, and summaries written, by the `Author` that a policy is handed.
"""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

from agent_r1.errors import DataError
from agent_r1.flows.relevance import Index
from agent_r1.tokens.messages import is_from_tool
from agent_r1.types import Message

Exchange = list[Message]

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
    """One object per episode; in a chat, one per conversation."""

    _first = 0  # messages of the first observation; 0: not known, and the head ends at the first reply
    _asked = 0  # messages up to the end of the question at hand

    def begin(self, messages: list[Message]) -> None:
        """Called with the first observation of every episode, before anything else. A second episode is a next question
        in a conversation that goes on."""
        self._first = self._first or len(messages)
        self._asked = len(messages)

    async def prepare(self, messages: list[Message], author: Author) -> None:  # noqa: B027 (most need nothing)
        """Called once before each action, and only if it will be taken: the place to ask the model for something."""

    @abstractmethod
    async def show(self, messages: list[Message]) -> Shown:
        """What is shown of this conversation. The messages given are left as they are."""

    def divided(self, messages: list[Message], last: int) -> tuple[list[Message], list[Exchange], list[int]]:
        """The head, the exchanges, and which of these may be left out: all but the last and that of the question."""
        head, exchanges = split(messages, self._first)
        ends = list(accumulate(map(len, exchanges), initial=len(head)))[1:]
        asked = bisect_left(ends, self._asked) if self._asked > len(head) else None
        return head, exchanges, [index for index in range(len(exchanges) - last) if index != asked]


@dataclass(kw_only=True)
class Window(ContextPolicy):
    turns: int  # here and below: 1 at least, or the latest observation would not be shown

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges, old = self.divided(messages, self.turns)
        shown = head + _flat(_without(exchanges, old))
        return Shown(messages=shown, hidden=len(messages) - len(shown))


@dataclass(kw_only=True)
class DropResults(ContextPolicy):
    keep: int  # exchanges whose results stay
    placeholder: str

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges, old = self.divided(messages, self.keep)
        for index in old:
            reply, *results = exchanges[index]
            exchanges[index] = [reply, *map(self._without_result, results)]
        hidden = sum(len(exchanges[index]) - 1 for index in old)
        return Shown(messages=head + _flat(exchanges), hidden=hidden)

    def _without_result(self, message: Message) -> Message:
        as_parts = isinstance(message.get("content"), list)  # some templates take nothing else
        return {**message, "content": [_part(self.placeholder)] if as_parts else self.placeholder}


@dataclass(kw_only=True)
class Notes(ContextPolicy):
    turns: int
    notes: int  # exchanges shown of those that left the window
    note_chars: int  # of each
    _index: Index = field(default_factory=Index, init=False, repr=False, compare=False)

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges, old = self.divided(messages, self.turns)
        if not old:
            return Shown(messages=messages, hidden=0)
        texts = [_said(exchanges[index]) for index in old]
        self._index.hold(["\n".join(text) for text in texts])
        scores = self._index.scores("\n".join(map(_text, exchanges[-1][1:])))
        # Of equals the later ones: where nothing bears on the observation, the most recent is the best guess.
        best = sorted(range(len(old)), key=lambda place: (scores[place], place))[-self.notes :]
        chosen = [f"[{old[place] + 1}] {self._note(*texts[place])}" for place in sorted(best)]
        noted = with_text(head, "\n".join([NOTES_TITLE, *chosen]), from_tool=True)
        kept = _flat(_without(exchanges, old))
        return Shown(messages=noted + kept, hidden=len(messages) - len(head) - len(kept))

    def _note(self, reply: str, results: str) -> str:
        """Half of the room is for the reply and half for its results, and what one of them leaves is the other's."""
        half = self.note_chars // 2
        for_reply = max(half, self.note_chars - len(results))
        for_results = self.note_chars - min(len(reply), for_reply)
        return f"You: {_cut(reply, for_reply)}\nThen: {_cut(results, for_results)}"


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
        self._covered: dict[int, Exchange] = {}  # the exchanges that the text stands for, by their place

    async def prepare(self, messages: list[Message], author: Author) -> None:
        shown = (await self.show(messages)).messages
        _, exchanges, old = self.divided(messages, self._keep_turns)
        if self._covered.keys() >= set(old) or author.count_tokens(shown) <= self._max_tokens:
            return
        text = await author.write(with_text(shown, self._instruction), max_tokens=self._summary_tokens)
        self._text, self._covered = spoken(text), {index: deepcopy(exchanges[index]) for index in old}

    async def show(self, messages: list[Message]) -> Shown:
        head, exchanges, _ = self.divided(messages, self._keep_turns)
        if any(exchanges[index : index + 1] != [was] for index, was in self._covered.items()):
            self._text, self._covered = "", {}  # the env tells another story now
        if not self._covered:
            return Shown(messages=messages, hidden=0)
        # As if a tool had written it: it may quote one.
        begun = with_text(head, f"{SUMMARY_TITLE}\n{self._text}", from_tool=True) if self._text else head
        kept = _flat(_without(exchanges, self._covered))
        return Shown(messages=begun + kept, hidden=len(messages) - len(head) - len(kept))


@dataclass(kw_only=True)
class Rewrite(ContextPolicy):
    function: Callable[[list[Message]], list[Message] | Awaitable[list[Message]]]

    async def show(self, messages: list[Message]) -> Shown:
        made = self.function(deepcopy(messages))
        shown = self._checked(await made if inspect.isawaitable(made) else made)
        kept = set(map(_as_json, shown))
        return Shown(messages=shown, hidden=sum(_name(message) not in kept for message in messages))

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
            content = message.get("content")
            if not isinstance(content, str | list | tuple | None):
                raise DataError(f"rewrite {name!r} returned a message whose content is {content!r:.80}, not a text")
        if made[-1]["role"] == "assistant":
            raise DataError(
                f"rewrite {name!r} returned messages that end with the assistant's; the next one is the model's"
            )
        return made


def split(messages: list[Message], first: int = 0) -> tuple[list[Message], list[Exchange]]:
    """The head, which has the first messages at least, and the exchanges."""
    replies = [n for n, message in enumerate(messages) if n >= first and message.get("role") == "assistant"]
    bounds = [*replies, len(messages)]
    return messages[: bounds[0]], [messages[start:end] for start, end in pairwise(bounds)]


def spoken(text: str) -> str:
    """A reply without its reasoning, the beginning of which may stand in the prompt and the end be cut off."""
    thought, closed, rest = text.partition("</think>")
    said = rest if closed and "<think>" not in thought else text
    return re.sub(r"<think>.*?(</think>|\Z)", "", said, flags=re.DOTALL).strip()


def with_text(messages: list[Message], text: str, *, from_tool: bool = False) -> list[Message]:
    """The messages and then `text`: in the last message if that is the user's, since many templates refuse two of them
    in a row, else in one of its own. `from_tool`: nothing in that text may become a control token; what the message
    says already stays the ids it was."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        alone: Message = {"role": "user", "content": text}
        return [*messages, {**alone, "from_tool": True} if from_tool else alone]
    content = last.get("content")
    longer = [*content, _part(text)] if isinstance(content, list) else f"{content}\n\n{text}" if content else text
    before = last.get("from_tool")
    if isinstance(before, str) and isinstance(content, str):  # what was added before stays marked, too
        return [*messages[:-1], {**last, "content": longer, "from_tool": f"{before}\n\n{text}"}]
    mark = {"from_tool": text} if from_tool and not is_from_tool(last) else {}
    return [*messages[:-1], {**last, "content": longer, **mark}]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _flat(exchanges: Iterable[Exchange]) -> list[Message]:
    return [message for exchange in exchanges for message in exchange]


def _without(exchanges: list[Exchange], places: Collection[int]) -> list[Exchange]:
    left_out = set(places)
    return [exchange for index, exchange in enumerate(exchanges) if index not in left_out]


def _said(exchange: Exchange) -> tuple[str, str]:
    """The reply, and what was answered to it."""
    reply, *results = exchange
    return spoken(_text(reply)), "\n".join(map(_text, results))


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


def _name(message: Message) -> str | None:
    """None for a message that is not JSON, with an image in it, say: no rewrite can have returned it."""
    try:
        return _as_json(message)
    except (TypeError, ValueError):
        return None
