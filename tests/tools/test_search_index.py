"""Corpus, lexical ranking and index: exact scores, damaged files, and batches that change nothing."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_r1
from agent_r1.errors import ConfigError, DataError
from agent_r1.tools.search.corpus import Corpus, Passage, describe_progress, read_passages, write_corpus
from agent_r1.tools.search.index import FORMAT, MANIFEST, Index, fuse
from agent_r1.tools.search.lexical import LexicalSettings, Words, best
from tests.tools.small_search import TEXTS, build, passages, titles


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build(tmp_path_factory.mktemp("search") / "index")


# Corpus


def test_passages_are_read_from_every_format_and_kept_in_order(tmp_path: Path) -> None:
    lines = [json.dumps({"id": 7, "title": "A", "text": "one"}), "", json.dumps({"text": "two"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as out:
        out.write(json.dumps({"title": "C", "text": "dr\u00fcei"}))
    pq.write_table(pa.table({"title": ["D"], "text": ["four"]}), tmp_path / "c.parquet")
    read = list(read_passages([tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]))
    assert read == [
        Passage(passage_id="7", title="A", text="one"),
        Passage(passage_id="a-1", title="", text="two"),
        Passage(passage_id="b-0", title="C", text="dr\u00fcei"),
        Passage(passage_id="c-0", title="D", text="four"),
    ]


def test_duplicate_passages_are_written_once(tmp_path: Path) -> None:
    twins = [Passage(passage_id=name, title="T", text="same") for name in ("a", "b")]
    other = Passage(passage_id="c", title="U", text="same")
    write_corpus([*twins, other], tmp_path / "p.arrow")
    corpus = Corpus.open(tmp_path / "p.arrow")
    assert list(corpus) == [twins[0], other]
    assert corpus[1] == other


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"title": "no text"}', "passage 0 of .* has no 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 cannot be read"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 cannot be read"),
        ("a.jsonl", b'{"text": "\\ud800"}', "passage 0 of .* surrogates not allowed"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.parquet", b"not parquet", "not a readable parquet file"),
        ("a.txt", b"x", "is none of .parquet, .jsonl, .jsonl.gz"),
    ],
)
def test_an_unreadable_corpus_file_is_an_error_that_names_the_passage(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        list(read_passages([tmp_path / name]))


def test_two_passages_with_one_id_and_an_empty_corpus_are_refused(tmp_path: Path) -> None:
    clash = [Passage(passage_id="a", title="", text=text) for text in ("x", "y")]
    with pytest.raises(DataError, match="id 'a'"):
        write_corpus(clash, tmp_path / "p.arrow")
    with pytest.raises(DataError, match="no passages"):
        write_corpus([], tmp_path / "q.arrow")


# Lexical ranking


def test_words_are_lower_case_stems_without_stop_words() -> None:
    assert Words(stem=True)("The Rivers, running in 1,960!") == ["river", "run", "1", "960"]
    assert Words(stem=False)("The Rivers") == ["rivers"]


def test_scores_are_those_of_bm25_by_hand(tmp_path: Path) -> None:
    texts = {"a": "fish fish bank", "b": "fish", "c": "moon"}
    corpus = [Passage(passage_id=name, title="", text=text) for name, text in texts.items()]
    found = Index.build(corpus, tmp_path / "i", lexical=LexicalSettings(k1=1.2, b=0.75)).search(["fish"], 5)[0]
    # Lucene's: idf = ln(1 + (N - df + 0.5) / (df + 0.5)) with N = 3 passages and df = 2 of them,
    # score = idf * tf / (tf + k1 * (1 - b + b * length / mean length)), lengths 3, 1, 1 and their mean 5/3.
    idf = math.log(1 + 1.5 / 2.5)
    a = idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 3 / (5 / 3)))  # 0.4700 * 2 / 3.92 = 0.2398
    b = idf * 1 / (1 + 1.2 * (0.25 + 0.75 * 1 / (5 / 3)))  # 0.4700 / 1.84 = 0.2554
    assert [hit.passage.passage_id for hit in found] == ["b", "a"]
    assert [hit.score for hit in found] == pytest.approx([b, a], rel=1e-5)


def test_a_word_of_the_title_counts_title_weight_times(tmp_path: Path) -> None:
    corpus = [
        Passage(passage_id="titled", title="otter", text="swims far away"),
        Passage(passage_id="full", title="", text="otter otter swims away"),
    ]
    plain = Index.build(corpus, tmp_path / "one", lexical=LexicalSettings(title_weight=1))
    weighted = Index.build(corpus, tmp_path / "three", lexical=LexicalSettings(title_weight=3))
    assert plain.search(["otter"], 1)[0][0].passage.passage_id == "full"
    assert weighted.search(["otter"], 1)[0][0].passage.passage_id == "titled"


def test_rankings_of_the_small_corpus(index: Index) -> None:
    found = index.search(["Who eats frogs?", "otters", "flour of the mill", "the", "zzz", ""], 3)
    # "the" is a stop word and "zzz" in no passage: nothing is found, rather than anything.
    assert [titles(hits) for hits in found] == [
        ["Heron", "Otter"],
        ["Otter"],
        ["Baker", "Mill"],
        [],
        [],
        [],
    ]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_finds_the_same_as_single_queries(index: Index, data: st.DataObject) -> None:
    words = st.sampled_from(sorted({word for text in TEXTS.values() for word in text.split()} | {"zzz"}))
    queries = data.draw(st.lists(st.lists(words, max_size=6).map(" ".join), max_size=6))
    top_k = data.draw(st.integers(1, 6))
    together = index.search(queries, top_k)
    assert together == [index.search([query], top_k)[0] for query in queries]
    for hits, deeper in zip(together, index.search(queries, top_k + 1), strict=True):
        assert deeper[:top_k] == hits  # asking for more changes nothing above


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]), max_size=900), st.integers(1, 5))
def test_the_best_scores_equal_those_of_a_plain_sort(scores: list[float], top_k: int) -> None:
    ordered = sorted(((i, s) for i, s in enumerate(scores) if s > 0), key=lambda pair: (-pair[1], pair[0]))
    assert best(np.asarray(scores, dtype=np.float32), top_k) == ordered[:top_k]


# Hybrid


def test_fusion_adds_reciprocal_ranks() -> None:
    # passage 1: 1/61 + 1/62, passage 2: 1/62 + 1/61 (the same: lower place first), passage 3: 1/63 alone
    fused = fuse([[(2, 9.0), (1, 8.0), (3, 7.0)], [(1, 0.2), (2, 0.1)]], 3)
    assert [place for place, _ in fused] == [1, 2, 3]
    assert [score for _, score in fused] == pytest.approx([1 / 61 + 1 / 62, 1 / 61 + 1 / 62, 1 / 63])


# The folder


def test_an_index_can_be_opened_again(index: Index) -> None:
    again = Index.open(index.directory)
    assert again.manifest == index.manifest
    assert again.manifest.kinds == ["lexical"]
    assert again.search(["river"], 5) == index.search(["river"], 5)


def test_a_new_index_replaces_the_old_one_and_leaves_no_temporary_folder(tmp_path: Path) -> None:
    old = build(tmp_path / "i")
    new = Index.build([Passage(passage_id="n", title="New", text="river")], tmp_path / "i", lexical=LexicalSettings())
    assert titles(new.search(["river"], 5)[0]) == ["New"]
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    with pytest.raises(DataError, match="rebuilt while it was open"):
        old.search(["river"], 5)


def test_a_build_that_fails_does_not_replace_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "i")
    with pytest.raises(DataError, match="no passages"):
        Index.build([], tmp_path / "i", lexical=LexicalSettings())

    def fail(_: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path / "i")
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    assert titles(Index.open(tmp_path / "i").search(["moon"], 1)[0]) == ["Moon"]


def test_a_folder_that_is_not_an_index_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="choose another folder"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r"agent-r1 search build .*; the index of a recipe .*: agent-r1 data recipe"):
        Index.open(tmp_path)


def test_a_damaged_index_is_refused_with_how_to_rebuild_it(tmp_path: Path) -> None:
    build(tmp_path / "i")
    manifest = tmp_path / "i" / MANIFEST
    stored = json.loads(manifest.read_text(encoding="utf-8"))

    def problem(text: str) -> str:
        manifest.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="agent-r1 search build") as raised:
            Index.open(tmp_path / "i")
        return str(raised.value)

    assert MANIFEST in problem("{")
    assert "\n" not in problem("{}")
    assert MANIFEST in problem(json.dumps({"format": FORMAT, "lexical": None, "dense": None}))
    assert "format 99" in problem(json.dumps(stored | {"format": 99}))
    data = tmp_path / "i" / "lexical" / "data.csc.index.npy"
    content = data.read_bytes()
    data.write_bytes(bytes(len(content)))  # of the right size, so it is found when the ranker is loaded
    manifest.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        Index.open(tmp_path / "i").search(["word"], 1)
    data.write_bytes(content[:-1])
    assert "lexical/data.csc.index.npy has" in problem(json.dumps(stored))
    data.unlink()
    assert "lexical/data.csc.index.npy is missing" in problem(json.dumps(stored))


def test_an_index_supports_only_the_rankers_it_was_built_with(index: Index) -> None:
    with pytest.raises(ConfigError, match="supports lexical, not dense"):
        index.search(["x"], 1, "dense")
    with pytest.raises(ConfigError, match="Did you mean 'lexical'"):
        index.search(["x"], 1, "lexicall")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="top_k=0 must be at least 1"):
        index.search(["x"], 0)


def test_a_build_reports_its_stages(tmp_path: Path) -> None:
    reports: list[str] = []
    Index.build(passages(), tmp_path / "i", lexical=LexicalSettings(), report=reports.append)
    assert reports == ["reading: 5 passages", "lexical: reading words: 5 passages", "lexical: computing scores"]
    half = describe_progress("reading", 50, 200, seconds=3.0)
    assert half == "reading: 50 of 200 passages (25%), about 9 s left"  # 3 s for 50, so 9 s for 150


@pytest.mark.parametrize(
    ("before", "search"),
    [
        (
            "import jax",
            "from agent_r1.tools.search.lexical import import_bm25s; assert import_bm25s() is import_bm25s()",
        ),
        ("", "from agent_r1.recipes.webshop.synthetic import shop; shop()"),
    ],
)
def test_lexical_search_does_not_start_jax(before: str, search: str, tmp_path: Path) -> None:
    """bm25s would start JAX, which takes three quarters of the GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("started = True\n")
    (tmp_path / "jax" / "lax.py").write_text("raise SystemExit('JAX was started')\n")
    program = (
        f"{before}\n"
        f"{search}\n"
        "import jax; assert jax.started\n"  # other code can still import it
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(agent_r1.__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
