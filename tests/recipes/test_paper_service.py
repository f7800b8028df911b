"""The paper service and its client: the same papers as the library, and what happens when the service misbehaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from agent_r1.errors import ConfigError
from agent_r1.recipes.paper_search import synthetic, task
from agent_r1.recipes.paper_search.corpus import LocalPapers, build_library
from agent_r1.recipes.paper_search.env import PaperSearch
from agent_r1.recipes.paper_search.papers import Paper, SourceError
from agent_r1.recipes.paper_search.service import ServicePapers
from agent_r1.recipes.paper_search.tools import Expand, Search
from agent_r1.resources import opened
from agent_r1.serve.paper_server import PaperLimits
from agent_r1.types import Action, Transition
from tests.conftest import Cli
from tests.recipes.paper_services import Canned, canned, serving_papers

T = TypeVar("T")
QUICK: dict[str, Any] = {"backoff_seconds": 0.01, "seconds_per_attempt": 5.0, "attempts": 3}
EMPTY = Canned()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> LocalPapers:
    return synthetic.open_synthetic(tmp_path_factory.mktemp("papers") / "library")


@pytest.fixture(scope="module")
def url(library: LocalPapers) -> Iterator[str]:
    with serving_papers(library) as address:
        yield address


def ask(url: str, question: Callable[[ServicePapers], Awaitable[T]], **settings: Any) -> T:
    async def run() -> T:
        service = ServicePapers(url, **(QUICK | settings))
        async with opened([service]):
            return await question(service)

    return asyncio.run(run())


def body(*titles: str, **fields: Any) -> Canned:
    found = [{"paperId": f"id-{title}", "title": title, **fields} for title in titles]
    return Canned(body=json.dumps({"data": found}).encode())


# Our service


@pytest.mark.parametrize("prefix", ["", "/graph/v1"])
def test_the_service_finds_what_the_library_finds(library: LocalPapers, url: str, prefix: str) -> None:
    found = ask(url + prefix, lambda service: service.search("parsing", 7))
    assert [(each.paper_id, each.title, each.abstract, each.year, each.venue, each.authors) for each in found] == [
        (each.paper_id, each.title, each.abstract, each.year, each.venue, each.authors)
        for each in library.find("parsing", 7)
    ]


def test_expand_over_http_follows_references_like_the_library(library: LocalPapers, url: str) -> None:
    local = asyncio.run(library.expand(library[40], 20))
    remote = ask(url, lambda service: service.expand(library[40], 20))
    assert [each.paper_id for each in remote.papers] == [each.paper_id for each in local.papers]
    assert remote.how == local.how


def test_without_citations_the_client_takes_recommendations_and_says_so(tmp_path: Path) -> None:
    papers = [Paper(paper_id=f"a/{n}", title=f"River parsing {n}", abstract="of dialects") for n in range(3)]
    made = build_library(papers, tmp_path / "library")
    with serving_papers(made) as address:
        related = ask(f"{address}/graph/v1", lambda service: service.expand(Paper(paper_id="a/0", title="x"), 5))
    assert {each.paper_id for each in related.papers} == {"a/1", "a/2"}
    assert "recommended" in related.how


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/paper/search", 400),
        ("/paper/search?query=%20", 400),
        ("/paper/search?query=" + "a" * 1001, 400),
        ("/paper/search?query=a&limit=0", 400),
        ("/paper/search?query=a&limit=-1", 400),
        ("/paper/search?query=a&limit=1e3", 400),
        ("/paper/search?query=a&limit=" + "9" * 5000, 400),
        ("/paper/search?query=a&offset=99999", 400),
        ("/paper/search?query=a&fields=title,secrets", 400),
        ("/paper/nothing", 404),
        ("/paper/nothing/references", 404),
        ("/paper/p1/nothing", 404),
        ("/recommendations/v1/papers/forpaper/nothing", 404),
        ("/paper/search?query=%00%ff%F0", 200),
        ("/health", 200),
    ],
)
def test_requests_that_make_no_sense_are_refused(url: str, path: str, status: int) -> None:
    assert httpx.get(url + path).status_code == status


def test_fields_limits_and_offsets_are_those_of_the_real_service(library: LocalPapers, url: str) -> None:
    whole = httpx.get(f"{url}/graph/v1/paper/search", params={"query": "parsing", "limit": 5}).json()
    rest = httpx.get(f"{url}/graph/v1/paper/search", params={"query": "parsing", "limit": 3, "offset": 2}).json()
    assert list(whole["data"][0]) == ["paperId", "title"]
    assert rest["offset"] == 2
    assert rest["data"] == whole["data"][2:]
    fields = "title,authors,referenceCount,citationCount"
    assert httpx.get(f"{url}/graph/v1/paper/p40", params={"fields": fields}).json() == {
        "paperId": "p40",
        "title": library[40].title,
        "authors": [{"authorId": None, "name": library[40].authors[0]}],
        "referenceCount": 1,
        "citationCount": 1,
    }


def test_a_service_refuses_requests_above_its_rate_and_a_client_comes_back(library: LocalPapers) -> None:
    with serving_papers(library, PaperLimits(rate=0.01)) as address:
        assert httpx.get(f"{address}/paper/p1").status_code == 200
        refused = httpx.get(f"{address}/paper/p1")
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 100
    with serving_papers(library, PaperLimits(rate=20)) as address:
        assert len(ask(address, lambda service: service.search("parsing", 3))) == 3


def test_a_client_keeps_its_own_rate(url: str) -> None:
    async def search_three(service: ServicePapers) -> float:
        began = time.monotonic()
        await asyncio.gather(*(service.search(query, 1) for query in ("a", "b", "c")))
        return time.monotonic() - began

    assert ask(url, search_three, requests_per_second=20.0) >= 0.09  # a gap of 0.05 s before two of the three, at least


def test_too_many_requests_at_once_are_refused_and_retried(library: LocalPapers) -> None:
    async def search_many(service: ServicePapers) -> list[int]:
        found = await asyncio.gather(*(service.search(kind, 3) for kind in synthetic.TASKS))
        return [len(each) for each in found]

    with serving_papers(library, PaperLimits(max_running=2)) as address:
        assert ask(address, search_many, attempts=8, backoff_seconds=0.2) == [3] * 6


# The client


def test_equal_requests_are_asked_once() -> None:
    async def repeat(service: ServicePapers) -> list[int]:
        found = await asyncio.gather(*(service.search("a", 5) for _ in range(4)))
        return [len(each) for each in [*found, await service.search("a", 5)]]

    with canned(EMPTY, body("One", "Two")) as (address, service):
        assert ask(address, repeat) == [2] * 5
    assert len(service.asked) == 2  # the first was to see whether anybody answers


def test_a_call_that_gives_up_does_not_take_the_answer_from_the_others(url: str) -> None:
    async def race(service: ServicePapers) -> int:
        first, second = (asyncio.create_task(service.search("parsing", 3)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return len(await second)

    assert ask(url, race) == 3


def test_temporary_failures_are_retried() -> None:
    with canned(EMPTY, Canned(429, b"slow down", "0"), Canned(503), body("One")) as (address, service):
        assert len(ask(address, lambda source: source.search("a", 5))) == 1
    assert len(service.asked) == 4


@pytest.mark.parametrize(
    ("answer", "problem", "message"),
    [
        (Canned(429, b"slow down", "0"), "unavailable", "429: slow down"),
        (Canned(429, b"", "3600"), "unavailable", "asks to wait 3600 s"),
        (Canned(500, b"oops"), "unavailable", "after 3 attempts"),
        (Canned(403, b"no key"), "refused", "403: no key"),
        (Canned(404), "unknown_paper", "does not know this paper"),
        (Canned(body=b'{"data": ['), "unreadable", "no JSON"),
        (Canned(body=b"<html>\xff"), "unreadable", "no JSON"),
        (Canned(body=b"[" * 5000), "unreadable", "no JSON"),
        (Canned(body=b"[1, 2]"), "unreadable", "a list instead of an object"),
        (Canned(body=b'{"papers": []}'), "unreadable", "no list of papers in 'data'"),
        (Canned(body=b'{"data": {"a": 1}}'), "unreadable", "no list of papers"),
        (Canned(body=b'{"data": [1, "x"]}'), "unreadable", "no list of papers"),
        (Canned(body=b" " * 8_000_001), "unreadable", "more than 8,000,000 bytes"),
    ],
)
def test_whatever_the_service_does_the_policy_reads_what_is_wrong(answer: Canned, problem: str, message: str) -> None:
    with canned(EMPTY, answer) as (address, _), pytest.raises(SourceError, match=message) as raised:
        ask(address, lambda service: service.search("a", 5))
    assert raised.value.problem == problem
    assert len(str(raised.value)) < 400


def test_records_without_id_or_title_and_withheld_lists_are_passed_over() -> None:
    records = [
        {"paperId": None, "title": "a"}, {"paperId": "1", "title": None}, {"paperId": "2", "title": " "}, {},
        {"paperId": "3", "title": "Half \ud800 a\npair", "abstract": None, "year": "old", "authors": [0, {"name": 7}]},
    ]  # fmt: skip
    with canned(EMPTY, Canned(body=json.dumps({"data": records}).encode())) as (address, _):
        [kept] = ask(address, lambda service: service.search("a", 5))
    assert kept == Paper(paper_id="3", title="Half ? a pair", authors=("",))
    withheld = Canned(body=b'{"data": null}')
    with (
        canned(EMPTY, withheld, withheld, body("x")) as (address, _),
        pytest.raises(SourceError, match="recommendedPapers"),  # neither references nor citations: asked for these
    ):
        ask(address, lambda service: service.expand(Paper(paper_id="1", title="x"), 5))


def test_a_service_that_sends_too_much_or_unusable_ids_costs_nothing_but_these_papers() -> None:
    records = [{"paperId": paper_id, "title": "x" * 5000} for paper_id in ("\ud800", "1" * 70_000, "a", "b", "c", "d")]
    with canned(EMPTY, Canned(body=json.dumps({"data": records}).encode())) as (address, _):
        found = ask(address, lambda service: service.search("a", 2))
    assert [(each.paper_id, each.title) for each in found] == [("a", "x" * 1000), ("b", "x" * 1000)]
    similar = Canned(body=json.dumps({"recommendedPapers": records}).encode())
    with canned(EMPTY, EMPTY, EMPTY, similar) as (address, _):
        related = ask(address, lambda service: service.expand(Paper(paper_id="1", title="x"), 3))
    assert [each.paper_id for each in related.papers] == ["a", "b", "c"]


def test_the_key_is_sent_and_ids_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAPER_KEY", "secret")
    with canned(EMPTY, body("x")) as (address, service), pytest.raises(SourceError):
        ask(address, lambda source: source.expand(Paper(paper_id="a/b?c", title="x"), 5), api_key_variable="PAPER_KEY")
    assert {headers["x-api-key"] for headers in service.headers} == {"secret"}
    assert all("/paper/a%2Fb%3Fc/" in path or "forpaper/a%2Fb%3Fc" in path for path in service.asked[1:])


def test_a_service_that_is_not_there_stops_a_run_before_it_begins() -> None:
    with canned(EMPTY) as (address, _):
        pass
    with pytest.raises(ConfigError, match="agent-r1 search papers"):
        ask(address, lambda service: service.search("a", 5))


@pytest.mark.parametrize("bad", ["localhost:8200", "ftp://host", "http://", "http://host/paper", "http://host/?a=b"])
def test_addresses_that_are_none_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a paper service"):
        ServicePapers(bad)


@pytest.mark.parametrize(
    "settings", [{"attempts": 0}, {"requests_per_second": 0.0}, {"max_wait": -1.0}, {"api_key_variable": "NO_SUCH_KEY"}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServicePapers("http://localhost:1", **settings)


# An episode


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode_loses_nothing_when_the_service_dies_and_comes_back(library: LocalPapers) -> None:
    row = task.as_row(synthetic.queries("test")[0], "test")

    async def play(tools: list[Search | Expand], stop: Callable[[], object]) -> list[Transition]:
        env = PaperSearch(tools=tools)
        await env.reset(row)
        before = await env.step(Action(text=call("search", query="parsing"), token_ids=[]))
        stop()
        broken = await env.step(Action(text=call("search", query="tagging") + call("expand", paper_id=1), token_ids=[]))
        again = await env.step(Action(text=call("search", query="parsing"), token_ids=[]))
        await env.close()
        return [before, broken, again]

    async def run() -> list[Transition]:
        served = serving_papers(library)
        search = Search(url=served.__enter__(), service=QUICK)
        async with opened([search]):
            return await play([search, Expand()], lambda: served.__exit__(None, None, None))

    before, broken, again = asyncio.run(run())
    assert before.reward > 0
    assert [record.fault for record in broken.calls] == ["failed", "failed"]
    assert all("unavailable: the paper service failed" in record.result for record in broken.calls)
    assert broken.reward == 0
    assert not broken.terminated
    assert broken.observation is not None
    assert broken.observation.messages is not None
    shown = str(broken.observation.messages[-1]["content"])
    assert "### Papers (10 found)" in shown
    assert "The list is unchanged" in shown
    assert again.calls[0].info["problem"] == "repeated_query"  # from the cache


def test_the_command_serves_a_library_until_it_is_stopped(library: LocalPapers) -> None:
    words = ["search", "papers", "--data", str(library.folder.parent), "--port", "0"]
    with subprocess.Popen([sys.executable, "-m", "agent_r1.cli", *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert said.startswith("72 papers at http://127.0.0.1:")
            found = httpx.get(f"{said.split()[-1]}/graph/v1/paper/search", params={"query": "parsing"}).json()
            assert len(found["data"]) == 10
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode in (0, -signal.SIGTERM)


def test_the_command_refuses_what_it_cannot_serve(cli: Cli, tmp_path: Path) -> None:
    result = cli("search", "papers", "--data", tmp_path)
    assert result.code == 2
    assert "agent-r1 data recipe paper_search" in " ".join(result.err.split())
    assert "rate must be positive" in cli("search", "papers", "--rate", "0").err
