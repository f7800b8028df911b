"""The experiment behind the tables of the recipes, on a recipe small enough to be run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recipes import BEGIN, END, draw, fill, main, setting, table


@pytest.mark.slow
def test_it_measures_the_start_and_every_algorithm_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "results.json"
    words = ["gsm8k_tool/tiny", "--algorithms", "grpo,rloo", "--for", "rloo:trainer.steps=1", "--measures", "calls"]
    main([*words, "--runs", str(tmp_path / "runs"), "--out", str(out)])
    results = json.loads(out.read_text(encoding="utf-8"))
    assert [run["name"] for run in results["runs"]] == ["grpo", "rloo"]
    assert [run["held_out"][-1]["step"] for run in results["runs"]] == [2, 1]
    assert {run["panel"] for run in results["runs"]} == {results["start"]["panel"]}
    warm = results["start"]["held_out"][-1]["success"]
    assert all(run["held_out"][0]["success"] == warm for run in results["runs"])  # all begin where the warm start ended
    written = table(results, ["calls"])
    assert written in capsys.readouterr().out
    assert len(written.splitlines()) == 2 + 2 + 2
    draw(results, tmp_path / "picture.png", "a title")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert results["start"]["panel"] in setting(results)


def test_results_replace_those_that_stand_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"above\n\n{BEGIN}\n\nbelow\n", encoding="utf-8")
    fill(page, "first")
    fill(page, "second")
    assert page.read_text(encoding="utf-8") == f"above\n\n{BEGIN}\nsecond\n{END}\n\nbelow\n"
    page.write_text("no mark\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no line"):
        fill(page, "third")
