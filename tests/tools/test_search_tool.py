"""The tool: what a model is shown, what is refused when it is made, and that calls are gathered."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_r1.envs.check import check_tool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tools.base import Returned, ToolCall
from agent_r1.tools.runner import ToolOutcome, run_tool
from agent_r1.tools.search.client import RETRY_SECONDS, SECONDS_PER_ATTEMPT, SearchUnavailable
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Index
from agent_r1.tools.search.lexical import LexicalSettings
from agent_r1.tools.search.server import ServerLimits
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


def test_what_finds_nothing_is_told_so(index: Index) -> None:
    assert [outcome.text for outcome in ask(SearchTool(index=index.directory), "zzz", "   ")] == [NOTHING_FOUND] * 2


def test_line_breaks_of_a_passage_and_endless_queries_do_no_harm(tmp_path: Path) -> None:
    corpus = [Passage(passage_id="a", title="T", text="one\n\ntwo  three")]
    tool = SearchTool(index=Index.build(corpus, tmp_path / "i", lexical=LexicalSettings()).directory)
    assert [outcome.text for outcome in ask(tool, "one " * 10_000)] == ["[1] T: one two three"]


def test_concurrent_calls_are_one_batch_and_each_gets_its_own(index: Index) -> None:
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
    monkeypatch.setattr(Index, "open", lambda directory: held)
    monkeypatch.setattr("agent_r1.tools.search.tool._OPEN", {})
    held.go.clear()

    async def release_later() -> ToolOutcome:
        searching = asyncio.create_task(run_tool(SearchTool(index=index.directory), {"query": "moon"}, {}))
        while not held.begun.is_set():
            await asyncio.sleep(0.001)  # would never be reached if the search held the loop
        held.go.set()
        return await searching

    assert asyncio.run(release_later()).info == {"titles": ["Moon"]}


def test_a_tool_that_cannot_work_is_refused_when_it_is_made(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs either an index or a url"):
        SearchTool()
    with pytest.raises(ConfigError, match="needs either an index or a url"):
        SearchTool(index=index.directory, url="http://localhost:1")
    with pytest.raises(ConfigError, match="agent-r1 search build"):
        SearchTool(index=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="supports lexical, not hybrid"):
        SearchTool(index=index.directory, kind="hybrid")
    with pytest.raises(ConfigError, match="top_k and max_chars of at least 1"):
        SearchTool(index=index.directory, top_k=0)
    with pytest.raises(ConfigError, match="'localhost:8100'"):
        SearchTool(url="localhost:8100")


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


@pytest.mark.parametrize("most", [512, 100])
def test_more_calls_at_once_than_a_server_takes_in_one_request_are_all_answered(index: Index, most: int) -> None:
    async def play(tool: SearchTool) -> list[Transition]:
        envs = [ToolEnv(tools=[tool]) for _ in range(600)]
        await asyncio.gather(*(env.reset(TaskRow(prompt=[{"role": "user", "content": "?"}])) for env in envs))
        text = '<tool_call>{"name": "search", "arguments": {"query": "moon"}}</tool_call>'
        return await asyncio.gather(*(env.step(Action(text=text, token_ids=[])) for env in envs))

    with serving(index, ServerLimits(max_queries=most)) as url:
        played = asyncio.run(play(SearchTool(url=url)))
    assert [step.calls[0].info for step in played] == [{"titles": ["Moon"]}] * 600


def test_a_server_is_asked_when_the_tool_is_made_and_not_when_a_worker_gets_it(index: Index) -> None:
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


def test_a_server_that_is_gone_fails_the_call_and_is_not_asked_for_each_again(index: Index) -> None:
    with serving(index) as url:
        tool = SearchTool(url=url, retry_seconds=0.5)
    results = asyncio.run(tool.batch_execute([ToolCall(args={"query": name}) for name in ("a", "b")]))
    assert all(isinstance(result, SearchUnavailable) for result in results)
    with pytest.raises(SearchUnavailable, match=r"no answer in \d\.\d s \(\d attempts?, retry_seconds=0.5\)"):
        ask(tool, "a")


def test_a_call_outlasts_its_client_so_that_a_silent_server_is_a_failure_and_no_result(index: Index) -> None:
    with serving(index) as url:
        for retry_seconds in (10.0, 1000.0):
            # The last attempt may start when retry_seconds are over.
            assert SearchTool(url=url, retry_seconds=retry_seconds).timeout > retry_seconds + SECONDS_PER_ATTEMPT
        assert SearchTool(url=url).timeout > RETRY_SECONDS + SECONDS_PER_ATTEMPT
    assert ServerLimits().seconds < SECONDS_PER_ATTEMPT


def test_retry_seconds_that_have_no_effect_or_no_sense_are_refused(index: Index) -> None:
    with pytest.raises(ConfigError, match="retry_seconds needs a server"):
        SearchTool(index=index.directory, retry_seconds=5)
    for retry_seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"at least 0 and finite, got {retry_seconds}"):
            SearchTool(url="http://127.0.0.1:1", retry_seconds=retry_seconds)


def test_the_limits_of_a_server_are_positive() -> None:
    with pytest.raises(ConfigError, match="max_batch must be positive"):
        ServerLimits(max_batch=0)
    for seconds in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="seconds must be positive and finite"):
            ServerLimits(seconds=seconds)
