"""The chat page in a real browser: it talks to the server, and text of models stays text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.browser import browser_or_none, why_no_browser
from tests.serve.api_server import CALL, serving_agent, serving_script

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser())),
]
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_or_none() as started:
        yield started


def chat(browser: Any, url: str, *texts: str, key: str = "") -> tuple[list[str], list[str], str]:
    """Say `texts` on the page; returns its articles, its console and its title."""
    page = browser.new_page()
    page.set_default_timeout(15_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{url}/")
    if key:
        page.fill("#key", key)
    for text in texts:
        page.fill("#text", text)
        page.press("#text", "Enter")
        page.wait_for_selector("#stop", state="hidden")
        page.wait_for_selector("#send", state="visible")
    articles = [text.replace("\n\n", "\n") for text in page.locator("article").all_inner_texts()]
    title = page.title()
    page.close()
    return articles, problems, title


def test_the_page_shows_a_conversation_and_sends_all_of_it(browser: Any) -> None:
    with serving_script([f"one {HOSTILE}", "two"]) as (url, engine):
        articles, problems, title = chat(browser, url, "first", "second")
    assert articles == ["you\nfirst", f"scripted\none {HOSTILE}", "you\nsecond", "scripted\ntwo"]
    assert (problems, title) == ([], "Chat with scripted")
    assert len(engine.calls[1].prompt_ids) > len(engine.calls[0].prompt_ids)


def test_the_page_shows_what_an_agents_tools_do_between_its_words(browser: Any) -> None:
    with serving_agent([f"I ask.\n{CALL % 'a'}", "it is aaa"]) as (url, _):
        articles, problems, _ = chat(browser, url, "go")
    lines = [line for line in articles[1].splitlines() if line]
    assert lines == ["scripted", "I ask.", 'echo({"text": "a"})', "echo: aaa", "it is aaa"]
    assert problems == []


def test_the_page_asks_for_a_key_if_the_server_has_one(browser: Any) -> None:
    with serving_script(["one"], key="right-key") as (url, _):
        articles, _, _ = chat(browser, url, "hi", key="right-key")
    assert articles == ["you\nhi", "scripted\none"]
