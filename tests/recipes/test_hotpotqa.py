"""The recipe `hotpotqa`: scores, splits, what the expert may do, and rows that grade themselves right.

Nothing here needs the real data; where $AGENT_R1_SHARED_DATA names a folder that has them, they are checked too.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.config import load_config
from agent_r1.data.downloads import data_dir
from agent_r1.envs.check import check_env
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.hotpotqa import data, synthetic, task
from agent_r1.recipes.hotpotqa.data import Question
from agent_r1.recipes.hotpotqa.expert import demonstrate
from agent_r1.recipes.hotpotqa.scores import contains, exact_match, f1, normalized, substring_match
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import Index
from agent_r1.tools.search.lexical import LexicalSettings
from agent_r1.tools.search.tool import SearchTool
from agent_r1.types import Step, StopReason, TaskRow, ToolCallRecord, Trajectory

# Scores


def test_normalisation_is_the_published_one() -> None:
    assert normalized("  The Quick, brown-fox: a \n test an") == "quick brownfox test"


def test_exact_match_f1_and_substring_differ_where_they_should() -> None:
    accepted = ["the Big 12 Conference"]
    assert exact_match("Big 12 conference.", accepted) == 1
    assert exact_match("the Big 12", accepted) == 0
    assert f1("the Big 12", accepted) == pytest.approx(2 * 2 / (2 + 3))  # two words, both of the three
    assert substring_match("It is the Big 12 Conference of course", accepted) == 1
    assert substring_match("Big 12", accepted) == 0
    assert f1("", accepted) == exact_match("", accepted) == substring_match("", accepted) == 0


def test_the_best_alias_counts() -> None:
    accepted = ["United States of America", "USA"]
    assert (exact_match("usa", accepted), f1("usa", accepted)) == (1, 1)


def test_yes_and_no_earn_no_partial_credit() -> None:
    assert f1("yes", ["yes"]) == 1
    assert f1("no", ["yes"]) == f1("no answer here", ["no"]) == f1("no", ["no man's land"]) == 0


@given(st.text(max_size=30), st.text(max_size=30))
def test_scores_are_in_order(answer: str, gold: str) -> None:
    em, overlap = exact_match(answer, [gold]), f1(answer, [gold])
    assert 0 <= overlap <= 1
    assert overlap == f1(gold, [answer])  # symmetric
    if normalized(gold):
        assert em <= overlap
        assert em <= substring_match(answer, [gold])


def test_names_are_found_as_whole_words() -> None:
    assert contains("He met Ann-Marie (the singer).", "the Singer")
    assert not contains("annual meeting", "Ann")
    assert not contains("anything", "the")


# Rewards


ROW = TaskRow(
    prompt=[{"role": "user", "content": "q"}],
    reward_model={"ground_truth": {"answers": ["Ada Elson"], "gold": ["Elby", "Fardale River"]}},
)


def episode(final: str, *found: list[str], error: str | None = None) -> Trajectory:
    def step(text: str, calls: tuple[ToolCallRecord, ...] = ()) -> Step:
        return Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], action_text=text, calls=calls)

    searches = [
        ToolCallRecord(name="search", arguments={}, result="", text_span=(0, 1), info={"titles": titles}, error=error)
        for titles in found
    ]
    steps = [*(step("call", (call,)) for call in searches), step(final)]
    return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.ANSWERED)


def test_the_reward_reports_its_components() -> None:
    played = episode("<answer>Ada Elby Elson</answer>", ["Fardale River", "Moon"], ["Moon"])
    parts = {"em": 0.0, "f1": 0.8, "substring": 0.0, "format": 1.0, "num_searches": 2.0, "gold_found": 0.5}
    # F1: two common words, three given and two wanted: 2 * 2 / 5
    assert asyncio.run(task.reward_f1(ROW, played)) == pytest.approx({"reward": 0.8, **parts})
    assert asyncio.run(task.reward_em(ROW, played)) == pytest.approx({"reward": 0.0, **parts})


@pytest.mark.parametrize(
    ("final", "em", "form"),
    [
        ("<answer>Ada Elson</answer>", 1.0, 1.0),
        ("I think <answer>Bo</answer>, no: <answer>ada elson</answer>", 1.0, 0.0),  # the last counts
        ("Ada Elson", 0.0, 0.0),  # nothing is read into text without tags
        ("<answer></answer>", 0.0, 0.0),
        ("<answer>Ada Elson", 0.0, 0.0),
        ("<answer>Bo</answer><answer>Ada Elson</answer>", 1.0, 0.0),
    ],
)
def test_only_text_in_tags_is_an_answer(final: str, em: float, form: float) -> None:
    parts = task.parts_of(ROW, episode(final))
    assert (parts["em"], parts["format"]) == (em, form)


def test_a_truncated_episode_has_no_answer() -> None:
    played = replace(episode("<answer>Ada Elson</answer>"), stop=StopReason.MAX_STEPS)
    parts = task.parts_of(ROW, played)
    assert (parts["em"], parts["f1"], parts["substring"], parts["format"]) == (0, 0, 0, 0)


def test_no_answer_never_matches() -> None:
    # "The The", a band: nothing is left of it by the published rules.
    assert (exact_match("", ["The The"]), exact_match("the the", ["The The"])) == (0, 1)
    assert exact_match("", ["Ada"]) == 0


def test_a_failed_call_costs_format_but_not_the_answer() -> None:
    parts = task.parts_of(ROW, episode("<answer>Ada Elson</answer>", [], error="no such tool"))
    assert (parts["em"], parts["format"]) == (1.0, 0.0)


# The synthetic corpus, the expert, the env


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> SearchTool:
    return synthetic.SyntheticSearch(index=tmp_path_factory.mktemp("synthetic") / "index")


def test_the_expert_answers_every_question_of_the_synthetic_corpus_in_two_searches(tool: SearchTool) -> None:
    for question in synthetic.questions("train") + synthetic.questions("test"):
        texts = demonstrate(question, tool)
        assert texts is not None
        river, town = question.gold
        queries = [event.arguments["query"] for text in texts[:-1] for event in FORMATS["hermes"].parse(text)[1]]  # type: ignore[union-attr]
        assert queries == [river, town]
        assert texts[-1] == f"<answer>{question.answers[0]}</answer>"


def test_the_synthetic_index_is_built_once_and_rebuilt_when_stale(tmp_path: Path) -> None:
    synthetic.SyntheticSearch(index=tmp_path / "i")
    built = (tmp_path / "i" / "manifest.json").stat().st_mtime_ns
    synthetic.SyntheticSearch(index=tmp_path / "i")
    assert (tmp_path / "i" / "manifest.json").stat().st_mtime_ns == built
    Index.build([Passage(passage_id="x", title="X", text="old")], tmp_path / "i", lexical=LexicalSettings())
    synthetic.SyntheticSearch(index=tmp_path / "i")
    assert len(Index.open(tmp_path / "i").corpus) == len(synthetic.passages())


def corpus_tool(directory: Path, **texts: str) -> SearchTool:
    corpus = [Passage(passage_id=title, title=title.replace("_", " "), text=text) for title, text in texts.items()]
    return SearchTool(index=Index.build(corpus, directory, lexical=LexicalSettings()).directory, top_k=1)


def test_the_expert_searches_only_for_names_it_has_read(tmp_path: Path) -> None:
    # Nothing in the question or on the page of the river names the town, so no policy could have searched for it.
    hidden = corpus_tool(tmp_path / "i", Fardale_River="A river past a town.", Elby="Its mayor is Ada.")
    question = Question(
        text="Who is mayor at the Fardale River?", answers=("Ada",), gold=("Fardale River", "Elby"), kind="bridge"
    )
    assert demonstrate(question, hidden) is None


def test_the_expert_answers_only_what_it_has_read(tmp_path: Path) -> None:
    question = Question(text="Who is mayor of Elby?", answers=("Ada",), gold=("Elby",), kind="single")
    assert demonstrate(question, corpus_tool(tmp_path / "a", Elby="A town with a mayor.")) is None
    shown = demonstrate(question, corpus_tool(tmp_path / "b", Elby="A town with the mayor Ada."))
    assert shown is not None
    assert shown[-1] == "<answer>Ada</answer>"
    yes = Question(text="Is Elby a town?", answers=("yes",), gold=("Elby",), kind="comparison")
    assert demonstrate(yes, corpus_tool(tmp_path / "c", Elby="A place.")) is not None  # yes stands on no page


def test_demonstrations_depend_on_the_seed_and_stop_at_the_count(tool: SearchTool) -> None:
    asked = synthetic.questions("train")
    first, again, other = (task.expert_demos(tool, asked, 10, seed) for seed in (0, 0, 1))
    assert len(first) == 10
    assert first == again
    assert first != other


def test_playing_a_demonstration_earns_everything(tool: SearchTool) -> None:
    row, texts = task.expert_demos(tool, synthetic.questions("train"), 1, seed=0)[0]
    asyncio.run(check_env(lambda: ToolEnv(tools=[tool]), row, texts))
    assert task.parts_of(row, episode(texts[-1], row.ground_truth["gold"])) == {
        "em": 1, "f1": 1, "substring": 1, "format": 1, "num_searches": 1, "gold_found": 1,
    }  # fmt: skip


# Data


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "question": f"Who is mayor of town {number}?",
        "answer": f"Mayor {number}",
        "type": "bridge",
        "supporting_facts": [[f"Town {number}", 0], [f"Town {number}", 1]],
        "context": [[f"Town {number}", ["A town.", f" It has Mayor {number}."]], ["Moon", ["The moon."]]],
        **changes,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder laid out like a local copy of the data."""
    folder = tmp_path / "source"
    (folder / data.QUESTIONS).mkdir(parents=True)
    (folder / data.PAGES).mkdir()
    broken = [
        record(900, supporting_facts=[["Elsewhere", 0]]),
        record(901, supporting_facts=None),
        record(902, context=None),
    ]
    for name in data.SOURCES.values():
        with gzip.open(folder / data.QUESTIONS / name.file, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(item) + "\n" for item in [*map(record, range(40)), *broken])
    pages = pa.table({"title": ["Moon", "Mill"], "text": ["Another text of the moon.", "An old mill."]})
    pq.write_table(pages, folder / data.PAGES / "pages.parquet")
    return folder


