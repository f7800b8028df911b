"""Pages of the site that are not files of docs/, and links that hold in the site as they do in the repository.

The README is the home page; the recipes' own READMEs, the changelog, the notebook and the public names of the package
become pages too, so that nothing is written twice. Pages keep the links of their source, which work where the
repository is read; `rewrite` turns them into links between the site's pages.

Nothing here imports `agent_r1` or MkDocs.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from website.reference import TOPIC_OF, TOPICS, page_links, page_text

ROOT = Path(__file__).parents[1]
PUBLIC = "agent_r1/__init__.py"
# Code is matched first, so that it is left alone. A link's text may have line breaks, but no blank line.
LINK = re.compile(
    r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|`[^`\n]+`|"
    r"(?P<label>!?\[(?:[^\]\[\n]|\n(?!\n)|\[[^\]\n]*\])*\])\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)

# How the repository shows a picture that has a dark version; the site has its own switch between light and dark.
TWO_THEMES = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]*)"(?: width="(?P<width>\d+)")?>\s*</picture>'
)

INDEX = (
    "Public names are imported from `agent_r1`: `from agent_r1 import tool`. Others are imported from their module, "
    "which stands above them."
)
BUTTONS = (
    "[Tutorial: your own agent in 30 minutes](docs/tutorial.md){ .md-button .md-button--primary } "
    "[Recipes](docs/recipes.md){ .md-button } [API](api/index.md){ .md-button }"
)


@dataclass(frozen=True)
class Page:
    text: str
    source: str  # path in the repository, which relative links start from


def site_pages(root: Path = ROOT) -> dict[str, Page]:
    """Every page of the site, by its path in the site."""
    pages = {
        path.relative_to(root / "docs").as_posix(): Page(
            themed(path.read_text(encoding="utf-8")), str(path.relative_to(root))
        )
        for path in sorted((root / "docs").rglob("*.md"))
    }
    return pages | added_pages(root)


def added_pages(root: Path = ROOT) -> dict[str, Page]:
    sources = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    sources |= {"security.md": "SECURITY.md"}
    for readme in sorted(root.glob("agent_r1/recipes/*/README.md")):
        sources[f"recipes/{readme.parent.name}.md"] = str(readme.relative_to(root))
    pages = {page: Page((root / source).read_text(encoding="utf-8"), source) for page, source in sources.items()}
    pages["index.md"] = home(pages["index.md"])
    notebook = "docs/python-api.ipynb"
    pages["python-api-notebook.md"] = Page(
        notebook_text(json.loads((root / notebook).read_text(encoding="utf-8"))), notebook
    )
    return pages | api_pages(root)


def themed(text: str) -> str:
    """Show pictures that have a light and a dark version by the theme of the site instead of the system's."""

    def both(found: re.Match[str]) -> str:
        size = f"{{ width={found['width']} }}" if found["width"] else ""
        return "\n".join(f"![{found['alt']}]({found[theme]}#only-{theme}){size}" for theme in ("light", "dark"))

    return TWO_THEMES.sub(both, text)


def home(readme: Page) -> Page:
    """The README, with buttons under its first paragraph."""
    title, first, rest = readme.text.split("\n\n", 2)
    return Page("\n\n".join([title, first, BUTTONS, rest]), readme.source)


def notebook_text(notebook: Mapping[str, list[Mapping[str, object]]]) -> str:
    """The cells of a notebook as Markdown. Its outputs are not committed, so there are none to show."""
    parts = []
    for cell in notebook["cells"]:
        source = cell["source"]
        text = source if isinstance(source, str) else "".join(source)  # type: ignore[arg-type]
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def public_names(root: Path = ROOT) -> dict[str, str]:
    """Public name -> module, read from the imports of the package."""
    tree = ast.parse((root / PUBLIC).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def api_pages(root: Path = ROOT) -> dict[str, Page]:
    """One page per topic, with a directive of mkdocstrings for each name."""
    public: dict[str, list[str]] = {page: [] for page in TOPICS}
    for name, module in public_names(root).items():
        part = module.split(".")[1]
        public[TOPIC_OF.get(part, part)].append(f"{module}.{name}")
    index, pages = ["# API reference", INDEX], {}
    for page, topic in TOPICS.items():
        names = sorted(public[page], key=lambda path: path.rsplit(".")[-1].lower())
        pages[f"api/{page}.md"] = Page(page_text(topic, names), PUBLIC)
        index.append(page_links(page, topic, names))
    pages["api/index.md"] = Page("\n\n".join(index) + "\n", PUBLIC)
    return pages


def rewrite(text: str, page: str, pages: Mapping[str, Page], link_outside: Callable[[str], str | None]) -> str:
    """Make the relative links of a page hold in the site.

    A link to another page's source leads to that page, a link to a file of docs/ stays, and `link_outside` gives the
    address of any other file of the repository, or None to keep only the link's text. Code blocks are left alone.
    """
    source = pages[page].source
    if page.startswith("api/"):
        return text  # written for the site
    by_source = {other.source: name for name, other in pages.items() if not name.startswith("api/")}

    def moved(match: re.Match[str]) -> str:
        label, target = match["label"], match["target"]
        if label is None or re.match(r"[a-z]+:|#", target) or target.startswith("api/"):
            return match[0]
        path, _, anchor = target.partition("#")
        found = normpath(str(PurePosixPath(source).parent / path))
        to = by_source.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if to is None:
            address = link_outside(found)
            return label[1:-1] if address is None else f"{label}({address})"
        return f"{label}({relpath(to, str(PurePosixPath(page).parent))}{'#' + anchor if anchor else ''})"

    return LINK.sub(moved, text)
