"""What `agent-r1 bench` does: run a benchmark's groups, store the rows, show them beside the stored ones."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.text import Text

from agent_r1.bench import engine, learner, step
from agent_r1.bench.machine import accelerator, checkout, commit, machine, pick_device, slug
from agent_r1.bench.results import Results, Row, as_markdown, as_tables, comparison, fill_in
from agent_r1.build.cache import cache_root
from agent_r1.errors import ConfigError, did_you_mean


class Bench(Protocol):
    """One benchmark: groups of rows by name, measured in this order."""

    @property
    def groups(self) -> Mapping[str, Callable[[], Iterator[Row]]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    device: str
    quick: bool
    repeats: int
    out: Path | None
    only: str | None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be at least 1, got {self.repeats}")


def bench_engine(options: Options, console: Console) -> Path:
    device, quick = _sizes(options)
    sizes = engine.QUICK if quick else engine.FULL
    return _run("engine", engine.EngineBench(sizes=sizes, device=device, repeats=options.repeats), options, console)


def bench_learner(options: Options, console: Console) -> Path:
    device, quick = _sizes(options)
    sizes = learner.QUICK if quick else learner.FULL
    return _run("learner", learner.LearnerBench(sizes=sizes, device=device, repeats=options.repeats), options, console)


def bench_step(options: Options, console: Console, *, against: str | None) -> Path:
    device, quick = _sizes(options)
    rival = find_rival(against) if against is not None else None
    sizes = step.QUICK if quick else step.FULL
    made = step.StepBench(sizes=sizes, device=device, repeats=options.repeats, make_rival=rival)
    return _run("step", made, options, console)


def find_rival(name: str) -> step.MakeRival:
    """`make_rival` of benchmarks/NAME_step.py in the checkout: other trainers are no part of this package."""
    root = checkout()
    if root is None:
        raise ConfigError(f"--against {name}: other trainers are in the repository, not in an installed package")
    known = sorted(path.name.removesuffix("_step.py") for path in (root / "benchmarks").glob("*_step.py"))
    if name not in known:
        raise ConfigError(f"--against {name}: no such trainer in {root / 'benchmarks'}.{did_you_mean(name, known)}")
    if str(root) not in sys.path:  # started as the installed command
        sys.path.insert(0, str(root))
    try:
        found: step.MakeRival = importlib.import_module(f"benchmarks.{name}_step").make_rival
    except ModuleNotFoundError as error:
        raise ConfigError(f"--against {name}: {error}; benchmarks/{name}_step.py says what to install") from error
    return found


def results_folder(out: Path | None) -> Path:
    """Where results are kept: with the repository, or with what else is cached."""
    if out is not None:
        return out
    root = checkout()
    return cache_root() / "bench" if root is None else root / "benchmarks" / "results"


def show(path: Path, group: str | None, console: Console) -> None:
    """Stored results as markdown."""
    results = Results.read(path)
    if results is None:
        raise ConfigError(f"there is no {path}")
    groups = [group] if group is not None else list(dict.fromkeys(row.group for row in results.rows))
    for name in groups:
        console.print(Text(f"\n{as_markdown(results.rows, name)}"), soft_wrap=True)


def fill_page(page: Path, console: Console, *, out: Path | None) -> None:
    """Write stored results into a page, between its markers."""
    page.write_text(fill_in(page.read_text(encoding="utf-8"), results_folder(out)), encoding="utf-8")
    console.print(Text(f"{page} shows the results in {results_folder(out)}"), soft_wrap=True)


def _sizes(options: Options) -> tuple[torch.device, bool]:
    """A CPU always gets the small sizes: the full ones would take it hours and say nothing about it."""
    device = pick_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices of that size only get slower by being shared out
    return device, options.quick or device.type == "cpu"


def _run(name: str, bench: Bench, options: Options, console: Console) -> Path:
    """Rows are stored group by group: if a later one fails, the earlier ones have been measured all the same."""
    device, quick = _sizes(options)
    on = accelerator(device)
    path = results_folder(options.out) / f"bench_{name}.{slug(on)}{'.quick' if quick else ''}.json"
    stored, rows = Results.read(path), list[Row]()
    command = shlex.join(["agent-r1", *_without_out(sys.argv[1:])])
    try:
        for group, measure in _chosen(bench, options.only).items():
            began = time.perf_counter()
            measured = [replace(row, commit=commit()) for row in measure()]
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
    """Where results went is nobody's business later."""
    return [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]


def _chosen(bench: Bench, only: str | None) -> Mapping[str, Callable[[], Iterator[Row]]]:
    if only is None:
        return bench.groups
    names = only.split(",")
    for name in names:
        if name not in bench.groups:
            raise ConfigError(f"--only {name}: no such group of rows.{did_you_mean(name, bench.groups)}")
    return {name: bench.groups[name] for name in names}
