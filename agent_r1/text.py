"""Text from outside (rows, tools, replies, file names), made safe for files, tokenizers and terminals."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NAMED = 8  # names an error message lists

# Control characters except tab and newline, marks that reorder or break lines, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 files cannot hold and tokenizers refuse."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def visible(text: str) -> str:
    r"""Escape characters that would move the cursor, change colours or reorder text, for example as `\x1b`."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def cut_middle(text: str, size: int) -> str:
    """Keep about `size` characters of a long text, half of them from each end, and say how many were cut."""
    if len(text) <= size:
        return text
    head = size // 2
    return f"{text[:head]}\n[{len(text) - size} characters cut]\n{text[len(text) - (size - head) :]}"


def first_names(names: Sequence[str]) -> str:
    """The first names of a long list, for an error message, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"
