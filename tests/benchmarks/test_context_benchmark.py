"""The comparison of context policies, on a tiny recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.context import main, over_seeds, setting, table
from benchmarks.machine import RESULTS
from benchmarks.recipes import ROOT, marks


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_every_policy_is_trained_and_its_cost_tabulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "results.json"
    words = ["gsm8k_tool/tiny", "--policies", "append,drop_results", "--for", "drop_results:context.keep=1"]
    main([*words, "--set", "trainer.steps=1", "--runs", str(tmp_path / "runs"), "--out", str(out)])
    results = json.loads(out.read_text(encoding="utf-8"))
    append, dropping = results["runs"]
    assert (append["name"], dropping["name"]) == ("append", "drop_results")
    assert append["panel"] == dropping["panel"]
    assert append["shown_tokens"] > append["sampled_tokens"] > 0
    assert append["hidden_messages"] == append["summaries"] == 0
    assert dropping["words"][-1] == "context.keep=1"
    written = table(results)
    assert written in capsys.readouterr().out
    assert len(written.splitlines()) == 2 + 2
    assert results["commit"] in setting(results)
    page = tmp_path / "docs" / "context.md"
    page.parent.mkdir()
    page.write_text("<!-- results: results.json -->\n", encoding="utf-8")
    monkeypatch.setattr("benchmarks.context.ROOT", tmp_path)
    main([*words, "--out", str(out), "--draw"])
    assert written in page.read_text(encoding="utf-8")
    assert (page.parent / "results.png").stat().st_size > 1000


def test_an_unusable_policy_is_refused_before_the_first_run(tmp_path: Path) -> None:
    words = ["gsm8k_tool/tiny", "--policies", "append,summary", "--runs", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"^summary: .*context\.max_tokens"):
        main(words)
    assert not list(tmp_path.glob("*/*"))


def test_a_setting_for_a_policy_that_is_not_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not of the form NAME:override with one of append"):
        main(["gsm8k_tool/tiny", "--policies", "append", "--for", "window:context.turns=1", "--runs", str(tmp_path)])


@pytest.mark.parametrize("recorded", sorted(file.name for file in RESULTS.glob("context_*.json")))
def test_the_page_shows_the_recorded_results(recorded: str) -> None:
    page = (ROOT / "docs" / "context.md").read_text(encoding="utf-8")
    results = json.loads((RESULTS / recorded).read_text(encoding="utf-8"))
    begin, end = marks(recorded)
    shown = page.partition(begin)[2].partition(end)[0]
    assert table(results) in shown
    assert setting(results) in shown
    assert over_seeds(results) in shown
