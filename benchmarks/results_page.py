"""Write docs/results.md: what each bundled task gains from RL, with a picture and the intervals.

    python -m benchmarks.results_page

All numbers come from `benchmarks/results/`; a test compares the page with what this module writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.machine import RESULTS
from benchmarks.over_seeds import LAST, at_equal_steps, by_name, gain, has_rows, interval_cell, seeds_table
from benchmarks.recipes import ROOT, gain_cell, markdown

PAGE = ROOT / "docs" / "results.md"
GENERATED = "<!-- Written by `python -m benchmarks.results_page`. -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    recipe: str
    what: str
    file: str  # of the results
    measures: tuple[str, ...] = ("success",)  # compared over seeds
    note: str = ""  # how to read the tables

    @property
    def picture(self) -> str:
        return f"{self.file}.png"

    @property
    def readme(self) -> str:
        return f"../agent_r1/recipes/{self.recipe.partition('/')[0]}/README.md"


TASKS = (
    Task(recipe="quickstart", what="looks two people up and adds their coins", file="quickstart"),
    Task(
        recipe="planner_worker",
        what="answers the same questions in two roles, one plans and one works",
        file="planner_worker",
        measures=("right_plan", "carried_out"),
        note="`right_plan` is what the planner did right, `carried_out` what the worker did right.",
    ),
    Task(
        recipe="drafts_critic",
        what="drafts two plans in one role and chooses in the other",
        file="drafts_critic",
        measures=("offered", "chosen"),
        note="`offered`: the drafter wrote a right and a wrong draft. `chosen`: the critic then took the right one.",
    ),
    Task(recipe="vision_quickstart", what="finds two marked cards in a picture", file="vision_quickstart"),
    Task(
        recipe="forecast",
        what="chooses a forecasting model for a series with tools",
        file="forecast",
        measures=("success", "mase"),
        note="`mase` is the mean absolute error, divided by the mean absolute seasonal difference of the known part.",
    ),
    Task(recipe="tables/cpu", what="answers questions about generated tables with SQL", file="tables-cpu"),
    Task(
        recipe="paper_search/cpu",
        what="finds generated papers by searching and expanding",
        file="paper_search-cpu",
        measures=("success", "recall"),
        note="`outcome` is `grpo` without process rewards. An episode succeeds if all gold papers were found.",
    ),
    Task(recipe="gridworld", what="crosses a frozen lake that only pictures show", file="gridworld"),
    Task(recipe="gsm8k", what="solves school mathematics in one step", file="gsm8k"),
    Task(recipe="gsm8k_tool", what="solves school mathematics with a calculator", file="gsm8k_tool"),
    Task(recipe="retool/gsm8k", what="solves school mathematics by writing Python in a sandbox", file="retool-gsm8k"),
    Task(recipe="hotpotqa", what="answers questions that take two searches", file="hotpotqa"),
    Task(recipe="alfworld", what="does housework in text games", file="alfworld"),
    Task(recipe="alfworld/explorer", what="does housework, after better demonstrations", file="alfworld-explorer"),
    Task(recipe="webshop", what="finds and buys what was asked for", file="webshop"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One algorithm on one task."""

    name: str
    seeds: int
    before: float
    after: float
    gain: str
    covers: str  # what the interval is about

    def cells(self) -> list[str]:
        return [f"{self.before:.1%}", f"{self.after:.1%}", self.gain, self.covers]


def lines_of(results: Mapping[str, Any]) -> list[Line]:
    """One line per algorithm, from the results of `benchmarks.recipes` or of a quickstart."""
    return list(_compared(results["runs"]) if "start" in results else _seeds(results["runs"]))


def _compared(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    for name, own in by_name(runs).items():
        yield Line(
            name=name,
            seeds=len(own),
            before=fmean(run["held_out"][0]["success"] for run in own),
            after=fmean(run["held_out"][LAST]["success"] for run in own),
            gain=_gain(own),
            covers=f"{len(own)} seeds and rows" if len(own) > 1 and has_rows(own) else _one_or_each(own),
        )


def _gain(runs: Sequence[Mapping[str, Any]]) -> str:
    """With an interval if there is one for all runs together, else for each run."""
    if has_rows(runs):
        return interval_cell(gain(runs, at_equal_steps(runs)[1], "success"), "success")
    return "; ".join(gain_cell(run) for run in runs)


def _one_or_each(runs: Sequence[Mapping[str, Any]]) -> str:
    return "1 seed: rows" if len(runs) == 1 else f"{len(runs)} seeds: rows of each"


def _seeds(runs: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    gains = sorted(100 * (run["after"] - run["before"]) for run in runs)
    yield Line(
        name="grpo",
        seeds=len(runs),
        before=fmean(run["before"] for run in runs),
        after=fmean(run["after"] for run in runs),
        gain=f"{fmean(gains):+.1f} ({gains[0]:+.1f} to {gains[-1]:+.1f})",
        covers=f"{len(runs)} seeds: lowest and highest",
    )


def where(results: Mapping[str, Any]) -> str:
    return str(results.get("accelerator") or f"{results['cores']} CPU cores")


def write_page(tasks: Sequence[Task] = TASKS) -> str:
    found = [(task, json.loads((RESULTS / f"{task.file}.json").read_text(encoding="utf-8"))) for task in tasks]
    overview = [["task", "the agent", "before RL", "after RL", "gain, points", "the interval covers", "on"]]
    for task, results in found:
        first = lines_of(results)[0]
        link = f"[{task.recipe}](#{_anchor(task.recipe)})"
        overview.append([link, task.what, *first.cells(), where(results)])
    sections = [section(task, results) for task, results in found]
    return "\n\n".join([GENERATED, INTRODUCTION, markdown(overview), READING, *sections]) + "\n"


def section(task: Task, results: Mapping[str, Any]) -> str:
    table = [["algorithm", "seeds", "before RL", "after RL", "gain, points", "the interval covers"]]
    table += [[f"`{line.name}`", str(line.seeds), *line.cells()] for line in lines_of(results)]
    over_seeds = seeds_table(results, task.measures) if "start" in results else ""
    parts = [
        f"## {task.recipe}",
        f"The agent {task.what}. [Task, data, settings and commands]({task.readme}#results)",
        f"![Held-out success of {task.recipe} over RL steps]({task.picture})",
        markdown(table),
        over_seeds,
        task.note,
    ]
    return "\n\n".join(part for part in parts if part)


def _anchor(heading: str) -> str:
    return heading.replace("/", "").lower()


INTRODUCTION = """# Results

The gain of each bundled task from RL with GRPO: success on held-out rows, greedy, before the first RL step (after the
warm start on demonstrations) and after the last one. Tasks measured on a CPU train models of 1 to 2 million parameters;
the other tasks train SmolLM2-135M-Instruct on one H200. The sections below have every algorithm."""

READING = """An interval over rows says how sure the gain of one run is. It says nothing about another training
seed, which can matter a lot: compare the seeds of `steppo` on [webshop](#webshop). Only an interval that covers seeds
and rows allows a conclusion about an algorithm. [Evaluation](evaluation.md) explains intervals over rows."""


def main() -> None:
    PAGE.write_text(write_page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
