"""Look for known terms with the search of the built site: `python -m website.search build/site`.

Runs in headless Chromium, on the served site and on its files, and exits with 1 if a page is not found. Skipped without
the site or a browser.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from website.axe import opened, run_checks

TERMS = {  # term -> a page that it must find
    "bootstrap_truncated": "algorithms/ppo.html",  # a setting
    "LLMJudge": "api/rewards.html",  # a name of the API reference
    "zero-shot": "evaluation.html",  # words of a page
}
NOWHERE = "xyzzyplugh"
LISTED = "page => [...document.querySelectorAll('.md-search-result__link')].some(link => link.href.includes(page))"
NOTHING = "() => document.querySelector('.md-search-result__meta').innerText.startsWith('No matching')"
SECONDS = 60  # a busy machine is not a failure


def missing(site: Path) -> Iterator[str]:
    """Yield the terms whose page the search does not find."""
    from playwright.sync_api import TimeoutError as NotFound

    with opened(site) as (browser, address):
        for start in (address, site.resolve().as_uri()):
            for term, wanted in {**TERMS, NOWHERE: None}.items():
                page = browser.new_page()
                page.goto(f"{start}/index.html")
                page.locator("[data-md-component=search-query]").fill(term)
                try:
                    page.wait_for_function(LISTED if wanted else NOTHING, arg=wanted, timeout=SECONDS * 1000)
                except NotFound:
                    outcome = f"does not find {wanted}" if wanted else "finds something"
                    yield f"{start}: searching for {term!r} {outcome}"
                page.close()


if __name__ == "__main__":
    sys.exit(run_checks("search", missing, Path(sys.argv[1])))
