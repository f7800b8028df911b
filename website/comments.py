"""The comment beside a field, which is its documentation in this project."""

from __future__ import annotations

import re


def comment_of(lines: list[str], first: int, last: int) -> str:
    """The comment at the end of a statement, else the comment lines directly above it. Lines count from 1.

    Attributes that a method sets have none: comments there are about the code.
    """
    if lines[first - 1].lstrip().startswith("self."):
        return ""
    beside = re.search(r"  # (?!noqa|type:)(.+)$", lines[last - 1])
    if beside:
        return beside[1]
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        found = re.fullmatch(r" *# (.+)", line)
        if found is None:
            break
        above.insert(0, found[1])
    return " ".join(above)