def test_splits_are_disjoint_complete_and_do_not_depend_on_the_file_order(source: Path) -> None:
    train, test = data.questions("train", source), data.questions("test", source)
    assert len(train) + len(test) == 40  # the three without all gold paragraphs are left out
    assert not {q.text for q in train} & {q.text for q in test}
    path = source / data.QUESTIONS / data.SOURCES["hotpotqa"].file
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(reversed(lines[::2]))))  # half of them, backwards
    assert data.questions("test", source) == [q for q in test if q in data.questions("test", source)]
    assert {q.text for q in data.questions("train", source)} <= {q.text for q in train}


def test_the_split_of_a_question_never_changes() -> None:
    # Written down, so that no edit moves questions from training into the test without being noticed.
    question = Question(text="Were Scott Derrickson and Ed Wood of the same nationality?", answers=(), gold=(), kind="")
    assert question.key == "5dda555f7bbde715"
    assert not question.is_held_out(data.SOURCES["hotpotqa"].test_share)


def test_paragraphs_are_unique_and_ambiguous_titles_are_dropped(source: Path) -> None:
    titles = [passage.title for passage in data.passages(source)]
    assert sorted(titles) == sorted([*(f"Town {n}" for n in range(40)), "Town 900", "Town 901", "Moon", "Mill"])
    assert next(p.text for p in data.passages(source) if p.title == "Town 3") == "A town. It has Mayor 3."


