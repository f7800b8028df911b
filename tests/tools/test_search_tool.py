"""The search tool: what the model sees, refused settings, batches, and servers that fail."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.check import check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.serve.search_server import ServerLimits
from agent_r1.tools.base import Returned, ToolCall
from agent_r1.tools.runner import ToolOutcome, run_tool
from agent_r1.tools.search.client import SECONDS_PER_ATTEMPT, SearchUnavailable
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Index
from agent_r1.tools.search.lexical import LexicalSettings
from agent_r1.tools.search.tool import NOTHING_FOUND, SearchTool, find_index
from agent_r1.types import Action, TaskRow, Transition
from tests.tools.small_search import HeldIndex, build, serving


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build(tmp_path_factory.mktemp("search") / "index")


def ask(tool: SearchTool, *queries: str) -> list[ToolOutcome]:
    async def all_at_once() -> list[ToolOutcome]:
        return list(await asyncio.gather(*(run_tool(tool, {"query": query}, {}) for query in queries)))

    return asyncio.run(all_at_once())


def test_the_tool_keeps_the_contract(index: Index) -> None:
    asyncio.run(check_tool(SearchTool(index=index.directory), {"query": "river"}))


def test_passages_are_shown_as_numbered_lines_cut_at_a_word(index: Index) -> None:
    [outcome] = ask(SearchTool(index=index.directory, top_k=2, max_chars=18), "who eats frogs")
    # "A heron stands in the river ...": 17 characters are "A heron stands in"; the next word would make it 21
    assert outcome.text == "[1] Heron: A heron stands in ...\n[2] Otter: An otter swims in ..."
    assert outcome.info == {"titles": ["Heron", "Otter"]}


def test_a_search_without_results_says_so(index: Index) -> None:
    assert [outcome.text for outcome in ask(SearchTool(index=index.directory), "zzz", "   ")] == [NOTHING_FOUND] * 2


def test_line_breaks_are_joined_and_long_queries_are_cut(tmp_path: Path) -> None:
    corpus = [Passage(passage_id="a", title="T", text="one\n\ntwo  three")]
    tool = SearchTool(index=Index.build(corpus, tmp_path / "i", lexical=LexicalSettings()).directory)
    assert [outcome.text for outcome in ask(tool, "one " * 10_000)] == ["[1] T: one two three"]


def test_concurrent_calls_are_searched_as_one_batch(index: Index) -> None:
    class Counted(SearchTool):
        sizes: list[int] = []  # noqa: RUF012

        async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
            self.sizes.append(len(calls))
            return await super().batch_execute(calls)

    queries = ["otter", "moon", "flour", "frogs"] * 5
    outcomes = ask(Counted(index=index.directory, top_k=1), *queries)
    assert Counted.sizes == [20]
    expected = {"otter": "Otter", "moon": "Moon", "flour": "Baker", "frogs": "Heron"}
    assert [outcome.info["titles"] for outcome in outcomes] == [[expected[query]] for query in queries]


def test_the_event_loop_goes_on_while_a_search_runs(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldIndex.open(index.directory)
    monkeypatch.setattr("agent_r1.tools.search.tool._open_index", lambda directory, built_ns: held)
    held.go.clear()

    async def release_later() -> ToolOutcome:
        searching = asyncio.create_task(run_tool(SearchTool(index=index.directory), {"query": "moon"}, {}))
        while not held.begun.is_set():
            await asyncio.sleep(0.001)  # would never be reached if the search held the loop
        held.go.set()
        return await searching

    assert asyncio.run(release_later()).info == {"titles": ["Moon"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"index": None}, "either an index or a url"),
        ({"url": "http://localhost:1"}, "either an index or a url"),
        ({"index": "nothing"}, "agent-r1 search build"),
        ({"kind": "hybrid"}, "supports lexical, not hybrid"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"retry_seconds": 5}, "retry_seconds needs a server"),
        ({"index": None, "url": "localhost:8100"}, "'localhost:8100'"),
        ({"index": None, "url": "http://127.0.0.1:1", "retry_seconds": -1}, "retry_seconds .* got -1"),
        ({"index": None, "url": "http://127.0.0.1:1", "retry_seconds": float("nan")}, "retry_seconds .* got nan"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_tool_is_made(
    index: Index, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchTool(**({"index": index.directory} | settings))


def test_a_relative_index_is_looked_up_here_and_then_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert find_index("recipe/index") == tmp_path / "data" / "recipe" / "index"
    (tmp_path / "recipe" / "index").mkdir(parents=True)
    assert find_index("recipe/index") == tmp_path / "recipe" / "index"


def test_a_server_gives_the_same_text_as_its_index(index: Index) -> None:
    queries = ["who eats frogs", "zzz", "mill"]
    with serving(index) as url:
        over_http = ask(SearchTool(url=url, top_k=2), *queries)
    here = ask(SearchTool(index=index.directory, top_k=2), *queries)
    assert [(outcome.text, outcome.info) for outcome in over_http] == [(o.text, o.info) for o in here]


def test_more_calls_than_a_server_accepts_in_one_request_are_split(index: Index) -> None:
    async def play(tool: SearchTool) -> list[Transition]:
        envs = [ToolEnv(tools=[tool]) for _ in range(250)]
        await asyncio.gather(*(env.reset(TaskRow(prompt=[{"role": "user", "content": "?"}])) for env in envs))
        text = '<tool_call>{"name": "search", "arguments": {"query": "moon"}}</tool_call>'
        return await asyncio.gather(*(env.step(Action(text=text, token_ids=[])) for env in envs))

    with serving(index, ServerLimits(max_queries=100)) as url:
        played = asyncio.run(play(SearchTool(url=url)))
    assert [step.calls[0].info for step in played] == [{"titles": ["Moon"]}] * 250


def test_the_server_is_checked_when_the_tool_is_made_but_not_when_it_is_unpickled(index: Index) -> None:
    with serving(index, ServerLimits(max_top_k=8, max_waiting=50)) as url:
        assert SearchTool(url=url, kind="lexical").max_batch == 50  # more could not even wait
        with pytest.raises(ConfigError, match=f"{url} supports lexical, not 'dense'"):
            SearchTool(url=url, kind="dense")
        with pytest.raises(ConfigError, match=r"1 to 8 .* top_k=9"):
            SearchTool(url=url, top_k=9)
        tool = SearchTool(url=url)
    assert pickle.loads(pickle.dumps(tool)).max_batch == 50
    with pytest.raises(SearchUnavailable, match=f"{url}: .*agent-r1 search serve"):
        SearchTool(url=url)


def test_a_server_that_is_gone_fails_the_batch_without_single_retries(index: Index) -> None:
    with serving(index) as url:
        tool = SearchTool(url=url, retry_seconds=0.5)
    results = asyncio.run(tool.batch_execute([ToolCall(args={"query": name}) for name in ("a", "b")]))
    assert all(isinstance(result, SearchUnavailable) for result in results)
    with pytest.raises(SearchUnavailable, match=r"no answer in \d\.\d s \(\d attempts?, retry_seconds=0.5\)"):
        ask(tool, "a")


def test_a_call_outlasts_the_retries_of_its_client(index: Index) -> None:
    with serving(index) as url:
        for retry_seconds in (10.0, 1000.0):
            # The last attempt may start when retry_seconds are over.
            assert SearchTool(url=url, retry_seconds=retry_seconds).timeout > retry_seconds + SECONDS_PER_ATTEMPT
    assert ServerLimits().seconds < SECONDS_PER_ATTEMPT
