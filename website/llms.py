"""llms.txt and llms-full.txt (llmstxt.org): the site for readers that are programs.

`llms.txt` lists every page of the navigation with its first sentence; `llms-full.txt` holds the text of all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from website.pages import ROOT, Page, rewrite

Nav = Sequence[Any]  # of MkDocs: texts, and mappings from a title to a page or a list


def entries(nav: Nav, section: str = "") -> Iterator[tuple[str, str | None, str]]:
    """(section, title, page) of each page in order. The title is None where the navigation leaves it to the page."""
    for item in nav:
        if isinstance(item, str):
            yield section, None, item
            continue
        for title, inner in item.items():
            if isinstance(inner, str):
                yield section, title, inner
            else:
                yield from entries(inner, section or title)


def llms_texts(nav: Nav, pages: Mapping[str, Page], site_url: str) -> tuple[str, str]:
    """The contents of llms.txt and llms-full.txt."""
    home = pages["index.md"].text
    index, full = [f"# {heading(home)}\n\n> {summary(home)}"], []
    current = ""
    for section, title, page in entries(nav):
        text = pages[page].text
        address = site_url + re.sub(r"(README)?\.md$", lambda end: "index.html" if end[1] else ".html", page)
        if section != current:
            index.append(f"\n## {section}\n")
            current = section
        index.append(f"- [{title or heading(text)}]({address}): {summary(text)}")
        content = rewrite(text, page, pages, lambda path: None).strip()
        full.append(f"<!-- {address} -->\n\n{re.sub(r'^::: (.+)$', definition, content, flags=re.MULTILINE)}")
    return "\n".join(index) + "\n", "\n\n---\n\n".join(full) + "\n"


def heading(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert found is not None, f"a page has no heading: {text[:60]!r}"
    return found[1]


def summary(text: str) -> str:
    """The first sentence of the first paragraph, without links."""
    body = text[text.index("\n", text.index("# ")) :]
    outside_code = re.sub(r"^```.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [part.strip() for part in outside_code.split("\n\n") if part.strip()]
    prose = next((part for part in paragraphs if not re.match(r"[#|<!*\-]|:::|\d+\.", part)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.?!])\s", plain, maxsplit=1)[0]


def definition(directive: re.Match[str]) -> str:
    """The code and docstring that a directive of mkdocstrings stands for, without the bodies of functions."""
    return "\n\n".join(f"```python\n{ast.unparse(without_bodies(node))}\n```" for node in find_definition(directive[1]))


def find_definition(path: str) -> list[ast.stmt]:
    """The statements that define a name, in its module or in the one that it is imported from."""
    module, _, name = path.rpartition(".")
    file = ROOT / Path(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    found: list[ast.stmt] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return find_definition(f"{node.module}.{name}")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or name in [getattr(target, "id", None) for target in targets]:
            found.append(node)
    return found


def without_bodies(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        kept = node.body[:1] if ast.get_docstring(node) else []
        node.body = [*kept, ast.Expr(ast.Constant(...))]
    elif isinstance(node, ast.ClassDef):
        public = [inner for inner in node.body if not getattr(inner, "name", "").startswith("_")]
        node.body = [without_bodies(inner) for inner in public] or [ast.Expr(ast.Constant(...))]
    return node
