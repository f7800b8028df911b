"""Control tokens as text: finding those a template wrote, and defusing those a content only spells out.

A look-alike ("<|im_end|>" in what a user typed) is defused by a cut after its first character. `rendering.py` tokenises
the text on both sides of a cut apart, so no control token can come of it and not a character changes.

Knows strings only. Look-alikes are found literally, which is how tokenizers find control tokens, unless one was added
with `normalized=True`: then other spellings that normalise to it are not recognised here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Two Unicode noncharacters: code points set aside for a program's own use. Templates pass them through untouched; in
# a message they become U+FFFD, as Unicode recommends for text from outside.
CUT = "\ufdd0"  # tokenise what stands left and right of it apart
SLOT = "\ufdd1"  # stands for a content, to find where the template puts it
_SCRUB = str.maketrans({CUT: "\ufffd", SLOT: "\ufffd"})


def scrub(text: str) -> str:
    """`text` without the two code points that mean something to us."""
    return text.translate(_SCRUB)


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or r"(?!)"


class ControlTokens:
    """A set of control tokens."""

    def __init__(self, tokens: set[str]) -> None:
        tokens = {token for token in tokens if len(token) > 1}  # a single character cannot be cut in two
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        any_token = _any_of(longest_first)
        # One branch per first character: few, so that the scan passes quickly over ordinary text.
        firsts = sorted({token[0] for token in tokens})
        rests = {first: _any_of(token[1:] for token in longest_first if token[0] == first) for first in firsts}
        branches = "|".join(f"{re.escape(first)}(?={rest})" for first, rest in rests.items())
        self._first_character = re.compile(branches or r"(?!)")
        self._leading = re.compile(rf"\s*({any_token})")
        self._trailing = re.compile(rf"({any_token})\s*\Z")
        self._beginnings = {token[:length] for token in tokens for length in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def at_start(self, text: str) -> str | None:
        """The control token that `text` starts with, blanks aside."""
        match = self._leading.match(text)
        return match[1] if match else None

    def at_end(self, text: str) -> str | None:
        """The control token that `text` ends with, blanks aside."""
        match = self._trailing.search(text)
        return match[1] if match else None

    def defuse(self, value: Any) -> Any:
        """`value` with a cut in every look-alike of every string in it, dictionary keys included."""
        if isinstance(value, str):
            return self._first_character.sub(rf"\g<0>{CUT}", scrub(value))
        if isinstance(value, Mapping):
            return {self.defuse(key): self.defuse(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            parts = [self.defuse(item) for item in value]
            return [self.close(part) for part in parts[:-1]] + parts[-1:]
        return value

    def close(self, part: Any) -> Any:
        """Templates glue the parts of a content together, so none may end in what the next could complete."""
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": self.close(part["text"])}
        if not isinstance(part, str):
            return part
        length = len(part.rstrip())  # some templates trim each part
        for start in range(max(0, length - self._longest), length):
            if part[start:length] in self._beginnings:
                return f"{part[: start + 1]}{CUT}{part[start + 1 :]}"
        return part
