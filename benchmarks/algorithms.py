"""The quickstart trained by every algorithm of the table, from the same warm start per seed.

    python -m benchmarks.algorithms                  # all algorithms, seeds 0, 1, 2; writes results/algorithms.json
    python -m benchmarks.algorithms --draw           # docs/algorithms.png and the table, from that file

A name alone is the vetted algorithm: every run is the recipe as it is, with `algorithm.name` changed. Runs share the
machine (`--workers` at a time, one core each), so times compare with each other, not with a machine of one's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.learn import ALGORITHMS
from benchmarks.machine import RESULTS, machine

FILE = RESULTS / "algorithms.json"
PICTURE = Path(__file__).parents[1] / "docs" / "algorithms.png"


def train(folder: Path, name: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    run = folder / f"{name}-{seed}"
    words = ["train", "quickstart", f"algorithm.name={name}", f"seed={seed}", *overrides, "--run", str(run)]
    log = folder / f"{name}-{seed}.log"
    began = time.perf_counter()
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "agent_r1.cli", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            env={**os.environ, "AGENT_R1_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        )
    if ended.returncode:
        raise SystemExit(f"{name}, seed {seed} failed:\n{log.read_text()[-2000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [(r["step"], r["success"], r["success_stderr"]) for r in records if r["kind"] == "eval"]
    training = [r for r in records if r["kind"] == "train"]
    print(f"{name:22s} seed {seed}: {held_out[0][1]:6.1%} -> {held_out[-1][1]:6.1%}", flush=True)
    return {
        "algorithm": name,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "episodes": round(sum(r["group/count"] for r in training)) * 8,
        "held_out": held_out,
        "explained_variance": [round(r["explained_variance"], 3) for r in training if "explained_variance" in r],
    }


def measure(names: Sequence[str], seeds: Sequence[int], workers: int, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool:
        folder = Path(scratch)
        # Warm starts first, one per seed: all algorithms of a seed then find it in the cache.
        list(pool.map(lambda seed: train(folder, "grpo", seed, ["trainer.steps=0", "eval.rows=1"]), seeds))
        for seed in seeds:
            (folder / f"grpo-{seed}").rename(folder / f"warm-{seed}")
        # Long ones first.
        order = sorted(names, key=lambda name: not ALGORITHMS[name].needs_critic)
        jobs = [pool.submit(train, folder, name, seed, overrides) for name in order for seed in seeds]
        runs = [job.result() for job in jobs]
    return {"workers": workers, "overrides": list(overrides), "runs": runs}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: held-out success before and after, per seed."""
    seeds = sorted({run["seed"] for run in runs})
    before = {run["seed"]: run["held_out"][0][1] for run in runs}
    lines = [
        "| algorithm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | s |",
        "|---|" + "---|" * (len(seeds) + 2),
        "| (warm start) | "
        + " | ".join(f"{before[seed]:.1%}" for seed in seeds)
        + f" | {fmean(before.values()):.1%} | |",
    ]
    for name in ALGORITHMS:
        mine = {run["seed"]: run for run in runs if run["algorithm"] == name}
        if not mine:
            continue
        after = [mine[seed]["held_out"][-1][1] for seed in seeds]
        seconds = fmean(run["seconds"] for run in mine.values())
        lines.append(
            f"| `{name}` | " + " | ".join(f"{x:.1%}" for x in after) + f" | {fmean(after):.1%} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in ALGORITHMS if any(run["algorithm"] == name for run in runs)]
    columns = 5
    figure, grid = plt.subplots(-(-len(names) // columns), columns, figsize=(13, 7), sharex=True, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        for run in (run for run in runs if run["algorithm"] == name):
            steps, success, error = zip(*run["held_out"], strict=True)
            axes.errorbar(steps, success, yerr=error, marker="o", markersize=3, capsize=2, label=f"seed {run['seed']}")
        axes.set_title(name, fontsize=10)
        axes.axhline(0.85, color="gray", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(names) :]:
        axes.axis("off")
    grid.flat[0].set_ylim(0, 1.02)
    grid.flat[0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("training step")
    figure.supylabel("success on held-out rows")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100)
    plt.close(figure)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="override of the recipe, for all runs")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--draw", action="store_true", help="measure nothing; table and picture of --out")
    options = parser.parse_args(words)
    if not options.draw:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        measured = measure(options.algorithms.split(","), seeds, options.workers, options.set)
        command = " ".join(["python -m benchmarks.algorithms", *words])
        options.out.parent.mkdir(exist_ok=True, parents=True)
        options.out.write_text(json.dumps({"command": command, **machine(), **measured}, indent=1) + "\n")
    runs = json.loads(options.out.read_text(encoding="utf-8"))["runs"]
    print(table(runs))
    if options.draw:
        draw(runs)


if __name__ == "__main__":
    main(sys.argv[1:])