def test_preparing_from_a_folder_does_not_change_it_and_makes_everything_a_run_needs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "data"))
    before = sorted(path for path in source.rglob("*"))
    said: list[str] = []
    data.prepare(data_dir("hotpotqa"), said.append, source=source)
    assert sorted(path for path in source.rglob("*")) == before
    assert any("44 passages" in line for line in said)
    assert task.rows("test") == task.rows("test", path=str(source))  # from the copy, or from where it came
    assert len(task.demos(count=5, seed=0)) == len(task.demos(count=5, seed=0, path=str(source))) == 5
    assert SearchTool(index="hotpotqa/index").look("town 7")[0].passage.title == "Town 7"


def test_every_source_is_fetched_over_https() -> None:
    urls = [*(url for source in data.SOURCES.values() for url in source.urls), data.LEAD_SECTIONS_URL]
    assert [url for url in urls if not url.startswith("https://")] == []


def test_a_hotpotqa_file_with_the_wrong_hash_is_not_read(tmp_path: Path) -> None:
    raw = tmp_path / "fetched" / "hotpot_dev_distractor_v1.json"
    raw.parent.mkdir()
    raw.write_text(json.dumps([record(number) for number in range(7405)]), encoding="utf-8")
    with pytest.raises(DataError, match=f"{raw} has sha256 .*https://curtis"):
        data.prepare(tmp_path, lambda line: None)
    assert not (tmp_path / data.QUESTIONS).exists()


@pytest.mark.parametrize("preset", ["2wiki", "musique"])
def test_presets_for_other_datasets_start_from_the_hotpotqa_warm_start(preset: str) -> None:
    config = load_config(f"hotpotqa/{preset}", [])
    assert (config.task.train_split, config.sft.demos) == (f"{preset}_train", "task.demos")
    text = (Path(data.__file__).parent / f"{preset}.yaml").read_text(encoding="utf-8")
    assert "The warm start shows HotpotQA's training questions." in text


