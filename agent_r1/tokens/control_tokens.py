"""Control tokens as text: find those that a template wrote, and defuse those that a message only spells out.

A look-alike ("<|im_end|>" in what a user typed) is defused by a cut after its first character. `rendering.py` tokenises
the text on both sides of a cut separately, so it cannot become a control token, and no character changes.

Works on strings only. Look-alikes are matched literally, as tokenizers match control tokens, unless one was added with
`normalized=True`: other spellings that normalise to it are not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from agent_r1.types import Message

# Two Unicode noncharacters, which are reserved for internal use. Templates pass them through unchanged; in a message,
# they become U+FFFD, as Unicode recommends for text from outside.
CUT = "\ufdd0"  # tokenise the text left and right of it separately
SLOT = "\ufdd1"  # a placeholder for a content, to find where the template writes it
_SCRUB = str.maketrans({CUT: "\ufffd", SLOT: "\ufffd"})

TOOL_ROLES = frozenset({"tool", "ipython", "function"})  # outside programs write these messages


def scrub(text: str) -> str:
    """Replace the two characters that have a meaning here."""
    return text.translate(_SCRUB)


def is_from_tool(message: Message) -> bool:
    """Whether a tool wrote some of the message, which is a user message if the template has no tool role."""
    return message.get("role") in TOOL_ROLES or bool(message.get("from_tool"))


class ControlTokens:
    """A set of control tokens."""

    def __init__(self, tokens: set[str]) -> None:
        tokens = {token for token in tokens if len(token) > 1}  # a single character cannot be cut in two
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        any_token = _any_of(longest_first)
        # One branch per first character: there are few, so the scan skips ordinary text quickly.
        firsts = sorted({token[0] for token in tokens})
        rests = {first: _any_of(token[1:] for token in longest_first if token[0] == first) for first in firsts}
        branches = "|".join(f"{re.escape(first)}(?={rest})" for first, rest in rests.items())
        self._first_character = re.compile(branches or r"(?!)")
        self._leading = re.compile(rf"\s*({any_token})")
        self._trailing = re.compile(rf"({any_token})\s*\Z")
        self._beginnings = {token[:length] for token in tokens for length in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def at_start(self, text: str) -> str | None:
        """The control token at the start of `text`, ignoring blanks."""
        match = self._leading.match(text)
        return match[1] if match else None

    def at_end(self, text: str) -> str | None:
        """The control token at the end of `text`, ignoring blanks."""
        match = self._trailing.search(text)
        return match[1] if match else None

    def defuse(self, value: Any) -> Any:
        """Cut every look-alike in every string of `value`, including dictionary keys."""
        if isinstance(value, str):
            return self._first_character.sub(rf"\g<0>{CUT}", scrub(value))
        if isinstance(value, Mapping):
            return {self.defuse(key): self.defuse(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            parts = [self.defuse(item) for item in value]
            return [self.close(part) for part in parts[:-1]] + parts[-1:]
        return value

    def close(self, part: Any) -> Any:
        """Cut an unfinished look-alike at the end of a part: templates join parts, and the next could complete it."""
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": self.close(part["text"])}
        if not isinstance(part, str):
            return part
        length = len(part.rstrip())  # some templates trim each part
        for start in range(max(0, length - self._longest), length):
            if part[start:length] in self._beginnings:
                return f"{part[: start + 1]}{CUT}{part[start + 1 :]}"
        return part


def defuse_message(message: Message, *, special: ControlTokens, control: ControlTokens) -> Message:
    """Cut look-alikes of special tokens, and of all control tokens in a tool's text.

    If `from_tool` is a text, only the end of the content (or its last part) with this text is the tool's. If the
    content does not end with it, all of it is.
    """
    text, content = message.get("from_tool"), message.get("content")
    if isinstance(text, str) and text:
        own = {key: value for key, value in message.items() if key != "from_tool"}
        own_tokens = control if is_from_tool(own) else special
        if isinstance(content, str) and content.endswith(text):
            safe = own_tokens.defuse({**own, "content": content[: -len(text)]})
            return {**safe, "content": f"{control.close(safe['content'])}{control.defuse(text)}"}
        if isinstance(content, list) and content[-1:] == [{"type": "text", "text": text}]:
            safe = own_tokens.defuse({**own, "content": content[:-1]})
            parts = [*safe["content"][:-1], *map(control.close, safe["content"][-1:])]
            return {**safe, "content": [*parts, {"type": "text", "text": control.defuse(text)}]}
    tokens = control if is_from_tool(message) else special
    return dict(tokens.defuse(message))


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or r"(?!)"
