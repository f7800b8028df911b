"""Train the quickstart with every algorithm, from the same warm start per seed.

    python -m benchmarks.algorithms                  # all algorithms, seeds 0, 1, 2; writes results/algorithms.json
    python -m benchmarks.algorithms --draw           # docs/algorithms.png and the table, from that file

Every run is the unchanged recipe with another `algorithm.name`. Runs share the machine (`--workers` at a time, one core
each), so compare times only with each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.track.plots import drawn, series
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, as_they_end, held_out, keep

RECIPE = "quickstart"
FILE = RESULTS / "algorithms.json"
COLUMNS = 4
PICTURE = Path(__file__).parents[1] / "docs" / "algorithms.png"


def measure(
    recipe: str, names: Sequence[str], seeds: Sequence[int], workers: int, overrides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def job(name: str, seed: int, *words: str) -> Job:
            environment = {"AGENT_R1_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
            return Job(name=name, seed=seed, words=("train", recipe, *words), environment=environment)

        # Warm starts first, one per seed, so that all algorithms of a seed find it in the cache.
        warm = [job("warm", seed, *overrides, "trainer.steps=0", "eval.rows=1") for seed in seeds]
        for _ in as_they_end(warm, lambda job: {"run": job.run(folder)}, workers):
            pass
        order = sorted(names, key=lambda name: not ALGORITHMS[name].needs_critic)  # long runs first
        jobs = [job(name, seed, f"algorithm.name={name}", *overrides) for name in order for seed in seeds]
        for runs in as_they_end(jobs, lambda job: play(job, folder), workers):
            yield {"workers": workers, "overrides": list(overrides), "runs": runs}


def play(job: Job, folder: Path) -> dict[str, Any]:
    run, seconds = job.run(folder)
    evaluated = held_out(run)
    print(f"{job.name:22s} seed {job.seed}: {evaluated[0][1]:6.1%} -> {evaluated[-1][1]:6.1%}", flush=True)
    explained = [step["explained_variance"] for step in run.read_metrics("train") if "explained_variance" in step]
    return {
        "algorithm": job.name,
        "seed": job.seed,
        "seconds": seconds,
        "held_out": evaluated,
        "explained_variance": [round(value, 3) for value in explained],
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Held-out success before and after, per seed, as markdown."""
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
    names = [name for name in ALGORITHMS if any(run["algorithm"] == name for run in runs)]
    rows = -(-len(names) // COLUMNS)
    with drawn(PICTURE, height=2 * rows) as figure:
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True)
        for axes, name in zip(grid.flat, names, strict=False):
            for index, run in enumerate(run for run in runs if run["algorithm"] == name):
                steps, success, error = zip(*run["held_out"], strict=True)
                axes.errorbar(steps, success, yerr=error, **series(index), markersize=4, label=f"seed {run['seed']}")
            axes.set_title(name)
        for axes in list(grid.flat)[len(names) :]:
            axes.axis("off")
        for axes in list(grid.flat)[len(names) - COLUMNS : len(names)]:  # nothing is below them
            axes.tick_params(labelbottom=True)
        grid.flat[0].set_ylim(0, 1.02)
        grid.flat[0].legend(fontsize=9, loc="lower right")
        figure.supxlabel("training step")
        figure.supylabel("success on held-out rows")


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
        facts = {"command": " ".join(["python -m benchmarks.algorithms", *words]), **machine()}
        for measured in measure(RECIPE, options.algorithms.split(","), seeds, options.workers, options.set):
            keep(options.out, facts | measured)
    runs = json.loads(options.out.read_text(encoding="utf-8"))["runs"]
    print(table(runs))
    if options.draw:
        draw(runs)


if __name__ == "__main__":
    main(sys.argv[1:])
