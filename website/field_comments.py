"""For the API reference: the comment beside a field is its documentation."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):  # type: ignore[misc]
    def on_attribute_instance(self, *, attr: Any, **kwargs: Any) -> None:
        if attr.docstring is None and attr.lineno and attr.parent.is_class:
            comment = comment_of(
                attr.parent.module.filepath.read_text("utf-8").splitlines(), attr.lineno, attr.endlineno
            )
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr)


def comment_of(lines: list[str], first: int, last: int) -> str:
    """The comment at the end of a statement, else the comment lines directly above it. Lines count from 1."""
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
