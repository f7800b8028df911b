"""The experiment behind the recipes' tables, on a tiny recipe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any

import pytest

from agent_r1.config import RECIPES
from benchmarks.machine import RESULTS
from benchmarks.over_seeds import outcomes, seeds_table
from benchmarks.recipes import (
    Job,
    algorithms_by_name,
    as_they_end,
    cpu_seconds,
    draw,
    fill,
    gain_cell,
    kinds_table,
    main,
    marks,
    own_overrides,
    setting,
    success_cell,
    table,
)


def test_processor_time_grows_with_the_work_of_ended_programs_and_needs_one_worker() -> None:
    began = cpu_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert cpu_seconds() > began
    with pytest.raises(SystemExit, match="--cpu-seconds: with several workers"):
        main(["gsm8k_tool/tiny", "--cpu-seconds", "--workers", "2"])


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_it_measures_the_start_and_every_algorithm_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "results.json"
    words = ["gsm8k_tool/tiny", "--measures", "calls", "--runs", str(tmp_path / "runs"), "--out", str(out)]
    main(words)
    first = json.loads(out.read_text(encoding="utf-8"))
    assert [run["name"] for run in first["runs"]] == ["grpo"]
    assert first["runs"][0]["panel"] == first["start"]["panel"]
    warm = first["start"]["held_out"][-1]["success"]
    assert first["runs"][0]["held_out"][0]["success"] == warm  # it begins where the warm start ended
    for each in first["runs"][0]["held_out"]:
        assert fmean(outcomes(each, "success")) == each["success"]
    written = table(first, ["calls"])
    assert written in capsys.readouterr().out
    assert len(written.splitlines()) == 2 + 2 + 1
    scored = table(first, ["reward"], gain="reward")
    assert "| reward | gain in reward (95 % interval) |" in scored
    assert f" {first['runs'][0]['held_out'][-1]['reward/mean']:.3f} " in scored
    for measures, gain in ((["cals"], "success"), ([], "cals")):
        with pytest.raises(SystemExit, match=r"cals: there is no such measure here, but .*calls"):
            table(first, measures, gain)
    draw(first, tmp_path / "picture.png", "a title")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert first["start"]["panel"] in setting(first)

    [begun] = (tmp_path / "runs").glob("*/sft-0")
    more = ["--algorithms", "ppo,rloo", "--for", "rloo:trainer.steps=1", "--splits", "train", "--set", "sft.epochs=2"]
    with pytest.raises(SystemExit, match=r"ppo, seed 0 failed:\n.*learner\.lr"):  # and the other is kept
        main([*words, "--start", str(begun), *more, "--for", "ppo:learner.lr=-1"])
    again = json.loads(out.read_text(encoding="utf-8"))
    assert again["start"]["held_out"] == first["start"]["held_out"]  # not repeated
    assert again["start"]["settings"]["count"] == 16
    assert again["start"]["seconds"] > 0
    [run] = again["runs"]
    assert [each["step"] for each in run["held_out"]] == [0, 1]
    assert [side["splits"]["train"]["rows"] for side in (again["start"], run)] == [4, 4]
    assert run["splits"]["train"]["panel"] == again["start"]["splits"]["train"]["panel"] != run["panel"]


def test_results_are_yielded_as_runs_end_and_survive_a_failed_run() -> None:
    jobs = [Job(name=name, seed=0, words=()) for name in ("slow", "broken", "quick")]
    quick_is_told = Event()

    def play(job: Job) -> dict[str, Any]:
        if job.name == "broken":
            raise SystemExit("broken failed")
        if job.name == "slow":
            assert quick_is_told.wait(10)
        return {"name": job.name}

    results = as_they_end(jobs, play, workers=3)
    assert next(results) == [{"name": "quick"}]
    quick_is_told.set()
    assert next(results) == [{"name": "slow"}, {"name": "quick"}]
    with pytest.raises(SystemExit, match="broken failed"):
        next(results)


def test_a_start_that_is_not_a_warm_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a run of `agent-r1 sft`"):
        main(["gsm8k_tool/tiny", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--start", str(tmp_path)])


def test_new_results_replace_those_on_a_page(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    (begin, end), (other, _) = marks("a.json"), marks("b.json")
    page.write_text(f"above\n\n{begin}\n\nbelow\n{other}\n", encoding="utf-8")
    fill(page, "a.json", "first")
    fill(page, "a.json", "second")
    assert page.read_text(encoding="utf-8") == f"above\n\n{begin}\nsecond\n{end}\n\nbelow\n{other}\n"
    with pytest.raises(SystemExit, match=r"has no line <!-- results: c\.json -->"):
        fill(page, "c.json", "third")


def test_success_by_kind_has_a_column_for_every_run() -> None:
    def side(name: str, *shares: float) -> dict[str, Any]:
        kinds = {f"success/world/kind_{i}": share for i, share in enumerate(shares)}
        return {"name": name, "seed": 0, "held_out": [{"success": 0.0}, {"success": 0.5, **kinds}]}

    results = {"start": side("sft", 0.25, 0.5), "runs": [side("grpo", 0.5, 1.0)]}
    assert kinds_table(results).splitlines() == [
        "|  | warm start | `grpo` 0 |",
        "| --- | ---: | ---: |",
        "| kind 0 | 25.0% | 50.0% |",
        "| kind 1 | 50.0% | 100.0% |",
    ]
    assert kinds_table({"start": side("sft"), "runs": [side("grpo")]}) == ""


@pytest.mark.parametrize("page", sorted(RECIPES.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_pages_show_the_recorded_results(page: Path) -> None:
    """Between the marks of a file, a page shows the results of that file."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- results: (.*?) -->", text):
        begin, end = marks(name)
        shown = text.partition(begin)[2].partition(end)[0]
        if shown.strip() == "Not measured yet.":
            assert not (RESULTS / name).exists()
            continue
        results = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        if "start" not in results:  # of another benchmark, which has a test of its own
            continue
        assert setting(results) in shown
        by_measure = [seeds_table(results, [measure]).split("\n\n")[0] for measure in ("success", "reward")]
        assert any(each in shown for each in by_measure), "the tables over seeds"
        for run in results["runs"]:
            [line] = [line for line in shown.splitlines() if line.startswith(f"| `{run['name']}` | {run['seed']} |")]
            assert success_cell(run["held_out"][-1]) in line
            gains = {measure.removeprefix("reward_part/") for measure in run["gains"]}
            assert any(gain_cell(run, measure) in line for measure in gains)


def test_an_algorithm_can_run_under_several_names() -> None:
    assert algorithms_by_name("grpo,short=ppo,ppo") == {"grpo": "grpo", "short": "ppo", "ppo": "ppo"}


def test_a_setting_for_an_algorithm_that_is_not_run_is_refused() -> None:
    assert own_overrides(["ppo:critic.lr=1e-4", "ppo:seed=1"], ["grpo", "ppo"]) == {
        "grpo": [],
        "ppo": ["critic.lr=1e-4", "seed=1"],
    }
    for item in ("steppo:seed=1", "seed=1"):
        with pytest.raises(SystemExit, match="is not of the form NAME:override with one of grpo, ppo"):
            own_overrides([item], ["grpo", "ppo"])
