"""The recipe `paper_search`: rewards by hand, the list and its calls, the environment, the data and the agents.

Nothing here needs the real data; where $AGENT_R1_SHARED_DATA names a folder that has them, they are checked too.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import math
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from agent_r1.config import load_config
from agent_r1.data.panels import panel_hash
from agent_r1.envs.check import check_env, check_tool
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.paper_search import agents, data, synthetic, task
from agent_r1.recipes.paper_search.anthology import read_anthology, read_collection
from agent_r1.recipes.paper_search.corpus import SIMILAR, LocalPapers, build_library, open_library
from agent_r1.recipes.paper_search.env import PaperSearch
from agent_r1.recipes.paper_search.papers import Paper, PaperSource, Related, SourceError, title_key
from agent_r1.recipes.paper_search.pool import Library, Pool
from agent_r1.recipes.paper_search.queries import Query, training_queries
from agent_r1.recipes.paper_search.selector import LexicalSelector, ModelSelector, Selector, make_selector
from agent_r1.recipes.paper_search.tools import Expand, Search
from agent_r1.tools.base import ToolError, ToolResult
from agent_r1.tools.search.dense import DenseSettings, EncoderSettings
from agent_r1.tools.search.index import KINDS, Kind
from agent_r1.types import Action, Observation, Step, StopReason, TaskRow, ToolCallRecord, Trajectory, Transition
from tests.conftest import Cli


def paper(number: int, **fields: Any) -> Paper:
    return Paper(**{"paper_id": f"id{number}", "title": f"Title {number}", **fields})


class Scripted(PaperSource):
    """Finds what it is told to, after as many rounds of the event loop as it is told to wait."""

    def __init__(self, found: Mapping[str, Sequence[Paper]], waits: dict[str, int] | None = None) -> None:
        self.found, self.waits = found, waits or {}

    async def search(self, query: str, limit: int) -> Sequence[Paper]:
        for _ in range(self.waits.get(query, 0)):
            await asyncio.sleep(0)
        if query == "down":
            raise SourceError("unavailable", "the service did not answer")
        return self.found.get(query, [])[:limit]

    async def expand(self, paper: Paper, limit: int) -> Related:
        return Related(papers=self.found.get(paper.title, [])[:limit], how="near")


class ByNumber(Selector):
    """Scores paper 7 with 0.7."""

    async def scores(self, question: str, papers: Sequence[Paper]) -> list[float]:
        return [int(paper.title.split()[1]) / 10 for paper in papers]


def make_pool(found: Mapping[str, Sequence[Paper]], waits: dict[str, int] | None = None, **settings: Any) -> Pool:
    pool = Pool(Library(source=Scripted(found, waits), selector=ByNumber(), **settings))
    pool.begin("question")
    return pool


ROOT = Path(__file__).parents[2]


# Process rewards


def test_a_call_earns_the_three_best_scores_among_its_new_papers() -> None:
    pool = make_pool({"a": [paper(number) for number in (2, 9, 4, 5)], "b": [paper(9), paper(3)]}, call_cost=0.05)

    async def play() -> list[ToolResult]:
        return [await pool.search("a"), await pool.search("b"), await pool.search("nothing")]

    first, second, third = asyncio.run(play())
    assert first.reward == pytest.approx(0.9 + 0.5 + 0.4 - 0.05)  # 0.2 is the fourth
    assert second.reward == pytest.approx(0.3 - 0.05)  # 9 is not new
    assert third.reward == pytest.approx(-0.05)
    assert first.info["found"] == [["title 2", 0.2], ["title 9", 0.9], ["title 4", 0.4], ["title 5", 0.5]]
    assert second.info["new"] == 1


def test_bad_calls_cost_half_a_point_and_change_nothing() -> None:
    pool = make_pool({"a": [paper(5)], "Title 5": [paper(6)]})

    async def play() -> list[ToolResult]:
        said = [await pool.search("a"), await pool.search(" A "), await pool.expand(1)]  # not shown yet
        pool.show(new=1, expanded=1)
        return [*said, await pool.expand(1), await pool.expand(1), await pool.expand(2), await pool.search("  ")]

    results = asyncio.run(play())
    assert [result.reward for result in results] == [0.5, -0.5, -0.5, 0.6, -0.5, -0.5, -0.5]
    problems = [result.info.get("problem") for result in results]
    unknown = "unknown_paper"
    assert problems == [None, "repeated_query", unknown, None, "expanded_before", unknown, "empty_query"]
    assert [entry.paper.title for entry in pool.papers.entries] == ["Title 5", "Title 6"]


def test_papers_that_do_not_fit_and_papers_with_a_known_title_are_not_kept() -> None:
    copy = paper(5, paper_id="elsewhere", title="title: 5!")
    pool = make_pool({"a": [paper(0), paper(5), replace(copy, title="TITLE 5")]})
    assert asyncio.run(pool.search("a")).info["found"] == [["title 5", 0.5]]


def test_a_failing_source_is_told_and_costs_nothing() -> None:
    pool = make_pool({"a": [paper(5)]})

    async def play() -> None:
        await pool.search("a")
        with pytest.raises(ToolError, match="unavailable: the service did not answer"):
            await pool.search("down")
        with pytest.raises(ToolError):  # not a repeated query: it was never answered
            await pool.search("down")

    asyncio.run(play())
    assert len(pool.papers.entries) == 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=6))
def test_overlapping_calls_give_what_they_give_one_after_another(calls: list[tuple[str, int]]) -> None:
    found = {"a": [paper(1), paper(2)], "b": [paper(2), paper(9)], "c": [paper(9), paper(4), paper(1)]}

    async def play(overlap: bool) -> tuple[list[float | None], list[str]]:
        pool = make_pool(found, dict(calls))
        if overlap:
            results = await asyncio.gather(*(pool.search(query) for query, _ in calls))
        else:
            results = [await pool.search(query) for query, _ in calls]
        return [result.reward for result in results], [entry.paper.title for entry in pool.papers.entries]

    assert asyncio.run(play(True)) == asyncio.run(play(False))


def test_a_cancelled_call_does_not_block_the_calls_after_it() -> None:
    pool = make_pool({"slow": [paper(1)], "fast": [paper(2)]}, {"slow": 10_000})

    async def play() -> ToolResult:
        slow = asyncio.create_task(pool.search("slow"))
        await asyncio.sleep(0)
        fast = asyncio.create_task(pool.search("fast"))
        await asyncio.sleep(0)
        slow.cancel()
        return await fast

    assert asyncio.run(play()).reward == pytest.approx(0.2)


# Outcome rewards


def record(found: Sequence[tuple[str, float]], reward: float = 0.0, **fields: Any) -> ToolCallRecord:
    info = {"found": [list(each) for each in found], **fields.pop("info", {})}
    return ToolCallRecord(name="search", arguments={}, result="", text_span=(0, 1), reward=reward, info=info, **fields)


def episode(*steps: Sequence[ToolCallRecord]) -> Trajectory:
    made = [
        Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text="", calls=tuple(calls))
        for calls in steps
    ]
    return Trajectory(row_id="r", trajectory_id="t", steps=made, stop=StopReason.MAX_STEPS)


ROW = TaskRow(prompt=[{"role": "user", "content": "q"}], reward_model={"ground_truth": ["a", "b", "c", "d"]})


def test_the_reward_reports_its_components_by_hand() -> None:
    repeated = record([], -0.5, info={"problem": "repeated_query"})
    unknown = record([], -0.5, info={"problem": "unknown_paper"})
    played = episode(
        [record([("a", 0.9), ("x", 0.3), ("y", 0.1)], 1.3), repeated],
        [record([("b", 0.2), ("c", 0.25)], 0.45), unknown, record([], error="unavailable", fault="failed")],
    )
    # found: a b c of a b c d. Scored at least 0.25: a x c, of which 2 are gold
    parts = {
        "recall": 3 / 4,
        "precision": 2 / 3,
        "recall_selected": 2 / 4,
        "f1": 2 * 2 / (4 + 3),
        "found": 5,
        "calls": 5,
        "earned": 1.3 - 0.5 + 0.45 - 0.5,
        "repeated": 1,
        "bad_expands": 1,
        "failed": 1,
    }
    assert asyncio.run(task.reward_recall(ROW, played)) == pytest.approx({"reward": 3 / 4, **parts})
    assert asyncio.run(task.reward_f1(ROW, played)) == pytest.approx({"reward": 4 / 7, **parts})
    assert asyncio.run(task.reward_process(ROW, played)) == pytest.approx({"reward": 0.0, **parts})


def test_the_gold_papers_alone_score_full_and_nothing_scores_nothing() -> None:
    gold = episode([record([(key, 1.0) for key in "abcd"], 3.0)])
    assert {task.parts_of(ROW, gold)[name] for name in ("recall", "precision", "recall_selected", "f1")} == {1.0}
    nothing = task.parts_of(ROW, episode())
    assert (nothing["recall"], nothing["precision"], nothing["f1"]) == (0, 0, 0)


# The local library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> LocalPapers:
    return synthetic.open_synthetic(tmp_path_factory.mktemp("papers") / "library")


def test_expand_follows_references_in_both_directions(library: LocalPapers) -> None:
    papers = synthetic.papers()
    related = asyncio.run(library.expand(papers[40], 5))
    assert {each.paper_id for each in related.papers} == {"p9", "p71"}  # 40 - 31, and 71 - 31 = 40
    assert related.how == "cites or is cited by it"


def test_without_references_expand_says_so_and_finds_authors_text_and_venue(tmp_path: Path) -> None:
    about = "neural parsing of river dialects"
    papers = [
        paper(1, title="Parsing river dialects", abstract=about, authors=("Ada B",), venue="V", year=2010),
        paper(2, title="River dialects again", abstract=about, authors=("Cleo D",), venue="V"),
        paper(3, title="Sparse matrices", abstract="unrelated", authors=("Ada B", "Bo C"), venue="W", year=2011),
        paper(4, title="Old looms", abstract="weaving", authors=("Ada B",), venue="W", year=1990),
        paper(5, title="Moon", abstract="nobody", authors=("Elin F",), venue="V"),
    ]
    made = build_library(papers, tmp_path / "library")
    related = asyncio.run(made.expand(papers[0], 10))
    assert related.how == SIMILAR
    # Similar and of the same venue; then by the same author, nearer in time first. The moon has nothing in common.
    assert [each.paper_id for each in related.papers] == ["id2", "id3", "id4"]
    assert [each.paper_id for each in asyncio.run(made.expand(papers[0], 1)).papers] == ["id2"]


def test_a_library_keeps_every_field_and_is_opened_once(tmp_path: Path) -> None:
    full = Paper(
        paper_id="x-1", title="One", abstract="two", year=2001, authors=("A", "B"), venue="V", references=("y",)
    )
    made = build_library([full, paper(2)], tmp_path / "library")
    assert [made[0], made[1]] == [full, paper(2)]
    assert open_library(tmp_path / "library") is made
    build_library([paper(3)], tmp_path / "library")
    assert open_library(tmp_path / "library").titles == ["Title 3"]


def test_a_missing_or_damaged_library_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent-r1 data recipe paper_search"):
        open_library(tmp_path)
    build_library([paper(1)], tmp_path / "library")
    (tmp_path / "library" / "papers.parquet").write_bytes(b"cut off")
    with pytest.raises(DataError, match="cannot be read"):
        open_library(tmp_path / "library")


def test_rare_words_weigh_more(library: LocalPapers) -> None:
    [name, kind, extends, unknown] = library.weights(["albi", "pars", "extend", "zebra"])
    # 72 papers: one is called Alby, 12 are about parsing, and all extend something
    assert name == unknown == 1.0
    assert extends == 0.0
    assert kind == pytest.approx(math.log(72 / 12) / math.log(72))


# Selectors


def test_the_lexical_score_by_hand() -> None:
    selector = LexicalSelector(lambda stems: [{"river": 1.0, "dialect": 0.5, "neural": 0.5}[stem] for stem in stems])
    rate = lambda **fields: selector.rate("Which papers study neural river dialects?", [paper(1, **fields)])[0]  # noqa: E731
    assert rate(title="Neural river dialects", abstract="x") == pytest.approx(1.0)
    assert rate(title="The river", abstract="Of dialects.") == pytest.approx((0.65 * 1.5 / 2 + 0.35 * 1 / 2) ** 2)
    assert rate(title="The river") == pytest.approx((1 / 2) ** 2)  # no abstract: the title alone
    assert rate(title="Moon", abstract="Nobody") == 0.0
    assert selector.rate("Which papers?", [paper(1)]) == [0.0]  # asks for nothing


def save_tokenizer(folder: Path) -> int:
    words = ["[PAD]", "[UNK]", "river", "moon", "title"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return len(words)


@pytest.mark.parametrize(("kind", "labels"), [("embedding", 0), ("cross_encoder", 1), ("cross_encoder", 2)])
def test_a_model_scores_in_batches_what_it_scores_alone(kind: str, labels: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(
        vocab_size=save_tokenizer(tmp_path), max_position_embeddings=64, num_labels=labels or 2, **sizes
    )
    (BertForSequenceClassification if labels else BertModel)(config).save_pretrained(tmp_path)
    selector = make_selector(kind, Scripted({}), str(tmp_path))
    assert isinstance(selector, ModelSelector)
    papers = [paper(1), paper(2, title="River"), paper(3, title="Moon", abstract="river river"), paper(1)]

    async def score() -> tuple[list[float], list[list[float]]]:
        await selector.open()
        alone = [await selector.scores("river title", [each]) for each in papers]
        together = await asyncio.gather(*(selector.scores("title river", [each]) for each in papers))
        again = await selector.scores("title river", papers)
        assert again == [scores[0] for scores in together]
        await selector.close()
        return await fresh(), alone

    async def fresh() -> list[float]:
        other = make_selector(kind, Scripted({}), str(tmp_path))
        await other.open()
        scores = await other.scores("river title", papers)
        await other.close()
        return scores

    together, alone = asyncio.run(score())
    assert together == pytest.approx([scores[0] for scores in alone], abs=1e-5)
    assert all(0 <= score <= 1 for score in together)
    assert len(set(together)) == 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vocabulary = save_tokenizer(folder)
    BertModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


def test_a_library_with_an_encoder_is_searched_by_meaning_or_both(encoder: Path, tmp_path: Path) -> None:
    dense = DenseSettings(encoder=EncoderSettings(model=str(encoder), pooling="mean"))
    papers = [paper(1, title="river"), paper(2, title="moon"), paper(3, title="title")]
    build_library(papers, tmp_path / "library", dense=dense)
    kinds: dict[Kind, list[str]] = {
        kind: [each.paper_id for each in open_library(tmp_path / "library", kind).find("moon", 3)] for kind in KINDS
    }
    assert kinds["lexical"] == ["id2"]
    assert kinds["dense"][0] == kinds["hybrid"][0] == "id2"
    assert len(kinds["dense"]) == len(kinds["hybrid"]) == 3


def test_selector_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown selector 'lexcal'.*lexical"):
        make_selector("lexcal", Scripted({}))
    with pytest.raises(ConfigError, match="need a model"):
        make_selector("cross_encoder", Scripted({}))
    with pytest.raises(ConfigError, match="need a model"):
        make_selector("lexical", Scripted({}), "some/model")


# The environment


@pytest.fixture(scope="module")
def tools(library: LocalPapers) -> list[Search | Expand]:
    return [Search(library=library.folder), Expand()]


def row_of(query: Query) -> TaskRow:
    return task.as_row(query, "test")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env: PaperSearch, row: TaskRow, said: Sequence[str]) -> tuple[list[str], list[Transition]]:
    """Return what the policy was shown, the first observation included, and the transitions."""

    async def run() -> tuple[list[str], list[Transition]]:
        shown, transitions = [_text(await env.reset(row))], []
        for text in said:
            transitions.append(await env.step(Action(text=text, token_ids=[])))
            if transitions[-1].observation is not None:
                shown.append(_text(transitions[-1].observation))
        await env.close()
        return shown, transitions

    return asyncio.run(run())


def _text(observation: Observation) -> str:
    assert observation.messages is not None
    assert [message["role"] for message in observation.messages] == ["system", "user"]
    return str(observation.messages[-1]["content"])


QUERY = synthetic.queries("test")[0]


def test_every_observation_is_written_anew_from_the_list(tools: list[Search | Expand]) -> None:
    older, kind = QUERY.text.split()[3].rstrip("?"), QUERY.text.split()[1]
    said = [call("search", query=older), call("expand", paper_id=1) + call("search", query=older), "done"]
    env = PaperSearch(tools=tools, shown_new=2, shown_expanded=1, abstract_chars=30)
    shown, transitions = play(env, row_of(QUERY), said)
    assert shown[0] == f"### Question\n{QUERY.text}"
    lines = shown[1].splitlines()
    assert lines[2:5] == ["### Calls so far", f"search {older}: found 1 papers, 1 of them new", "### Papers (1 found)"]
    assert lines[5].startswith("[1] (")
    assert f"[NEW] {older} for" in lines[5]
    assert said[0] not in shown[2]  # its own words are not shown again
    assert f"### Problems\nsearch {older}: you searched for this before" in shown[2]
    assert "[EXP]" in next(line for line in shown[2].splitlines() if line.startswith("[1] ("))
    assert f"for {kind}: It extends earlier" in shown[2]
    assert [len(each.calls) for each in transitions] == [1, 2, 0]
    assert transitions[1].calls[1].reward == -0.5
    assert transitions[1].reward == sum(record.reward for record in transitions[1].calls)
    assert transitions[2].terminated
    assert len(shown) == 3


def test_the_list_shows_the_best_of_each_kind_and_long_prompts_stay_short(tools: list[Search | Expand]) -> None:
    said = [call("search", query=f"{kind}") for kind in synthetic.TASKS] + [call("expand", paper_id=3)]
    shown, _ = play(PaperSearch(tools=tools, shown_new=4, shown_expanded=2), row_of(QUERY), said)
    listed = [line for line in shown[-1].splitlines() if line.startswith("[")]
    assert [line.split("] ")[1].split("[")[1] for line in listed] == ["NEW", "NEW", "NEW", "NEW", "EXP"]
    scores = [float(line.partition("(")[2].partition(")")[0]) for line in listed[:4]]
    assert scores == sorted(scores, reverse=True)


def test_the_environment_keeps_its_contract(tools: list[Search | Expand]) -> None:
    said = [
        call("search", query="parsing") + call("search", query="Alby") + call("search", query="parsing"),
        call("expand", paper_id=2)
        + call("expand", paper_id=2)
        + call("expand", paper_id=99)
        + call("serch", query="a"),
        '<tool_call>{"name": "search"</tool_call>',
        call("expand", paper_id="two") + call("search", query=7),
        "done",
    ]
    asyncio.run(check_env(lambda: PaperSearch(tools=tools), row_of(QUERY), said))


def test_the_tools_keep_their_contract(library: LocalPapers, tools: list[Search | Expand]) -> None:
    pool = Pool(Search(library=library.folder).library)
    asyncio.run(check_tool(tools[0], {"query": "parsing"}, {"pool": pool}))
    asyncio.run(check_tool(tools[1], {"paper_id": 1}, {"pool": pool}))


def test_bad_calls_become_text_and_lose_nothing(tools: list[Search | Expand]) -> None:
    said = [
        call("search", query="parsing"),
        call("expand", paper_id=10**40) + call("expand", paper_id=-1) + call("expand", paper_id="x"),
        call("search", query="\udcff \x00 '; drop table papers"),
        '<tool_call>{"name": "expand", "arguments": {"paper_id": ',
    ]
    shown, transitions = play(PaperSearch(tools=tools), row_of(QUERY), said)
    assert [each.reward for each in transitions[1].calls] == [-0.5, -0.5, 0.0]
    assert transitions[1].calls[2].fault == "bad_arguments"
    assert transitions[3].calls[0].fault == "malformed"
    assert all("### Papers (10 found)" in text for text in shown[1:])
    assert not any(transition.terminated for transition in transitions)


def test_more_than_five_calls_at_once_are_refused(tools: list[Search | Expand]) -> None:
    text = "".join(call("search", query=kind) for kind in synthetic.TASKS)
    _, [transition] = play(PaperSearch(tools=tools), row_of(QUERY), [text])
    assert [each.error is None for each in transition.calls] == [True] * 5 + [False]


def test_settings_that_make_no_sense_are_refused(library: LocalPapers, tools: list[Search | Expand]) -> None:
    with pytest.raises(ConfigError, match="shown_new must be at least 1, got 0"):
        PaperSearch(tools=tools, shown_new=0)
    with pytest.raises(ConfigError, match="needs the tool tools"):
        PaperSearch(tools=[Expand()])
    with pytest.raises(ConfigError, match="either a library or a url"):
        Search()
    with pytest.raises(ConfigError, match="set url, or remove it"):
        Search(library=library.folder, service={"attempts": 2})
    with pytest.raises(ConfigError, match="a service chooses itself"):
        Search(url="http://localhost:1", kind="lexical")
    with pytest.raises(ConfigError, match="per_search"):
        Search(library=library.folder, per_search=0)


# Agents


def test_the_expert_finds_every_synthetic_paper_and_earns_the_full_reward(
    library: LocalPapers, tools: list[Search | Expand]
) -> None:
    shown = [(query, agents.demonstrate(query, library)) for query in synthetic.queries("test")]
    assert [query for query, said in shown if said is None or said[-1] != "done"] == []
    query, said = shown[-1]
    assert said is not None
    _, transitions = play(PaperSearch(tools=tools), row_of(query), said)
    assert [each.error for transition in transitions for each in transition.calls if each.error] == []
    assert task.parts_of(row_of(query), episode(*(each.calls for each in transitions)))["recall"] == 1.0


def test_an_agent_sees_the_numbers_and_rewards_of_the_environment(
    library: LocalPapers, tools: list[Search | Expand]
) -> None:
    visit = agents.Visit(QUERY.text, library)
    first = [agents.Call("parsing"), agents.Call("Alby for"), agents.Call(QUERY.text)]
    visit.make(first)
    second = [agents.Call(4), agents.Call(7)]
    visit.make(second)
    env = PaperSearch(tools=tools)
    shown, _ = play(env, row_of(QUERY), visit.said)
    assert env.pool.papers.entries == visit.papers.entries
    assert visit.text.splitlines()[1:] == [line for line in shown[-1].splitlines() if line.startswith("[")]


def test_the_expert_gives_up_when_nothing_it_can_read_leads_to_the_paper(tmp_path: Path) -> None:
    papers = [paper(1, title="Parsing rivers", abstract="about rivers"), paper(2, title="Looms", abstract="weaving")]
    made = build_library(papers, tmp_path / "library")
    assert agents.demonstrate(Query(text="Which work parses rivers?", gold=("looms",), kind="claim"), made) is None
    assert agents.expert(Query(text="Which work parses rivers?", gold=("looms",), kind="claim"), made)[-1] == "done"


def test_repeating_a_search_never_pays(library: LocalPapers, tools: list[Search | Expand]) -> None:
    played = {}
    for name, agent in (("once", agents.one_search), ("repeat", agents.repeat_search)):
        _, transitions = play(PaperSearch(tools=tools), row_of(QUERY), agent(QUERY, library))
        played[name] = task.parts_of(row_of(QUERY), episode(*(each.calls for each in transitions)))
    assert played["repeat"]["recall"] == played["once"]["recall"]
    assert played["repeat"]["repeated"] == 7
    assert played["repeat"]["earned"] == pytest.approx(played["once"]["earned"] - 7 * 0.5)


# Training questions


def corpus() -> list[Paper]:
    """Papers of which some share a phrase, and some say what they do."""
    kinds = ("wood", "tin", "clay")
    shared = [paper(n, title=f"Study {n} of river dialect parsing", abstract="x") for n in range(3)]
    common = [paper(10 + n, title=f"Note {n}: neural networks", abstract="x") for n in range(9)]
    claims = [
        paper(20 + n, title=f"On {kind}", abstract=f"We present a simple device that turns all {kind} mills by hand.")
        for n, kind in enumerate(kinds)
    ]
    return [*shared, *common, *claims, paper(30, title="Study 9 of river dialect parsing")]


def deep(query: str, limit: int) -> list[str]:
    """A search that finds everything, but nothing among the first ten."""
    return ([""] * 10 + [each.key for each in corpus()])[:limit]


def test_questions_are_topics_of_several_titles_and_claims_of_one_abstract() -> None:
    made = training_queries(corpus(), set(), deep, num_valid=0, num_train=20)
    by_kind = {kind: [query for query in made["train"] if query.kind == kind] for kind in ("topic", "claim")}
    [topic] = by_kind["topic"]  # nine titles have "neural networks", which are too many
    assert "river dialect parsing" in topic.text
    assert sorted(topic.gold) == [f"study {n} of river dialect parsing" for n in range(3)]  # not the one without text
    assert sorted(query.gold for query in by_kind["claim"]) == [("on clay",), ("on tin",), ("on wood",)]
    assert all("presented a simple device that turns all" in query.text for query in by_kind["claim"])


def test_questions_do_not_depend_on_the_order_of_the_papers() -> None:
    one, other = (training_queries(order, set(), deep, num_valid=2) for order in (corpus(), corpus()[::-1]))
    assert {split: [(q.text, sorted(q.gold)) for q in asked] for split, asked in one.items()} == {
        split: [(q.text, sorted(q.gold)) for q in asked] for split, asked in other.items()
    }


def test_no_question_has_a_gold_paper_of_an_evaluation_set_or_of_the_other_split() -> None:
    made = training_queries(corpus(), {"on tin", "study 1 of river dialect parsing"}, deep, num_valid=2)
    gold = {split: {key for query in asked for key in query.gold} for split, asked in made.items()}
    assert gold["valid"] | gold["train"] == {"on clay", "on wood"}
    assert not gold["valid"] & gold["train"]


def test_no_two_questions_have_the_same_words() -> None:
    said = "We present a device that turns all wooden mills by hand."
    twins = [paper(n, title=f"Mill {n}", abstract=said) for n in range(2)]
    made = training_queries(twins, set(), lambda query, limit: ([""] * 10 + ["mill 0", "mill 1"])[:limit])
    assert len([*made["train"], *made["valid"]]) == 1


def test_questions_that_are_too_easy_or_cannot_be_answered_are_left_out() -> None:
    found = [each.key for each in corpus()]
    assert training_queries(corpus(), set(), lambda query, limit: (found[:3] + found[12:15])[:limit])["train"] == []
    assert training_queries(corpus(), set(), lambda query, limit: [])["train"] == []


# Data


XML = b"""<?xml version='1.0' encoding='UTF-8'?>
<collection id="2022.bionlp">
  <volume id="1"><meta><booktitle>Proceedings of <fixed-case>B</fixed-case>io</booktitle><year>2022</year></meta>
    <frontmatter><url>2022.bionlp-1.0</url></frontmatter>
    <paper id="1"><title>Healthcare with <fixed-case>QA</fixed-case></title>
      <author><first>Ada</first><last>B</last></author><author><last>Cleo</last></author>
      <abstract>We propose <i>this</i>.
        See <url>http://x</url>.</abstract></paper>
    <paper id="12"><title>Other</title></paper>
  </volume>
