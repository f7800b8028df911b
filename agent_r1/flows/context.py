"""Context policies: what the model sees of a conversation before each action.

An env always gives the complete conversation. A policy chooses what to show of it, the flow renders that, and the exact
ids shown and sampled are recorded. Showing everything needs no policy.

    Window        the opening and the last exchanges
    DropResults   everything, with a placeholder for older results, or for their pictures if they have any
    Notes         the opening, the earlier exchanges most relevant to the latest observation, the last exchanges
    Summary       the opening, the model's own summary of the rest, the last exchanges
    Rewrite       whatever a function returns

The opening is the whole first observation. An exchange is a reply with everything that answered it, so a call is never
shown without its results. The exchange that ends with the current question of a chat is never left out. Policies work
on messages; a `Writer` counts tokens and writes summaries for them.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol

from agent_r1.errors import DataError
from agent_r1.tokens.control_tokens import is_from_tool
from agent_r1.types import Message, Observation
from agent_r1.vision.pictures import is_image

Exchange = list[Message]
CountWords = Callable[[str], Counter[str]]

SUMMARY_TITLE = "What you wrote down about the conversation so far:"
NOTES_TITLE = "Notes from earlier in the conversation:"

# How relevant an exchange is, by the words it shares with a query (BM25).
K1, B = 1.5, 0.75  # the usual values: how fast a repeated word stops counting, and how much long texts are held back
MAX_CHARS, MAX_QUERY_CHARS = 20_000, 4_000  # the rest is ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """The part of a conversation that the model is shown."""

    messages: list[Message]
    hidden: int  # messages of the conversation that are left out or changed


class Writer(Protocol):
    """The model that plays, as a policy may use it."""

    def count_tokens(self, messages: list[Message]) -> int:
        """Count the tokens of the prompt that shows these messages."""
        ...

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        """Sample a response that is recorded and trained like any step, but is not an action."""
        ...


class ContextPolicy(ABC):
    """One object per episode; in a chat, one per conversation."""

    _opening_size = 0  # messages of the first observation; 0: unknown, and the opening ends at the first reply
    _question_end = 0  # messages up to the end of the current question

    def begin(self, messages: list[Message]) -> None:
        """Called first, with the first observation of an episode. In a chat, each later call is the next question."""
        self._opening_size = self._opening_size or len(messages)
        self._question_end = len(messages)

    async def prepare(self, messages: list[Message], writer: Writer) -> None:  # noqa: B027 (most need nothing)
        """Called once before each action, only if one will follow. The policy may have `writer` generate text."""

    @abstractmethod
    async def show(self, messages: list[Message]) -> ContextView:
        """Choose what to show. Must not change the messages."""

    def _split(self, messages: list[Message], keep: int) -> tuple[list[Message], list[Exchange], list[int]]:
        """The opening, the exchanges, and the indices of those that may be left out: all but the last `keep` and the
        one that ends with the current question."""
        opening, exchanges = split_exchanges(messages, self._opening_size)
        ends = list(accumulate(map(len, exchanges), initial=len(opening)))[1:]
        question = bisect_left(ends, self._question_end) if self._question_end > len(opening) else None
        return opening, exchanges, [index for index in range(len(exchanges) - keep) if index != question]


@dataclass(kw_only=True)
class Window(ContextPolicy):
    """Shows the opening and the last exchanges."""

    turns: int  # at least 1 here and below, or the latest observation would not be shown

    async def show(self, messages: list[Message]) -> ContextView:
        opening, exchanges, old = self._split(messages, self.turns)
        shown = opening + _flatten(exchanges, without=old)
        return ContextView(messages=shown, hidden=len(messages) - len(shown))


@dataclass(kw_only=True)
class DropResults(ContextPolicy):
    """Shows all replies, and a placeholder for the results of earlier exchanges."""

    keep: int  # exchanges that keep their results
    placeholder: str

    async def show(self, messages: list[Message]) -> ContextView:
        opening, exchanges, old = self._split(messages, self.keep)
        for index in old:
            reply, *results = exchanges[index]
            exchanges[index] = [reply, *map(self._drop_result, results)]
        hidden = sum(len(exchanges[index]) - 1 for index in old)
        return ContextView(messages=opening + _flatten(exchanges), hidden=hidden)

    def _drop_result(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return {**message, "content": self.placeholder}
        dropped = _text_part(self.placeholder)
        if not any(map(is_image, content)):
            return {**message, "content": [dropped]}  # some templates only accept a list of parts
        # Keep the text beside a picture: it is the caption, and takes few tokens.
        return {**message, "content": [dropped if is_image(part) else part for part in content]}


@dataclass(kw_only=True)
class Notes(ContextPolicy):
    """Shows the last exchanges, and notes of those earlier ones that have most to do with the latest."""

    turns: int
    notes: int  # earlier exchanges to show
    note_chars: int  # maximum characters of each exchange
    # Every later step counts the words of the same texts.
    _count_words: CountWords = field(default_factory=lambda: cache(count_words), init=False, repr=False, compare=False)

    async def show(self, messages: list[Message]) -> ContextView:
        opening, exchanges, old = self._split(messages, self.turns)
        if not old:
            return ContextView(messages=messages, hidden=0)
        texts = [_exchange_texts(exchanges[index]) for index in old]
        observation = "\n".join(map(_message_text, exchanges[-1][1:]))
        scores = score_texts(observation, [self._count_words("\n".join(text)) for text in texts])
        # Later exchanges win ties: if nothing is relevant, the most recent is the best guess.
        best = sorted(range(len(old)), key=lambda place: (scores[place], place))[-self.notes :]
        chosen = [f"[{old[place] + 1}] {self._note(*texts[place])}" for place in sorted(best)]
        noted = append_text(opening, "\n".join([NOTES_TITLE, *chosen]), from_tool=True)
        kept = _flatten(exchanges, without=old)
        return ContextView(messages=noted + kept, hidden=len(messages) - len(opening) - len(kept))

    def _note(self, reply: str, results: str) -> str:
        """Reply and results get half of the room each; what one does not need, the other may use."""
        for_reply = max(self.note_chars // 2, self.note_chars - len(results))
        for_results = self.note_chars - min(len(reply), for_reply)
        return f"You: {_cut(reply, for_reply)}\nThen: {_cut(results, for_results)}"


@dataclass(kw_only=True)
class Summary(ContextPolicy):
    """When the prompt outgrows `max_tokens`, the model writes a summary, which replaces all but the last exchanges and
    the previous summary. It is asked at most once per action, and only if something can be left out."""

    max_tokens: int
    summary_tokens: int
    keep_turns: int
    instruction: str
    _text = ""
    _covered: dict[int, Exchange] = field(default_factory=dict, init=False)  # what the text replaces, by index

    async def prepare(self, messages: list[Message], writer: Writer) -> None:
        shown = (await self.show(messages)).messages
        _, exchanges, old = self._split(messages, self.keep_turns)
        if self._covered.keys() >= set(old) or writer.count_tokens(shown) <= self.max_tokens:
            return
        text = await writer.write(append_text(shown, self.instruction), max_tokens=self.summary_tokens)
        self._text, self._covered = strip_reasoning(text), {index: deepcopy(exchanges[index]) for index in old}

    async def show(self, messages: list[Message]) -> ContextView:
        opening, exchanges, _ = self._split(messages, self.keep_turns)
        if any(exchanges[index : index + 1] != [before] for index, before in self._covered.items()):
            self._text, self._covered = "", {}  # the env has rewritten what the summary covers
        if not self._covered:
            return ContextView(messages=messages, hidden=0)
        summary = f"{SUMMARY_TITLE}\n{self._text}"
        # Marked as a tool's text, because it may quote one.
        shown = append_text(opening, summary, from_tool=True) if self._text else opening
        kept = _flatten(exchanges, without=self._covered)
        return ContextView(messages=shown + kept, hidden=len(messages) - len(opening) - len(kept))


@dataclass(kw_only=True)
class Rewrite(ContextPolicy):
    """Shows what a function makes of the messages."""

    function: Callable[[list[Message]], list[Message] | Awaitable[list[Message]]]

    async def show(self, messages: list[Message]) -> ContextView:
        returned = self.function(deepcopy(messages))
        shown = await returned if inspect.isawaitable(returned) else returned
        source = f"rewrite {getattr(self.function, '__name__', type(self.function).__name__)!r}"
        try:
            Observation(messages=shown)  # checks their types
        except (TypeError, ValueError) as error:
            raise DataError(f"{source} returned {shown!r:.80}; it must return a list of messages: {error}") from error
        if shown[-1]["role"] == "assistant":
            raise DataError(f"{source} returned messages that end with one from the assistant; the model replies next")
        return ContextView(messages=shown, hidden=sum(message not in shown for message in messages))


def count_words(text: str) -> Counter[str]:
    return Counter(_words(text[:MAX_CHARS]))


def score_texts(query: str, texts: Sequence[Counter[str]]) -> list[float]:
    """One score per text, 0 if it shares no word with the query. A repeated word of the query counts once."""
    sizes = [text.total() for text in texts]
    mean = sum(sizes) / len(sizes) if any(sizes) else 1.0
    scores = [0.0] * len(texts)
    for word in sorted(set(_words(query[:MAX_QUERY_CHARS]))):  # sorted: sums of floats depend on their order
        places = [place for place, text in enumerate(texts) if word in text]
        weight = math.log(1 + (len(texts) - len(places) + 0.5) / (len(places) + 0.5))
        for place in places:
            times = texts[place][word]
            damping = K1 * (1 - B + B * sizes[place] / mean)
            scores[place] += weight * times * (K1 + 1) / (times + damping)
    return scores


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def split_exchanges(messages: list[Message], opening_size: int = 0) -> tuple[list[Message], list[Exchange]]:
    """Split into the opening, of at least `opening_size` messages, and the exchanges."""
    replies = [n for n, message in enumerate(messages) if n >= opening_size and message.get("role") == "assistant"]
    bounds = [*replies, len(messages)]
    return messages[: bounds[0]], [messages[start:end] for start, end in pairwise(bounds)]


def strip_reasoning(text: str) -> str:
    """Strip reasoning, even if it was opened in the prompt or cut off."""
    thought, closed, rest = text.partition("</think>")
    visible = rest if closed and "<think>" not in thought else text
    return re.sub(r"<think>.*?(</think>|\Z)", "", visible, flags=re.DOTALL).strip()


def append_text(messages: list[Message], text: str, *, from_tool: bool = False) -> list[Message]:
    """Append text to the last message if it is the user's, else as a new user message: many templates refuse two user
    messages in a row. With `from_tool`, nothing in the text can become a control token; the ids of the text before it
    do not change."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        alone: Message = {"role": "user", "content": text}
        return [*messages, {**alone, "from_tool": True} if from_tool else alone]
    content = last.get("content")
    longer = [*content, _text_part(text)] if isinstance(content, list) else f"{content}\n\n{text}" if content else text
    before = last.get("from_tool")
    mark: Message = {}
    if isinstance(before, str) and isinstance(content, str):  # text that was appended earlier stays marked
        mark = {"from_tool": f"{before}\n\n{text}"}
    elif from_tool and not is_from_tool(last):
        mark = {"from_tool": text}
    return [*messages[:-1], {**last, "content": longer, **mark}]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _flatten(exchanges: Iterable[Exchange], *, without: Collection[int] = ()) -> list[Message]:
    return [message for index, exchange in enumerate(exchanges) if index not in without for message in exchange]


def _exchange_texts(exchange: Exchange) -> tuple[str, str]:
    """The text of the reply, and of everything that answered it."""
    reply, *results = exchange
    return strip_reasoning(_message_text(reply)), "\n".join(map(_message_text, results))


def _message_text(message: Message) -> str:
    """All text of a message, including its calls."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = ["[image]" if is_image(part) else str(part.get("text", "")) for part in parts if isinstance(part, dict)]
    calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or []]
    return " ".join(filter(None, [*texts, *calls]))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