def test_rows_hide_their_answers_and_carry_their_source(source: Path) -> None:
    [row] = task.rows("2wiki", count=1, path=str(source))
    assert row.data_source == "2wiki"
    assert row.row_id.startswith("2wiki-")
    shown = repr(row.without_ground_truth())
    assert row.ground_truth["answers"][0] not in shown


def test_every_row_accepts_its_own_answer(source: Path) -> None:
    for row in task.rows("train", path=str(source)):
        played = episode(f"<answer>{row.ground_truth['answers'][0]}</answer>", row.ground_truth["gold"])
        for reward in (task.reward_em, task.reward_f1):
            assert asyncio.run(reward(row, played))["reward"] == 1


def test_missing_data_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="agent-r1 data recipe hotpotqa"):
        task.rows("train", path=str(tmp_path))
    with pytest.raises(ConfigError, match="Did you mean 'test'"):
        task.rows("tests", path=str(tmp_path))
    with pytest.raises(DataError, match="multihop_qa/"):
        data.prepare(tmp_path / "to", lambda line: None, source=tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {key: value for key, value in record(1).items() if key != "supporting_facts"},
        record(1, supporting_facts=[["Town 1"]]),
        record(1, supporting_facts=1),
        record(1, question=None),
        record(1, answer=None),
        record(1, context=[["Town 1"]]),
        ["Who?", "Ada"],
    ],
)
def test_a_malformed_record_is_an_error_that_names_its_file(source: Path, wrong: object) -> None:
    path = source / data.QUESTIONS / data.SOURCES["hotpotqa"].file
    path.write_bytes(gzip.compress(f"{json.dumps(record(0))}\n{json.dumps(wrong)}".encode()))
    with pytest.raises(DataError, match=r"hotpot_ctx\.jsonl\.gz record 2: .*Error"):
        data.questions("train", source)


@pytest.mark.parametrize("context", [[["Town 1", None]], [["Town 1"]], 1])
def test_a_context_without_paragraphs_is_an_error_that_names_its_file(source: Path, context: object) -> None:
    path = source / data.QUESTIONS / data.SOURCES["hotpotqa"].file
    path.write_bytes(gzip.compress(f"{json.dumps(record(0))}\n{json.dumps(record(1, context=context))}".encode()))
    with pytest.raises(DataError, match=r"hotpot_ctx\.jsonl\.gz record 2: .*Error"):
        list(data.passages(source))


def test_published_records_of_both_forms_are_read() -> None:
    musique = {
        "question": "q", "answer": "a", "answer_aliases": ["b"],
        "paragraphs": [
            {"title": "T", "paragraph_text": "one", "is_supporting": True},
            {"title": "U", "paragraph_text": "two", "is_supporting": False},
        ],
    }  # fmt: skip
    kept = data._normal(musique)
    assert kept["context"] == [["T", ["one"]], ["U", ["two"]]]
    assert kept["supporting_facts"] == [["T", 0]]
    question = data._question(kept)
    assert question is not None
    assert question.answers == ("a", "b")
    assert data._normal(record(1) | {"_id": "x"})["context"] == record(1)["context"]


def test_lead_sections_are_read_from_the_archive(tmp_path: Path) -> None:
    files = {"repo/request_tok/1.json": {"/wiki/Z%C3%BCrich_Lake": "A lake .", "/wiki/Empty": ""}}
    files["repo/request_tok/2.json"] = {"/wiki/Z%C3%BCrich_Lake": "Another .", "/wiki/Aare": "A river ."}
    files["repo/tables_tok/1.json"] = {"/wiki/No": "not a page"}
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            text = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    assert data.lead_sections(tmp_path / "a.tar.gz") == {"Aare": "A river .", "Z\u00fcrich Lake": "A lake ."}


@pytest.mark.skipif("AGENT_R1_SHARED_DATA" not in os.environ, reason="needs a local copy of the data")
def test_the_real_questions_have_the_splits_in_the_readme() -> None:
    folder = Path(os.environ["AGENT_R1_SHARED_DATA"])
    sizes = {split: len(data.questions(split, folder)) for split in data.SPLITS}
    assert sizes == {
        "train": 1585, "test": 520, "2wiki_train": 172, "2wiki": 494, "musique_train": 74, "musique": 241,
    }  # fmt: skip