</collection>"""


def test_the_anthology_is_read_without_its_markup() -> None:
    first, second = read_collection(XML)
    assert first == {
        "id": "2022.bionlp-1.1", "title": "Healthcare with QA", "abstract": "We propose this. See http://x.",
        "authors": "Ada B; Cleo", "year": "2022", "venue": "Proceedings of Bio",
    }  # fmt: skip
    assert (second["id"], second["abstract"], second["authors"]) == ("2022.bionlp-1.12", "", "")


@pytest.mark.parametrize(
    ("collection", "volume", "number", "paper_id"),
    [
        ("W02", "1", "11", "W02-0111"),
        ("P18", "1", "1", "P18-1001"),
        ("D19", "50", "3", "D19-5003"),
        ("D19", "1", "3", "D19-1003"),
    ],
)
def test_old_papers_have_their_old_ids(collection: str, volume: str, number: str, paper_id: str) -> None:
    xml = f'<collection id="{collection}"><volume id="{volume}"><paper id="{number}"/></volume></collection>'
    assert next(read_collection(xml.encode()))["id"] == paper_id


def archive(folder: Path, **files: bytes) -> Path:
    with tarfile.open(folder / "archive.tar.gz", "w:gz") as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return folder / "archive.tar.gz"


def test_an_archive_is_read_in_order_without_the_volumes_left_out(tmp_path: Path) -> None:
    def named(name: str) -> bytes:
        return XML.replace(b"2022.bionlp", name.encode())

    files = {f"repo__data__xml__{name}.xml": named(name) for name in ("2022.b", "2021.a", "2023.findings")} | {
        "repo__other__2020.c.xml": named("2020.c")
    }
    ids = [row["id"] for row in read_anthology(archive(tmp_path, **files))]
    assert ids == ["2021.a-1.1", "2021.a-1.12", "2022.b-1.1", "2022.b-1.12"]


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    path = archive(tmp_path, **{"repo__data__xml__a.xml": b"<collection"})
    with pytest.raises(DataError, match="Delete it to fetch it again"):
        list(read_anthology(path))
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="Delete it to fetch it again"):
        list(read_anthology(path))


def test_papers_with_one_title_are_one_paper_and_front_matter_is_left_out() -> None:
    given = [
        paper(1, title="Author Index"),
        paper(2, title=""),
        paper(3, title="A study of rivers"),
        paper(4, title="A Study of: Rivers!", abstract="text"),
        paper(5, title="A study of rivers", abstract="later"),
        paper(5, title="Looms", abstract="weaving"),
        paper(5, title="Mills", abstract="by hand"),
    ]
    assert [(each.paper_id, each.title) for each in data.merge(given)] == [
        ("id4", "A Study of: Rivers!"), ("id5", "Looms"), ("id5-2", "Mills"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like a local copy of the data."""
    folder = tmp_path_factory.mktemp("source")
    papers = [each for each in corpus() if each.paper_id != "id20"]
    columns = {
        "id": [each.paper_id for each in papers],
        "title": [each.title for each in papers],
        "abstract": [each.abstract for each in papers],
        "authors": ["Ada B; Bo C" for _ in papers],
        "year": ["2001" for _ in papers],
        "venue": ["V" for _ in papers],
    }
    pq.write_table(pa.table(columns), folder / "acl_anthology_small.parquet")
    gold = {"paperID": "77", "title": "Weather and mills", "abstract": "Wind.", "author": ["E F"], "year": "20240606"}
    spar = {"question": "What moves mills?", "answer": ["Weather and  mills"], "source_meta": {"answers": [gold]}}
    asked = [
        {"question": "Which work is on tin?", "answer": ["On Tin", "Unknown work"], "qid": "0"},
        {"question": "Which work is unknown?", "answer": ["Unknown work"], "qid": "1"},
        {"question": "Which work moves mills?", "answer": ["Weather and mills"], "qid": "2"},
    ]
    for name, records in ((data.SPAR, [spar]), (data.AUTOSCHOLAR, asked)):
        with gzip.open(folder / f"{name}.gz", "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
    return folder


def test_preparing_from_a_folder_makes_everything_a_run_needs(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data.prepare(tmp_path, said.append, source=source)
    found = {split: data.queries(split, str(tmp_path)) for split in data.SPLITS}
    # Only questions about papers of the Anthology can be asked, and gold papers that are missing do not count.
    assert [(query.text, query.gold) for query in found["autoscholar"]] == [("Which work is on tin?", ("on tin",))]
    assert [(query.text, query.gold) for query in found["spar"]] == [("What moves mills?", ("weather and mills",))]
    made = open_library(tmp_path / data.LIBRARY)
    [added] = made.find("Weather", 5)
    assert (added.paper_id, added.year, added.authors) == ("spar-77", 2024, ("E F",))
    assert any("1 questions" in line for line in said)
    [row] = task.rows("spar", path=str(tmp_path))
    assert row.ground_truth == ["weather and mills"]
    assert sorted(path.name for path in source.iterdir()) == [
        "AutoScholarQuery_test.jsonl.gz", "acl_anthology_small.parquet", "spar_bench.jsonl.gz",
    ]  # fmt: skip


def test_the_command_builds_a_library_that_is_searched_by_meaning(
    source: Path, encoder: Path, tmp_path: Path, cli: Cli
) -> None:
    ended = cli("data", "recipe", "paper_search", "--from", source, "--to", tmp_path, "--encoder-path", encoder)
    assert ended.code == 0, ended.err
    found = {kind: Search(library=tmp_path / data.LIBRARY, kind=kind).library.source for kind in (*KINDS, None)}
    papers = {kind: [each.paper_id for each in asyncio.run(made.search("Weather", 5))] for kind, made in found.items()}
    assert papers["lexical"] == ["spar-77"]
    assert len(papers["dense"]) == 5
    assert papers[None] == papers["hybrid"] != papers["lexical"]
    # The questions are those of a library without an encoder.
    data.prepare(tmp_path / "words", lambda line: None, source=source)
    for split in data.SPLITS:
        assert data.queries(split, str(tmp_path)) == data.queries(split, str(tmp_path / "words"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsm8k", "--encoder", "minilm"], "gsm8k builds no index"),
        (["paper_search", "--encoder", "minlm"], "unknown encoder 'minlm'"),
    ],
)
def test_an_encoder_that_cannot_be_used_is_refused(words: list[str], message: str, tmp_path: Path, cli: Cli) -> None:
    ended = cli("data", "recipe", *words, "--to", tmp_path / "here")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "here").exists()


def test_missing_data_and_unknown_splits_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path))
    with pytest.raises(DataError, match="agent-r1 data recipe paper_search"):
        data.queries("train")
    with pytest.raises(ConfigError, match=r"unknown split 'autoscolar'.*autoscholar"):
        data.queries("autoscolar")
    with pytest.raises(DataError, match=r"no acl_anthology\*.parquet"):
        data.prepare(tmp_path / "a", lambda line: None, source=tmp_path)


