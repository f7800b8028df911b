"""`agent-r1 search`: build, ask, serve and load, and their errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.tools.search.index import Index
from tests.conftest import Cli
from tests.tools.small_search import build, free_port, serving


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    texts = {"Otter": "An otter swims.", "Mill": "The old mill."}
    lines = [json.dumps({"title": title, "text": text}) for title, text in texts.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_an_index_is_searched_by_stems_unless_built_with_no_stem(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    for option, found in (("--stem", True), ("--no-stem", False)):
        built = cli("search", "build", corpus, "--to", tmp_path / "index", option)
        assert (built.code, built.err) == (0, "")
        assert "2 passages; lexical" in built.out
        assert ("Otter" in cli("search", "ask", tmp_path / "index", "swimming").out) == found


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("lexical", ["--encoder", "minilm"], "--encoder has no effect with --kind lexical"),
        ("lexical", ["--encoder-path", "there", "--method", "ivf"], "--encoder-path has no effect"),
        ("dense", ["--no-stem"], "--stem has no effect"),
        ("dense", ["--encoder", "minilmm"], "not one of"),
        ("dense", ["--method", "tree"], "not one of"),
        ("lexicl", [], "Did you mean 'lexical'"),
    ],
)
def test_build_options_that_do_nothing_or_do_not_exist_are_refused(
    cli: Cli, corpus: Path, tmp_path: Path, kind: str, options: list[str], problem: str
) -> None:
    result = cli("search", "build", corpus, "--to", tmp_path / "index", "--kind", kind, *options)
    assert result.code == 2
    assert problem in result.err
    assert not (tmp_path / "index").exists()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build(tmp_path_factory.mktemp("search") / "index")


@pytest.fixture(scope="module")
def url(index: Index) -> Iterator[str]:
    with serving(index) as address:
        yield address


def test_ask_prints_one_line_per_passage(cli: Cli, tmp_path: Path) -> None:
    corpus = tmp_path / "long.jsonl"
    corpus.write_text(json.dumps({"title": "Otter", "text": "An otter swims. " * 20}), encoding="utf-8")
    cli("search", "build", corpus, "--to", tmp_path / "index")
    [line] = cli("search", "ask", tmp_path / "index", "otter").out.splitlines()
    assert len(line) > 300


def test_a_load_test_prints_one_line(cli: Cli, url: str) -> None:
    result = cli("search", "load", url, "--clients", "2", "--requests", "4")
    [line] = result.out.splitlines()
    assert "4 requests" in line
    assert (result.code, "no errors" in line) == (0, True)


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["--per-request", "600"], 1, "600 queries in one request; the limit is 512"),
        (["--kind", "dense"], 2, "supports lexical, not 'dense'"),
        (["--kind", "foo"], 2, "supports lexical, not 'foo'"),
        (["--top-k", "101"], 2, "1 to 100 passages per query, got top_k=101"),
        (["--top-k", "0"], 2, "Invalid value"),
        (["--clients", "0"], 2, "Invalid value"),
    ],
)
def test_a_failed_load_test_says_why_and_exits_with_an_error(
    cli: Cli, url: str, options: list[str], code: int, problem: str
) -> None:
    result = cli("search", "load", url, "--clients", "2", "--requests", "4", *options)
    assert (result.code, problem in result.out + result.err) == (code, True)
    assert "nan" not in result.out


def test_a_load_test_without_a_server_says_how_to_start_one(cli: Cli) -> None:
    result = cli("search", "load", f"http://127.0.0.1:{free_port()}")
    assert result.code == 2
    assert "agent-r1 search serve INDEX" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--port", "99999"], "Invalid value"),
        (["--seconds", "0"], "seconds must be positive"),
        (["--seconds", "nan"], "seconds must be positive"),
        (["--max-waiting", "0"], "max_waiting must be positive"),
        (["--host", "256.0.0.1"], "cannot listen at 256.0.0.1"),
    ],
)
def test_a_server_that_cannot_start_prints_only_the_reason(
    cli: Cli, index: Index, options: list[str], problem: str
) -> None:
    result = cli("search", "serve", index.directory, *options)
    assert (result.code, result.out) == (2, "")
    assert problem in result.err


def test_a_dead_server_is_found_by_a_dry_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "def rows(split, count=None): return []\nasync def reward(row, trajectory): return 0.0\n", encoding="utf-8"
    )
    (tmp_path / "base.yaml").write_text(
        f"""task:
  rows: task.rows
  tools: [agent_r1.tools.search.tool.SearchTool]
  tool_kwargs: {{search: {{url: "http://127.0.0.1:{free_port()}"}}}}
  reward: task.reward
model: {{path: builtin:tiny}}
""",
        encoding="utf-8",
    )
    result = cli("train", tmp_path / "base.yaml", "--dry-run")
    assert result.code == 2
    assert "agent-r1 search serve INDEX" in " ".join(result.err.split())


def test_ask_without_results_prints_to_stderr(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    cli("search", "build", corpus, "--to", tmp_path / "index")
    result = cli("search", "ask", tmp_path / "index", "volcano")
    assert (result.code, result.out, result.err) == (0, "", "nothing found in 2 passages\n")
