"""Asynchronous against synchronous training, on the quickstart.

    python -m benchmarks.async_training speed     # trained episodes per second, slow tools; results/async_speed.json
    python -m benchmarks.async_training curves    # learning curves by mode; results/async_curves.json, picture

The speed is that of steps 3 to 12 without evaluations; the modes take turns, three times each. The curves of one seed
start from the same model, rows and settings; one mode trains with two ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from agent_r1.track.plots import COLORS, drawn, series
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, held_out, keep

MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async, staleness 1": ("trainer.mode=async", "trainer.max_staleness=1"),
    "async, staleness 2": ("trainer.mode=async", "trainer.max_staleness=2"),
}
CURVES = MODES | {"sync, 2 ranks": ("--gpus", "2")}
REPEATS = 3
SKIPPED, STEPS = 2, 12
SEEDS = (0, 1, 2)
PICTURE = Path(__file__).parents[1] / "docs" / "async_curves.png"
ROWS, ATTEMPTS = 8, 4  # of a step in `speed`: small, so that two cores keep up with the tools
TOOLS = "task.tools=[benchmarks.slow_tools.lookup,benchmarks.slow_tools.calculate]"


def trained_per_second(records: list[dict[str, Any]], episodes: int) -> dict[str, float]:
    """`episodes` per step; in asynchronous runs, every step takes as many groups too."""
    first, last = records[SKIPPED - 1], records[-1]
    seconds = last["time"] - first["time"]
    measured = {"seconds_per_step": seconds / (len(records) - SKIPPED)}
    measured["trained_per_second"] = episodes / measured["seconds_per_step"]
    if "groups/stale" in last:
        measured |= {name: last[name] for name in ("groups/started", "groups/trained", "groups/stale")}
    return {name: round(value, 3) for name, value in measured.items()}


def measure(out: Path) -> None:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = ("train", "quickstart")
        settings = [TOOLS, f"trainer.steps={STEPS}", f"rollout.rows_per_step={ROWS}", f"rollout.group_size={ATTEMPTS}"]
        settings += ["trainer.eval_every=1000", "trainer.save_every=1000", "eval.rows=1"]
        start, _ = Job(name="start", seed=0, words=(*recipe, "trainer.steps=0", "eval.rows=1")).run(folder)
        common = (*recipe, f"model.path={start.path}", "sft.demos=null", *settings)
        for repeat in range(REPEATS):
            for mode, words in MODES.items():
                run, _ = Job(name=f"{mode}-{repeat}".replace(", ", "-"), seed=0, words=common + words).run(folder)
                found = trained_per_second(run.read_metrics("train"), episodes=ROWS * ATTEMPTS)
                runs.append({"mode": mode, "repeat": repeat} | found)
                print(runs[-1], flush=True)
                keep(out, {"command": "python -m benchmarks.async_training speed", **machine(), "seed": 0, "runs": runs,
                           "median": medians(runs)})  # fmt: skip


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    speeds = {mode: [run["trained_per_second"] for run in runs if run["mode"] == mode] for mode in MODES}
    return {mode: round(median(found), 3) for mode, found in speeds.items() if found}


def learn(out: Path) -> None:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in SEEDS:
            for mode, words in CURVES.items():
                named = mode.replace(", ", "-")
                run, seconds = Job(name=named, seed=seed, words=("train", "quickstart", *words)).run(folder)
                last = run.read_metrics("train")[-1]
                runs.append({"mode": mode, "seed": seed, "seconds": seconds, "held_out": held_out(run)}
                            | {key: last[key] for key in last if key.startswith("groups/")})  # fmt: skip
                print(runs[-1], flush=True)
                keep(out, {"command": "python -m benchmarks.async_training curves", **machine(), "runs": runs})


def draw(results: Path) -> None:
    """Mean over seeds, with the range."""
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    with drawn(PICTURE) as figure:
        axes = figure.subplots()
        for index, mode in enumerate(CURVES):
            curves = [[success for _, success, _ in run["held_out"]] for run in runs if run["mode"] == mode]
            steps = [step for step, _, _ in next(run["held_out"] for run in runs if run["mode"] == mode)]
            columns = list(zip(*curves, strict=True))
            axes.plot(steps, [sum(column) / len(column) for column in columns], **series(index), label=mode)
            axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=COLORS[index], alpha=0.12)
        axes.set(xlabel="step", ylabel="success on held-out rows", ylim=(0, 1.02))
        axes.legend(loc="lower right")


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    [what] = sys.argv[1:]
    if what == "speed":
        measure(RESULTS / "async_speed.json")
    elif what == "curves":
        learn(RESULTS / "async_curves.json")
        draw(RESULTS / "async_curves.json")
    elif what == "draw":  # the stored curves
        draw(RESULTS / "async_curves.json")
    else:
        raise SystemExit(f"unknown benchmark {what!r}: choose speed, curves or draw")


if __name__ == "__main__":
    main()
