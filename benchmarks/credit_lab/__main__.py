"""python -m benchmarks.credit_lab [all | measure | draw]

`measure` writes results/credit_lab.json. `draw` reads it and writes docs/credit_lab.png and the tables of
docs/credit-lab.md; it needs matplotlib, `measure` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.credit_lab import report
from benchmarks.credit_lab.measure import Plan, measure, quick
from benchmarks.credit_lab.worlds import WORLDS
from benchmarks.machine import RESULTS, machine


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.credit_lab")
    parser.add_argument("verb", nargs="?", choices=("all", "measure", "draw"), default="all")
    parser.add_argument("--quick", action="store_true", help="see that everything runs, in a minute; needs --out")
    parser.add_argument("--families", default=",".join(WORLDS), help="worlds, separated by commas")
    parser.add_argument("--seeds", type=int, default=12, help="of the reported curves; at least 5")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--out", type=Path, help="folder for JSON and picture instead of benchmarks/results and docs")
    options = parser.parse_args(words)
    unknown = sorted(set(options.families.split(",")) - WORLDS.keys())
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; choose from: {', '.join(WORLDS)}")
    if options.seeds < 5:
        parser.error(f"--seeds must be at least 5 for a confidence interval, got {options.seeds}")
    partial = options.quick or options.families != ",".join(WORLDS)
    if partial and options.out is None and options.verb != "draw":
        parser.error("a partial run must not replace the recorded results: give it a folder with --out")
    return options


def main(words: Sequence[str]) -> None:
    options = arguments(words)
    results_file = (options.out or RESULTS) / "credit_lab.json"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU, autograd starts threads, which would rule out forking
    if options.verb != "draw":
        plan = Plan(worlds=tuple(options.families.split(",")), seeds=options.seeds)
        began = time.perf_counter()
        measured = measure(quick(plan) if options.quick else plan, options.workers)
        head = {
            "command": " ".join(["python -m benchmarks.credit_lab", *words]),
            **machine(),
            "workers": options.workers,
            "seconds": round(time.perf_counter() - began, 1),
        }
        results_file.parent.mkdir(parents=True, exist_ok=True)
        results_file.write_text(json.dumps(head | measured) + "\n", encoding="utf-8")
        print(f"{results_file} written after {head['seconds']} s")
    if options.verb != "measure":
        _draw(results_file, options.out)


def _draw(results_file: Path, out: Path | None) -> None:
    from benchmarks.credit_lab.picture import PICTURE, draw  # needs matplotlib

    results = json.loads(results_file.read_text(encoding="utf-8"))
    draw(results, PICTURE if out is None else out / PICTURE.name)
    parts = report.tables(results)
    if out is None:
        report.PAGE.write_text(report.fill_in(report.PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    print("\n\n".join(f"{name}\n{part}" for name, part in parts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
