"""Where progress is shown: a terminal, or an HTML block below the cell of a notebook that is updated in place."""

from __future__ import annotations

import html
import io
import sys
from typing import Any

from rich.console import Console

from agent_r1.cli.terminal import Terminal

WIDTH = 110
KEPT_LINES = 12  # shown; earlier ones can be unfolded


def screen(*, quiet: bool) -> Console:
    if quiet:
        return Console(quiet=True, file=io.StringIO())
    return NotebookConsole() if in_notebook() else Terminal()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def is_interactive() -> bool:
    """Whether a person types at this process: a notebook, or Python's or IPython's prompt."""
    return hasattr(sys, "ps1") or in_notebook()


class NotebookConsole(Console):
    """Collects lines and shows them in one block, which every further line updates."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=WIDTH, force_terminal=False, force_jupyter=False)
        self._lines: list[str] = []
        self._handle: Any = None

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self._lines += captured.get().rstrip("\n").split("\n")
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display

        block = HTML(as_html(self._lines))
        if self._handle is None:
            self._handle = display(block, display_id=True)
        else:
            self._handle.update(block)


def as_html(lines: list[str]) -> str:
    """The lines as HTML, all but the last folded away."""
    earlier, shown = lines[:-KEPT_LINES], lines[-KEPT_LINES:]
    folded = f"<details><summary>{len(earlier)} earlier lines</summary>{_pre(earlier)}</details>" if earlier else ""
    return folded + _pre(shown)


def _pre(lines: list[str]) -> str:
    text = html.escape("\n".join(lines))
    return f'<pre style="margin:0;white-space:pre-wrap;line-height:1.3">{text}</pre>'
