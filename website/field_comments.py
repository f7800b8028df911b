"""For the API reference: the comment beside a field is its documentation."""

from __future__ import annotations

from typing import Any

import griffe

from website.comments import comment_of


class FieldComments(griffe.Extension):  # type: ignore[misc]
    def on_attribute_instance(self, *, attr: Any, **kwargs: Any) -> None:
        if attr.docstring is not None or not attr.lineno or not attr.parent.is_class:
            return
        lines = attr.parent.module.filepath.read_text(encoding="utf-8").splitlines()
        comment = comment_of(lines, attr.lineno, attr.endlineno)
        if comment:
            attr.docstring = griffe.Docstring(comment, parent=attr)
