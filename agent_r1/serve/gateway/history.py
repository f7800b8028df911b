"""The messages of a session as a tree: which part of a client's history is known, and how it was shown to the model.

Clients send the whole conversation with every call, and rarely as they received it: arguments with other whitespace,
None instead of "", a text as a list of parts. A message is therefore compared by its canonical form. A known message is
replaced by the one that was rendered when it came first, so sampled text is never tokenised again.

    system - user - ANSWER - tool - ANSWER - user          capitals: sampled here
                       \\- tool - ANSWER                    a branch

Nothing here knows tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent_r1.tokens.conversations import Exchange
from agent_r1.tokens.placeholders import picture_name
from agent_r1.types import Message

Key = str


class Kind(StrEnum):
    """How a call continues what the session has seen."""

    NEW = "new"  # no answer in it: the first call, a sub-agent, or a summary in place of the history
    CONTINUED = "continued"  # all earlier answers are ours and unchanged: exact ids
    BRANCHED = "branched"  # continued, from a point that was already continued otherwise
    REWRITTEN_ANSWER = "rewritten_answer"  # the client changed an answer of ours
    REWRITTEN_CONTEXT = "rewritten_context"  # our answers after messages that were changed or dropped
    FOREIGN = "foreign"  # answers that we never gave
    RERENDERED = "rerendered"  # known, but shown otherwise: other tools, or a template that cannot be continued

    @property
    def starts_segment(self) -> bool:
        return self not in (Kind.CONTINUED, Kind.BRANCHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A message as a client sent it, in the form that the chat template gets."""

    key: Key
    message: Message
    call_ids: tuple[str, ...] = ()
    reasoning: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A message that the session has seen, after those above it."""

    entry: Entry
    parent: Node | None = None
    children: dict[Key, list[Node]] = field(default_factory=dict)
    exchange: Exchange | None = None  # set for an answer that was sampled here

    @property
    def is_sampled(self) -> bool:
        return self.exchange is not None

    def siblings(self) -> list[Node]:
        """All messages that follow the same message, including this one."""
        return [] if self.parent is None else [node for same in self.parent.children.values() for node in same]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A client's history, looked up."""

    messages: list[Message]  # messages to render; known ones as they were rendered before
    end: Node  # node of the last message
    kind: Kind
    answers: list[Node]  # our answers at the start of the history, the latest first
    added: list[Entry]  # messages after the latest of them


class History:
    """All conversations of a session, as one tree."""

    def __init__(self) -> None:
        self._root = Node(entry=Entry(key="", message={}))
        self._sampled: set[Key] = set()

    def look_up(self, entries: Sequence[Entry]) -> Known:
        """Find the longest known beginning, and add the rest to the tree."""
        node, matched = self._root, 0
        for entry in entries:
            child = _best_child(node, entry)
            if child is None:
                break
            node, matched = child, matched + 1
        for entry in entries[matched:]:
            child = Node(entry=entry, parent=node)
            node.children.setdefault(entry.key, []).append(child)
            node = child
        path = _path(node)
        answers = [each for each in reversed(path) if each.is_sampled]
        added = path[path.index(answers[0]) + 1 :] if answers else path
        return Known(
            messages=[each.entry.message for each in path],
            end=node,
            kind=self._classify(path),
            answers=answers,
            added=[each.entry for each in added],
        )

    def add_answer(self, after: Node, entry: Entry, exchange: Exchange) -> Node:
        """Add a sampled answer after a node."""
        node = Node(entry=entry, parent=after, exchange=exchange)
        after.children.setdefault(entry.key, []).append(node)
        self._sampled.add(entry.key)
        return node

    def _classify(self, path: Sequence[Node]) -> Kind:
        sampled = [index for index, node in enumerate(path) if node.is_sampled]
        since = path[sampled[-1] + 1 :] if sampled else path  # messages after our latest answer
        foreign = [node for node in since if node.entry.message.get("role") == "assistant"]
        if foreign:
            return self._classify_foreign(foreign)
        if not sampled:
            return Kind.NEW
        continued = any(len(node.siblings()) > 1 for node in since) or path[-1].children
        return Kind.BRANCHED if continued else Kind.CONTINUED

    def _classify_foreign(self, foreign: Sequence[Node]) -> Kind:
        """Classify a history with answers that were not given at this point."""
        first, known = foreign[0], [node.entry.key in self._sampled for node in foreign]
        ours = [node for node in first.siblings() if node.is_sampled]
        moved = known[0] and all(node.entry.key != first.entry.key for node in ours)  # given elsewhere
        if ours and not moved:
            return Kind.REWRITTEN_ANSWER
        return Kind.REWRITTEN_CONTEXT if any(known) else Kind.FOREIGN


def _path(node: Node) -> list[Node]:
    """The nodes from the first message down to this one."""
    found: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        found.append(at)
        at = at.parent
    return found[::-1]


def _best_child(node: Node, entry: Entry) -> Node | None:
    """The known message that this one repeats. Among equal ones, prefer the same call ids, then the latest."""
    same = [each for each in node.children.get(entry.key, ()) if _may_be(each, entry)]
    exact = (each for each in reversed(same) if each.entry.call_ids == entry.call_ids)
    return next(exact, same[-1] if same else None)


def _may_be(node: Node, entry: Entry) -> bool:
    """Most clients drop the reasoning of an answer; one that sends another has changed the answer."""
    return not entry.reasoning or _squeezed(entry.reasoning) == _squeezed(node.entry.reasoning)


def _squeezed(text: str) -> str:
    return " ".join(text.split())


# canonical form


def canonical_key(message: Message) -> Key:
    """Equal for messages that differ only in how clients write them. Ids of calls and reasoning do not count."""
    role = message["role"]
    content = content_text(message.get("content"))
    if role == "assistant" and isinstance(content, str):
        content = content.strip()  # many clients strip whitespace
    calls = [(call["function"]["name"], _canonical(call["function"]["arguments"])) for call in _calls(message)]
    return json.dumps([role, content, calls], sort_keys=True, default=picture_name)


def content_text(content: Any) -> Any:
    """The text of a content: None is "", text parts are joined. A content with other parts stays a list."""
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        texts = [part.get("text", "") if part.get("type") in TEXT_PARTS else None for part in content]
        return list(content) if None in texts else "\n".join(filter(None, texts))
    return content


TEXT_PARTS = ("text", "input_text", "output_text")


def _calls(message: Message) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _canonical(arguments: Any) -> Any:
    """Parse arguments that are a JSON object, so that blanks and the order of keys do not count."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return arguments
