"""The quickstart as a newcomer runs it, for several seeds: time, success before and after, and one picture.

    python -m benchmarks.quickstart            # seeds 0, 1, 2; writes results/quickstart.json and docs/quickstart.png

Every run starts with an empty cache, so its time includes making and warm-starting the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.machine import RESULTS, machine

SEEDS = (0, 1, 2)
PICTURE = Path(__file__).parents[1] / "docs" / "quickstart.png"


def play(seed: int, folder: Path) -> dict[str, Any]:
    run = folder / f"seed{seed}"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "agent_r1.cli", "train", "quickstart", f"seed={seed}", "--run", str(run)],
        check=True,
        env={**os.environ, "AGENT_R1_CACHE": str(folder / f"cache{seed}")},
    )
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [(r["step"], r["success"], r["success_stderr"]) for r in records if r["kind"] == "eval"]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "before": held_out[0][1],
        "after": held_out[-1][1],
        "after_stderr": held_out[-1][2],
        "held_out": held_out,
        "training": [(r["step"], r["success"]) for r in records if r["kind"] == "train"],
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
        runs = [play(seed, Path(folder)) for seed in SEEDS]
    RESULTS.mkdir(exist_ok=True)
    result = {"command": "python -m benchmarks.quickstart", **machine(), "runs": runs}
    (RESULTS / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(runs)
    for run in runs:
        print(f"seed {run['seed']}: {run['before']:.1%} -> {run['after']:.1%} in {run['seconds']:.0f} s")


if __name__ == "__main__":
    main()
