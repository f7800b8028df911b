"""Run the quickstart as a new user does, for several seeds: time, success before and after, and a figure.

    python -m benchmarks.quickstart            # seeds 0, 1, 2; writes results/quickstart.json and docs/quickstart.png

Every run starts with an empty cache, so its time includes creating and warm-starting the model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, held_out, keep

SEEDS = (0, 1, 2)
PICTURE = Path(__file__).parents[1] / "docs" / "quickstart.png"


def play(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    environment = {"AGENT_R1_CACHE": str(folder / f"cache-{seed}")}
    run, seconds = Job(name="run", seed=seed, words=("train", recipe), environment=environment).run(folder)
    evaluated = held_out(run)
    return {
        "seed": seed,
        "seconds": seconds,
        "before": evaluated[0][1],
        "after": evaluated[-1][1],
        "after_stderr": evaluated[-1][2],
        "held_out": evaluated,
        "training": [(record["step"], record["success"]) for record in run.read_metrics("train")],
    }


def draw(runs: list[dict[str, Any]]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for run, color in zip(runs, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        axes.plot(*zip(*run["training"], strict=True), color=color, alpha=0.25)
        steps, success, error = zip(*run["held_out"], strict=True)
        axes.errorbar(steps, success, yerr=error, color=color, marker="o", capsize=3, label=f"seed {run['seed']}")
    axes.axhline(0.9, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="GRPO step", ylabel="success on held-out rows", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [play("quickstart", seed, Path(folder)) for seed in SEEDS]
    keep(RESULTS / "quickstart.json", {"command": "python -m benchmarks.quickstart", **machine(), "runs": runs})
    draw(runs)
    for run in runs:
        print(f"seed {run['seed']}: {run['before']:.1%} -> {run['after']:.1%} in {run['seconds']:.0f} s")


if __name__ == "__main__":
    main()
