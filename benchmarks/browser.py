"""Headless Chromium, driven by playwright, for screenshots, measurements and tests of the viewer.

playwright comes with the extra `dev`; it drives the Chromium or Chrome that is installed on the machine
(`apt-get install chromium`), or the one that AGENT_R1_CHROMIUM names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The sandbox does not work for root, as in containers; the pages opened here are our own.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
]  # fmt: skip


def find_browser() -> str | None:
    """Return the program, or None if no Chromium is installed."""
    return os.environ.get("AGENT_R1_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def why_no_browser() -> str | None:
    """Return what is missing, or None if a browser can be started. With AGENT_R1_REQUIRE_BROWSER=1, a missing one is an
    error, so that CI cannot skip what needs it."""
    missing = None if find_browser() else "no Chromium is installed: apt-get install chromium, or set AGENT_R1_CHROMIUM"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        missing = "playwright is not installed: pip install -e '.[dev]'"
    if missing is not None and os.environ.get("AGENT_R1_REQUIRE_BROWSER") == "1":
        raise RuntimeError(f"AGENT_R1_REQUIRE_BROWSER=1, but {missing}")
    return missing


@contextmanager
def browser_or_none() -> Iterator[Any]:
    """Start a headless browser, or yield None if that is not possible here."""
    if why_no_browser() is not None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
