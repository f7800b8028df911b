"""Run a benchmark's groups, store the rows and print them beside the stored ones."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.text import Text

from agent_r1.bench import engine_speed, learner_speed, step_speed
from agent_r1.bench.machine import accelerator, commit, machine, pick_device, slug
from agent_r1.bench.models import SMOLLM2_135M, TINY, BenchModel, LlamaShape
from agent_r1.bench.results import Results, Row, as_tables, comparison
from agent_r1.build.models.source import cache_root
from agent_r1.errors import ConfigError, did_you_mean


class Bench(Protocol):
    """One benchmark: groups of rows by name, measured in this order."""

    @property
    def groups(self) -> Mapping[str, Callable[[], Iterator[Row]]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    device: str = "auto"
    quick: bool = False
    repeats: int = 3
    out: Path | None = None
    only: str | None = None
    model: str | None = None
    shape: str | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be at least 1, got {self.repeats}")
        if self.model is not None and self.shape is not None:
            raise ConfigError("--model and --shape both name the sizes of a model: leave one out")


BENCHES: dict[str, tuple[Callable[..., Bench], Any, Any]] = {  # each with its small and full sizes
    "engine": (engine_speed.EngineBench, engine_speed.QUICK, engine_speed.FULL),
    "learner": (learner_speed.LearnerBench, learner_speed.QUICK, learner_speed.FULL),
    "step": (step_speed.StepBench, step_speed.QUICK, step_speed.FULL),
}


def bench(name: str, options: Options, console: Console) -> Path:
    """`agent-r1 bench NAME`."""
    device, quick = pick_sizes(options)
    model = pick_shape(options, quick=quick).model() if options.model is None else BenchModel.load(options.model)
    make, small, full = BENCHES[name]
    sizes = small if quick else full
    if name == "engine":
        sizes = engine_speed.sizes_for(sizes, model)
    made = make(model=model, sizes=sizes, device=device, repeats=options.repeats)
    which = options.model or options.shape
    path = (options.out or cache_root() / "bench") / file_name(name, device, quick=quick, model=which)
    return run_bench(made, path, "agent-r1", options, console)


def pick_sizes(options: Options) -> tuple[torch.device, bool]:
    """The device, and whether to use the small sizes. A CPU always uses these: the full ones would take hours."""
    device = pick_device(options.device)
    if device.type == "cpu" and options.model is None:
        torch.set_num_threads(1)  # several threads are slower on the tiny model's matrices
    return device, options.quick or device.type == "cpu"


def pick_shape(options: Options, *, quick: bool) -> LlamaShape:
    if options.shape is not None:
        return LlamaShape.named(options.shape)
    return TINY if quick else SMOLLM2_135M


def file_name(benchmark: str, device: torch.device, *, quick: bool, model: str | None = None) -> str:
    """Results on another accelerator, at other sizes or of another model go to another file."""
    parts = [f"bench_{benchmark}", slug(accelerator(device)), slug(model or ""), "quick" if quick else ""]
    return ".".join(filter(None, parts)) + ".json"


def run_bench(bench: Bench, path: Path, program: str, options: Options, console: Console) -> Path:
    """Measure the groups. Each row is stored at once, so that a later failure loses none."""
    stored, rows = Results.read(path), list[Row]()
    command = f"{program} {shlex.join(_without_out(sys.argv[1:]))}"
    on = accelerator(pick_device(options.device))
    try:
        for group, measure in _select(bench, options.only).items():
            began = time.perf_counter()
            measured = list[Row]()
            for row in measure():
                measured.append(replace(row, commit=commit()))
                found = Results(command=command, machine=machine(), accelerator=on, rows=rows + measured)
                found.merged_over(stored, unfinished=measured[-1].group).write(path)
            rows += measured
            Results(command=command, machine=machine(), accelerator=on, rows=rows).merged_over(stored).write(path)
            for table in as_tables(measured, comparison(measured, stored)):
                console.print(table)
            console.print(Text(f"{group}: {time.perf_counter() - began:.1f} s"))
    finally:
        bench.close()
    compared = len(comparison(rows, stored))
    console.print(Text(f"{compared} of {len(rows)} rows compared with stored ones; written to {path}"), soft_wrap=True)
    return path


def _without_out(words: list[str]) -> list[str]:
    """The stored command should not name a local folder."""
    return [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]


def _select(bench: Bench, only: str | None) -> Mapping[str, Callable[[], Iterator[Row]]]:
    if only is None:
        return bench.groups
    names = only.split(",")
    for name in names:
        if name not in bench.groups:
            raise ConfigError(f"--only {name}: there is no such group of rows.{did_you_mean(name, bench.groups)}")
    return {name: bench.groups[name] for name in names}
