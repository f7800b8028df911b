"""Run the quickstart as a new user does, for several seeds: time, success before and after, and a figure.

    python -m benchmarks.quickstart            # seeds 0, 1, 2; writes results/quickstart.json and docs/quickstart.png
    python -m benchmarks.quickstart --draw     # measure nothing; draw the stored results

Every run starts with an empty cache, so its time includes creating and warm-starting the model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1.track.plots import COLORS, drawn, series
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, held_out, keep

SEEDS = (0, 1, 2)
OUT = RESULTS / "quickstart.json"
PICTURE = Path(__file__).parents[1] / "docs" / "quickstart.png"


def play(recipe: str, seed: int, folder: Path, splits: tuple[str, ...] = ()) -> dict[str, Any]:
    """One run, which is evaluated on other `splits` too, at its end."""
    environment, began = {"AGENT_R1_CACHE": str(folder / f"cache-{seed}")}, _cpu_seconds()
    job = Job(name="run", seed=seed, words=("train", recipe), splits=splits, environment=environment)
    run, seconds = job.run(folder)
    cpu_seconds, evaluated = round(_cpu_seconds() - began, 1), held_out(run)
    return {
        "seed": seed,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "before": evaluated[0][1],
        "after": evaluated[-1][1],
        "after_stderr": evaluated[-1][2],
        "held_out": evaluated,
        "training": [(record["step"], record["success"]) for record in run.read_metrics("train")],
        "splits": {
            name: [each["success"], each["success_stderr"]] for name, each in job.judge(run.path, folder).items()
        },
    }


def _cpu_seconds() -> float:
    """Of all commands that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def draw(runs: Sequence[dict[str, Any]], picture: Path, others: Sequence[tuple[str, dict[str, Any]]] = ()) -> None:
    """`others`: runs to compare with, by their labels."""
    labelled = [(f"seed {run['seed']}", run) for run in runs] + list(others)
    with drawn(picture) as figure:
        axes = figure.subplots()
        for index, (label, run) in enumerate(labelled):
            axes.plot(*zip(*run["training"], strict=True), color=COLORS[index], alpha=0.3)
            steps, success, error = zip(*run["held_out"], strict=True)
            axes.errorbar(steps, success, yerr=error, **series(index), label=label)
        axes.set(xlabel="GRPO step", ylabel="success on held-out rows", ylim=(0, 1.02))
        axes.legend(loc="center right" if others else "lower right")


def summary(runs: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"seed {run['seed']}: {run['before']:.1%} -> {run['after']:.1%} in {run['seconds']:.0f} s" for run in runs
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw the stored results")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            runs = [play("quickstart", seed, Path(folder)) for seed in SEEDS]
        keep(OUT, {"command": "python -m benchmarks.quickstart", **machine(), "runs": runs})
    runs = json.loads(OUT.read_text(encoding="utf-8"))["runs"]
    draw(runs, PICTURE)
    print(summary(runs))


if __name__ == "__main__":
    main()
