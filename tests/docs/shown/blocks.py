"""The code blocks of all pages: READMEs, the pages of docs/, and the pages for contributors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("agent_r1/recipes/*/README.md")),
]
FENCE = re.compile(r"^\s*(```+|~~~+)(.*)$")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.body.split("\n", 1)[0].strip()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks, also those in lists. A fence without its end is an error."""
    found: list[Block] = []
    begun: tuple[int, str, str] | None = None  # line, fence, language
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if begun is None and fence is not None:
            begun, body = (number, fence[1], fence[2].strip()), []
        elif begun is not None and fence is not None and fence[1] == begun[1] and not fence[2].strip():
            found.append(Block(page, begun[0], begun[2], "\n".join(body) + "\n"))
            begun = None
        else:
            body.append(line)
    assert begun is None, f"{name(page)}:{begun and begun[0]}: this block does not end"
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def in_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in one language."""
    return [block.body for block in BLOCKS if (block.page, block.language) == (page, language)]
