"""`agent-r1 search`: an index is built and asked, and an option that would do nothing is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.conftest import Cli


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    texts = {"Otter": "An otter swims.", "Mill": "The old mill."}
    lines = [json.dumps({"title": title, "text": text}) for title, text in texts.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_what_was_built_is_found_by_a_stem_unless_whole_words_were_wanted(
    cli: Cli, corpus: Path, tmp_path: Path
) -> None:
    for option, found in (("--stem", True), ("--no-stem", False)):
        built = cli("search", "build", corpus, "--to", tmp_path / "index", option)
        assert (built.code, built.err) == (0, "")
        assert "2 passages; lexical" in built.out
        assert ("Otter" in cli("search", "ask", tmp_path / "index", "swimming").out) == found


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("lexical", ["--encoder", "minilm"], "--encoder: nothing dense is built by --kind lexical"),
        ("lexical", ["--encoder-path", "there", "--method", "ivf"], "--encoder-path, --method: nothing dense is built"),
        ("dense", ["--stem"], "--stem: nothing lexical is built by --kind dense"),
        ("dense", ["--no-stem"], "--no-stem: nothing lexical is built"),
    ],
)
def test_an_option_of_an_index_that_is_not_built_is_an_error(
    cli: Cli, corpus: Path, tmp_path: Path, kind: str, words: list[str], told: str
) -> None:
    ended = cli("search", "build", corpus, "--to", tmp_path / "index", "--kind", kind, *words)
    assert ended.code == 2
    assert told in ended.err
    assert not (tmp_path / "index").exists()
