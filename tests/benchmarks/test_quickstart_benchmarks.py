"""The experiments on the quickstart, with a tiny recipe; recorded results can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import algorithms, quickstart, vision_quickstart
from benchmarks.machine import RESULTS
from benchmarks.recipes import Job

MINI = str(Path(__file__).parents[1] / "mini")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_every_algorithm_starts_from_one_warm_start_and_is_reported_as_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    so_far = list(algorithms.measure(MINI, ["grpo", "ppo"], [0], 1, ["trainer.steps=1"]))
    assert [[run["algorithm"] for run in measured["runs"]] for measured in so_far] == [["ppo"], ["ppo", "grpo"]]
    ppo, grpo = so_far[-1]["runs"]
    assert [step for step, _, _ in grpo["held_out"]] == [0, 1]
    assert ppo["held_out"][0] == grpo["held_out"][0]
    assert (len(ppo["explained_variance"]), grpo["explained_variance"]) == (1, [])
    assert "grpo                   seed 0: " in capsys.readouterr().out
    assert [line.split(" | ")[0] for line in algorithms.table(so_far[-1]["runs"]).splitlines()[2:]] == [
        "| (warm start)",
        "| `grpo`",
        "| `ppo`",
    ]


@pytest.mark.slow
def test_a_run_of_the_quickstart_makes_its_own_warm_start_and_keeps_both_curves(tmp_path: Path) -> None:
    run = quickstart.play(MINI, 0, tmp_path, ("train",))
    assert list((tmp_path / "cache-0").glob("warm-mini-*"))
    assert [step for step, _, _ in run["held_out"]] == [0, 2, 4]
    assert (run["before"], run["after"]) == (run["held_out"][0][1], run["held_out"][-1][1])
    assert [step for step, _ in run["training"]] == [1, 2, 3, 4]
    [[success, _]] = run["splits"].values()
    assert 0 <= success <= 1
    assert run["cpu_seconds"] > 0


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mine, seed 3 failed:\n(.|\n)*No such command 'tarin'"):
        Job(name="mine", seed=3, words=("tarin", "quickstart")).run(tmp_path)


def test_recorded_results_can_be_tabulated() -> None:
    recorded = json.loads((RESULTS / "algorithms.json").read_text(encoding="utf-8"))["runs"]
    names = {run["algorithm"] for run in recorded}
    assert len(algorithms.table(recorded).splitlines()) == 3 + len(names)


def test_the_recorded_vision_quickstart_learns_by_looking() -> None:
    recorded = json.loads((RESULTS / "vision_quickstart.json").read_text(encoding="utf-8"))
    assert [run["seed"] for run in recorded["runs"]] == list(vision_quickstart.SEEDS)
    constant_answer = 9 / 81  # pairs of numbers from 1 to 9 whose sum is the commonest, 10
    for run in recorded["runs"]:
        assert run["before"] <= 0.45
        assert run["after"] >= 0.9
        assert run["splits"][vision_quickstart.BLANK_SPLIT][0] <= constant_answer + 0.05
    assert recorded["trained_blank"]["after"] <= constant_answer + 0.05


def test_the_pictures_of_the_vision_quickstart_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CURVES", "SEEN"):
        monkeypatch.setattr(vision_quickstart, name, tmp_path / f"{name}.png")
    vision_quickstart.draw(json.loads((RESULTS / "vision_quickstart.json").read_text(encoding="utf-8")))
    assert {file.name for file in tmp_path.iterdir()} == {"CURVES.png", "SEEN.png"}
