"""Measure and show the tables of docs/benchmarks.md.

python -m benchmarks.speed engine
python -m benchmarks.speed engine --shape 1.5b --against vllm
python -m benchmarks.speed learner
python -m benchmarks.speed sizes
python -m benchmarks.speed vision
python -m benchmarks.speed step --against trl
python -m benchmarks.speed show benchmarks/results/bench_engine.nvidia-h200.json --only decode
python -m benchmarks.speed page docs/benchmarks.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agent_r1.bench import engine_speed, learner_speed, step_speed
from agent_r1.bench.command import Bench, Options, file_name, pick_shape, pick_sizes, run_bench
from agent_r1.bench.models import SMOLLM2_135M, TINY, LlamaShape
from agent_r1.bench.results import Results
from agent_r1.bench.step_speed import StepBench
from agent_r1.errors import ConfigError
from benchmarks.machine import RESULTS
from benchmarks.speed import engine_comparison, learner_comparison, vision
from benchmarks.speed import sizes as sizes_bench
from benchmarks.speed.engine_comparison import EngineComparison
from benchmarks.speed.engine_rivals import EngineAgainst, find_engine_rival
from benchmarks.speed.learner_comparison import LearnerComparison
from benchmarks.speed.sizes import SizesBench
from benchmarks.speed.step_comparison import StepComparison, find_rival
from benchmarks.speed.tables import as_markdown, fill_page
from benchmarks.speed.vision import VisionBench


def make_bench(
    name: str,
    *,
    quick: bool,
    device: torch.device,
    repeats: int,
    against: str | None = None,
    shape: LlamaShape | None = None,
    pictures: tuple[int, ...] | None = None,
) -> Bench:
    shape = shape or (TINY if quick else SMOLLM2_135M)
    if name == "sizes":
        return SizesBench(grid=sizes_bench.QUICK if quick else sizes_bench.FULL, device=device, repeats=repeats)
    if name == "vision":
        vision_sizes = vision.QUICK if quick else vision.FULL
        vision_sizes = replace(vision_sizes, pictures=pictures or vision_sizes.pictures)
        return VisionBench(sizes=vision_sizes, device=device, repeats=repeats)
    common: dict[str, Any] = {"model": shape.model(), "device": device, "repeats": repeats}
    if name == "engine" and against is not None:
        engine_sizes = engine_speed.sizes_for(engine_speed.QUICK if quick else engine_speed.FULL, common["model"])
        return EngineAgainst(sizes=engine_sizes, make_rival=find_engine_rival(against), **common)
    if name == "engine":
        return EngineComparison(
            sizes=engine_speed.sizes_for(engine_speed.QUICK if quick else engine_speed.FULL, common["model"]),
            append_sizes=engine_comparison.QUICK_APPEND if quick else engine_comparison.FULL_APPEND,
            soak_sizes=engine_comparison.QUICK_SOAK if quick else engine_comparison.FULL_SOAK,
            **common,
        )
    if name == "learner":
        return LearnerComparison(
            shape=shape,
            sizes=learner_speed.QUICK if quick else learner_speed.FULL,
            compared=learner_comparison.QUICK if quick else learner_comparison.FULL,
            **common,
        )
    sizes = step_speed.QUICK if quick else step_speed.FULL
    if against is None:
        return StepBench(sizes=sizes, **common)
    return StepComparison(sizes=sizes, make_rival=find_rival(against), **common)


def run(
    name: str,
    options: Options,
    console: Console,
    *,
    against: str | None = None,
    pictures: tuple[int, ...] | None = None,
) -> Path:
    device, quick = pick_sizes(options)
    shape = pick_shape(options, quick=quick)
    sizes: dict[str, Any] = {"quick": quick, "device": device, "repeats": options.repeats, "shape": shape, "pictures": pictures}
    bench = make_bench(name, against=against, **sizes)
    kind = name if against is None or name == "step" else f"{name}_{against}"
    path = (options.out or RESULTS) / file_name(kind, device, quick=quick, model=options.shape)
    return run_bench(bench, path, "python -m benchmarks.speed", options, console)


def show(path: Path, group: str | None) -> None:
    results = Results.read(path)
    if results is None:
        raise ConfigError(f"there is no {path}")
    for name in [group] if group is not None else dict.fromkeys(row.group for row in results.rows):
        print(f"\n{as_markdown(results.rows, name)}")


def counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("engine", "learner", "step", "sizes", "vision"):
        verb = verbs.add_parser(name)
        verb.add_argument("--device", default="auto", help="auto, cpu or cuda")
        verb.add_argument("--quick", action="store_true", help="smoke test with a tiny model and small sizes")
        verb.add_argument("--repeats", type=int, default=3, help="measurements of each side; medians are reported")
        verb.add_argument("--out", type=Path, help="folder for the results instead of benchmarks/results")
        verb.add_argument("--only", help="groups to measure, separated by commas")
    verbs.choices["step"].add_argument("--against", help="another trainer to take turns with, such as trl")
    verbs.choices["engine"].add_argument("--against", help="another engine to take turns with, such as vllm")
    verbs.choices["engine"].add_argument("--shape", help="sizes of a common model: tiny, 135m, 1.5b, 4b, 8b, 14b")
    verbs.choices["vision"].add_argument("--pictures", type=counts, help="pictures per prompt, separated by commas")
    verb = verbs.add_parser("show", help="print stored results as markdown tables")
    verb.add_argument("file", type=Path)
    verb.add_argument("--only", help="group of rows to show")
    verb = verbs.add_parser("page", help="write stored results into a page, between its markers")
    verb.add_argument("file", type=Path)
    given = vars(parser.parse_args(arguments))
    verb_name, against, pictures = (given.pop(name, None) for name in ("verb", "against", "pictures"))
    if verb_name == "show":
        show(given["file"], given["only"])
    elif verb_name == "page":
        page: Path = given["file"]
        page.write_text(fill_page(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
    else:
        run(verb_name, Options(**given), Console(), against=against, pictures=pictures)


if __name__ == "__main__":
    main()