def test_title_keys_are_the_words_of_a_title() -> None:
    assert title_key(" BERT: Pre-training of\n Deep_Nets! ") == "bert pre training of deep nets"


@pytest.mark.parametrize("preset", ["outcome", "process", "ppo", "steppo", "spar", "service", "steppo+outcome"])
def test_presets_are_valid(preset: str) -> None:
    config = load_config(f"paper_search/{preset}", [])
    assert config.rewards.process == {"outcome": "ignored", "steppo+outcome": "ignored", "process": "raw"}.get(
        preset, "largest_return"
    )


def test_the_page_shows_the_measured_results() -> None:
    page = (ROOT / "agent_r1/recipes/paper_search/README.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/paper_search_agents.json").read_text(encoding="utf-8"))
    for split, measured in result["splits"].items():
        assert f"{measured['rank_agreement']:.2f} on `{split}`" in page
        for agent in measured["agents"].values():
            recall = f"{agent['recall']:.3f} ± {agent['recall_stderr']:.3f}"
            others = f"{agent['precision']:.3f} | {agent['f1']:.3f} | {agent['earned']:.2f} | {agent['found']:.0f}"
            assert f"| {recall} | {others} | {agent['calls']:.1f} |" in page
    assert {split: result["splits"][split]["panel"] for split in PANELS} == PANELS
    assert result["commit"] in page


SHARED = Path(os.environ.get("AGENT_R1_SHARED_DATA", "/nowhere")) / "paper_search"
PANELS = {"autoscholar": "dacac1801235", "spar": "ba55e7035998"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real data")
def test_the_panels_are_fixed_and_disjoint_from_training(tmp_path: Path) -> None:
    data.prepare(tmp_path, lambda line: None, source=SHARED)
    found = {split: data.queries(split, str(tmp_path)) for split in data.SPLITS}
    assert (len(found["autoscholar"]), len(found["spar"])) == (167, 50)
    assert {split: panel_hash(task.rows(split, path=str(tmp_path))) for split in PANELS} == PANELS
    gold = {split: {key for query in asked for key in query.gold} for split, asked in found.items()}
    assert not (gold["train"] | gold["valid"]) & (gold["autoscholar"] | gold["spar"])
    assert not gold["train"] & gold["valid"]
