"""What MkDocs does not check in a built site: `python -m website.check build/site`.

Every link leads to a file and, if it names one, to an anchor; no page loads anything from elsewhere; no list has become
part of a paragraph, as it does where Markdown is read less generously than in the repository; llms.txt names files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
SILENT = {"canonical", "prev", "next", "alternate", "edit"}  # of `link`: named, but not loaded

LIST = re.compile(r"^\s*([-*]|\d+\.) ", re.MULTILINE)
CSS_LOADS = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)")


class Seen(HTMLParser):
    """The links, anchors, loaded files and paragraphs of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADS and LOADS[tag] in values and values.get("rel") not in SILENT:
            self.loaded.append(values[LOADS[tag]])
        if tag == "p":
            self.paragraphs.append("")
        self._inside = tag if tag in ("p", "code", "pre") else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "p" if tag == "code" else "" if tag in ("p", "pre") else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "p" and self.paragraphs:
            self.paragraphs[-1] += data


def problems(site: Path) -> Iterator[str]:
    pages = {path: Seen(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        found = [problem for address in page.links + page.loaded for problem in broken(address, path, site, pages)]
        found += [f"loads {address} from another site" for address in page.loaded if urlsplit(address).netloc]
        found += [f"a list without a blank line before it: {text}" for text in page.paragraphs if LIST.search(text)]
        yield from (f"{path.relative_to(site)}: {problem}" for problem in found)
    for path in site.rglob("*.css"):
        for address in CSS_LOADS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {address} from another site"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (site / "llms.txt").read_text(encoding="utf-8")):
        if not (site / target).exists():
            yield f"llms.txt: {target} does not exist"


def broken(address: str, path: Path, site: Path, pages: dict[Path, Seen]) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc or (path.name == "404.html" and address.startswith("/")):
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists() or not target.is_relative_to(site.resolve()):
        yield f"{address} leads nowhere"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        yield f"{address} names a heading that {target.name} does not have"


def main(site: Path) -> int:
    found = list(problems(site.resolve()))
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
