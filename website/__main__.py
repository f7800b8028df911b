"""Write the sources of the site, then build it:

    python -m website build/docs        # Markdown, pictures, llms.txt
    mkdocs build --strict               # from build/docs into build/site

`.ci/docs` does both. Only the second step needs packages.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import yaml

from website.llms import llms_texts
from website.pages import ROOT, rewrite, site_pages

HOME_LAYOUT = "---\nhide: [navigation]\n---\n\n"


def write_sources(target: Path) -> None:
    """Write every page with the links of the site, and the files that pages show."""
    pages = site_pages()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.md", "*.ipynb"))
    shutil.copytree(ROOT / "website" / "assets", target / "assets")
    for page, content in pages.items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        text = rewrite(content.text, page, pages, outside)
        (target / page).write_text(HOME_LAYOUT + text if page == "index.md" else text, encoding="utf-8")
    listing, full = llms_texts(navigation(), pages, os.environ.get("SITE_URL", ""))
    (target / "llms.txt").write_text(listing, encoding="utf-8")
    (target / "llms-full.txt").write_text(full, encoding="utf-8")


def navigation() -> list[object]:
    """`nav` of mkdocs.yml. The file has tags of MkDocs, which plain YAML does not know."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    found: list[object] = yaml.safe_load("\n".join(lines[lines.index("nav:") + 1 :]))
    return found


def outside(path: str) -> str | None:
    """The address of a file that is no page. If the repository's address is unknown, only the link's text is kept."""
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path!r}, which is not in the repository")
    repository = os.environ.get("REPOSITORY_URL")
    return f"{repository}/blob/main/{path}" if repository else None


if __name__ == "__main__":
    write_sources(Path(sys.argv[1]))
