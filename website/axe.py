"""Look for barriers on every page of the built site, in light and dark: `python -m website.axe build/site`.

Runs axe in headless Chromium, and exits with 1 if it finds anything serious. Skipped without the site or a browser.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.browser import browser_or_none, why_no_browser

SERIOUS = """async () => (await axe.run()).violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 160)}`))"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print no requests."""


@contextmanager
def opened(site: Path) -> Iterator[tuple[Any, str]]:
    """Serve a site, and yield a browser and the site's address."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server,
        browser_or_none() as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield browser, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def barriers(site: Path) -> Iterator[str]:
    """Yield what axe finds, with the page and the colour scheme."""
    script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    with opened(site) as (browser, address):
        for scheme in ("light", "dark"):
            page = browser.new_context(color_scheme=scheme).new_page()
            for path in sorted(site.rglob("*.html")):
                name = path.relative_to(site).as_posix()
                page.goto(f"{address}/{name}")
                page.evaluate(script)
                yield from (f"{name} ({scheme}): {found}" for found in page.evaluate(SERIOUS))


def run_checks(what: str, check: Callable[[Path], Iterable[str]], site: Path) -> int:
    """Print the problems that a check in the browser finds, and return 1 if there are any."""
    reason = why_no_browser() or (None if site.is_dir() else f"there is no {site}")
    if reason is not None:
        sys.stderr.write(f"SKIPPED: {what} on the documentation site ({reason})\n")
        return 0
    found = list(check(site))
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run_checks("axe", barriers, Path(sys.argv[1])))
