"""The generated papers of the recipe `paper_search`: questions, expert, demonstrations and presets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoTokenizer

from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.flows.replay import replay
from agent_r1.recipes.paper_search import generated, task
from agent_r1.recipes.paper_search.agents import one_search
from agent_r1.recipes.paper_search.env import PaperSearch
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.recipes.paper_search.tools import Expand
from agent_r1.types import TaskRow

KINDS = ("places", "uses", "chain")


@pytest.fixture(autouse=True, scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build the library of these papers once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_DATA", str(tmp_path_factory.mktemp("data")))
        yield


def parts(row: TaskRow, texts: Sequence[str]) -> dict[str, float]:
    tools = [generated.GeneratedSearch(), Expand()]
    return task.parts_of(row, asyncio.run(replay(PaperSearch, row, texts, tools=tools)))


def one_of_each_kind(split: str) -> list[Query]:
    asked = generated.queries(split)
    return [next(query for query in asked if query.kind == kind) for kind in KINDS]


def test_questions_of_each_kind_are_equally_many_and_always_the_same() -> None:
    for split, least in (("train", 100), ("test", 40)):
        kinds = Counter(query.kind for query in generated.queries(split))
        assert set(kinds) == set(KINDS)
        assert len(set(kinds.values())) == 1
        assert kinds["uses"] >= least
        assert generated.queries(split) == generated.queries(split)
    with pytest.raises(ConfigError, match=r"unknown split 'tset'.*test"):
        generated.queries("tset")


def test_no_gold_paper_and_no_place_of_a_test_question_is_asked_for_in_training() -> None:
    about = {paper.key: generated.place_of(paper) for paper in generated.papers()}
    gold = {split: {key for query in generated.queries(split) for key in query.gold} for split in generated.SPLITS}
    assert not gold["train"] & gold["test"]
    assert not {about[key] for key in gold["train"]} & {about[key] for key in gold["test"]}
    texts = {split: {query.text for query in generated.queries(split)} for split in generated.SPLITS}
    assert not texts["train"] & texts["test"]


def test_papers_have_different_titles_and_cite_earlier_ones() -> None:
    papers = generated.papers()
    assert len({paper.key for paper in papers}) == len(papers) == generated.COUNT
    assert set(Counter(map(generated.place_of, papers)).values()) == {generated.PER_PLACE}
    cited = Counter(each for paper in papers for each in paper.references)
    assert set(cited.values()) <= {1, 2}


def test_the_expert_finds_all_gold_papers_through_the_tools_and_one_search_does_not() -> None:
    library = generated.open_generated()
    for query in generated.queries("test")[:30]:
        row = task.as_row(query, "test")
        assert parts(row, generated.expert(query, library))["recall"] == 1.0
    for query in one_of_each_kind("test"):
        row, found = task.as_row(query, "test"), generated.expert(query, library)
        assert parts(row, [*found[:-2], "done"])["recall"] < 1.0  # no step is superfluous
        assert parts(row, one_search(query, library))["recall"] < 1.0


def test_one_question_in_four_is_demonstrated_in_full() -> None:
    shown = generated.loose_demos(120, seed=0)
    assert shown == generated.loose_demos(120, seed=0)
    train = {query.text for query in generated.queries("train")}
    assert {row.prompt[0]["content"] for row, _ in shown} <= train
    played = [parts(row, texts) for row, texts in shown]
    assert 0.2 < fmean(each["recall"] == 1.0 for each in played) < 0.45
    assert sum(each["repeated"] + each["bad_expands"] + each["failed"] for each in played) == 0


def test_parts_of_names_are_tokens(tmp_path: Path) -> None:
    generated.make_model(tmp_path, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("Which parsing papers use AdaAsh?")
    assert [tokenizer.decode([each]) for each in ids] == [
        "Which",
        " parsing",
        " papers",
        " use",
        " ",
        "Ada",
        "Ash",
        "?",
    ]


@pytest.mark.parametrize(
    ("preset", "process"), [("cpu", "largest_return"), ("cpu+outcome", "ignored"), ("steppo+cpu", "largest_return")]
)
def test_presets_build_without_data(preset: str, process: str) -> None:
    config = load_config(f"paper_search/{preset}", [])
    assert config.rewards.process == process
    built = build_task(config)
    assert len(list(built.train_rows())) == len(generated.queries("train"))
