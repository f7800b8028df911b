"""Compare evaluations on the same rows: means, the difference with its interval, rows won and lost, a verdict.

An evaluation is one that a run made while it trained, found by its step, or a file that `agent-r1 eval` wrote. The
statistics are in `statistics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from rich.console import Console
from rich.text import Text

from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.runs.outcomes import NOT_RECORDED, EvalRecord, Subject, by_row, row_outcomes
from agent_r1.runs.reader import RunReader
from agent_r1.runs.statistics import FEWEST_DIFFERING, LEVEL, PairedDifference, paired_difference
from agent_r1.runs.trajectories import read_trajectories

PERCENT = f"{100 * LEVEL:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the compared evaluations."""

    letter: str
    place: str  # a path, and the step if it is a run
    record: EvalRecord

    def __str__(self) -> str:
        return f"{self.letter} ({self.place})"


def find_sides(places: Sequence[Path], *, step: str | None, name: str | None) -> list[Side]:
    """Find the evaluations to compare: files, or runs whose evaluations are chosen by `step` or `name`.

    `step` is first, last or a number: one for all runs, or one for each, separated by commas. `name` is the name of an
    evaluation made by `agent-r1 eval`. The default is the last evaluation of a run. A single place with several steps
    is compared with itself.
    """
    steps = [word.strip() for word in (step or "last").split(",")]
    if len(places) == 1:
        places = [*places] * len(steps)
    if len(places) < 2:
        raise ConfigError(f"nothing to compare {places[0]} with: pass a second run or --step first,last")
    if len(places) > len(ascii_uppercase):
        raise ConfigError(f"{len(places)} evaluations are too many: compare at most {len(ascii_uppercase)}")
    if step is not None and name is not None:
        raise ConfigError("--step chooses evaluations made while training, --name those of agent-r1 eval: use one")
    if len(steps) not in (1, len(places)):
        raise ConfigError(f"--step {step}: pass one step for all, or one for each of the {len(places)} evaluations")
    sides = []
    for index, place in enumerate(places):
        which = None if step is None and place.is_file() else steps[index % len(steps)]
        where, record = _find(place, which, name)
        sides.append(Side(letter=ascii_uppercase[index], place=where, record=record))
    return sides


def _find(place: Path, step: str | None, name: str | None) -> tuple[str, EvalRecord]:
    if place.is_file():
        if step is not None or name is not None:
            raise ConfigError(f"{place} is a single evaluation: --step and --name choose among those of a run")
        return str(place), EvalRecord.load(place)
    run = RunReader.open(place)
    if name is not None:
        files = {path.stem: path for path in run.evals.glob("*.json")}
        if name not in files:
            raise ConfigError(f"{place} has no evaluation {name!r}.{did_you_mean(name, files)}")
        return str(files[name]), EvalRecord.load(files[name])
    assert step is not None
    return _find_step(run, step)


def _find_step(run: RunReader, which: str) -> tuple[str, EvalRecord]:
    """Return an evaluation made while training; `which` is first, last or a step."""
    evaluations = {record["step"]: record for record in run.read_metrics("eval")}
    if not evaluations:
        files = ", ".join(sorted(str(path) for path in run.evals.glob("*.json")))
        hint = f"Results of agent-r1 eval: {files}" if files else f"Evaluate it: agent-r1 eval {run}"
        raise ConfigError(f"{run} was never evaluated while it trained. {hint}")
    places = {"first": min(evaluations), "last": max(evaluations)}
    step = places.get(which, int(which) if which.isdecimal() else -1)
    if step not in evaluations:
        known = ", ".join(map(str, evaluations))
        raise ConfigError(f"--step {which}: {run} was evaluated at steps {known}; use one of them, first or last")
    evaluated, settings = evaluations[step], run.settings
    episodes = read_trajectories(run.trajectories_file("eval", step))
    record = EvalRecord(
        subject=Subject.of(settings, model=f"step {step}", panel=evaluated.get("panel", NOT_RECORDED)),
        outcomes=row_outcomes(by_row(episodes), success_reward=settings["task"]["success_reward"]),
        metrics={key: value for key, value in evaluated.items() if isinstance(value, float) and key != "time"},
        time=evaluated["time"],
    )
    return f"{run}, step {step}", record


def compare(before: Side, after: Side) -> dict[str, PairedDifference]:
    """Compare two evaluations by measure. Raises ConfigError or DataError if they are not of the same rows."""
    a, b = before.record, after.record
    if a.subject.panel != b.subject.panel:
        raise ConfigError(
            f"{before} was evaluated on rows {a.subject.panel} ({len(a.outcomes)} rows of {a.subject.split!r}), "
            f"{after} on rows {b.subject.panel} ({len(b.outcomes)} rows of {b.subject.split!r}). Evaluate both on the "
            "same rows: agent-r1 eval RUN --split NAME eval.rows=N"
        )
    if a.outcomes.keys() != b.outcomes.keys():
        raise DataError(f"{before} and {after} should have the same rows ({a.subject.panel}): one file is damaged")
    if len(a.outcomes) < 2:
        raise ConfigError(f"{before} has a single row, which shows nothing: evaluate more (eval.rows)")
    common = [measure for measure in a.measures if measure in b.measures]
    return {measure: paired_difference(a.column(measure), b.column(measure)) for measure in common}


def show_comparisons(sides: Sequence[Side], console: Console, *, measure: str) -> None:
    """Compare every evaluation with the first and print the table and the verdicts."""
    first, record = sides[0], sides[0].record
    table, notes, verdicts = [_HEADER], list[str](), list[str]()
    for side in sides[1:]:
        differences = compare(first, side)
        if measure not in differences:
            raise ConfigError(f"unknown measure {measure!r}.{did_you_mean(measure, differences)}")
        table += [[f"{first.letter} -> {side.letter}", name, *_cells(name, each)] for name, each in differences.items()]
        notes += _note(first, side)
        verdicts.append(_verdict(measure, differences[measure], first.letter, side.letter))
    lines = [f"{side.letter}  {side.place}" for side in sides]
    lines += ["", f"panel {record.subject.panel}, {len(record.outcomes)} rows; {PERCENT} intervals, paired by row", ""]
    lines += [*_align(table), *notes, "", *verdicts]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


_HEADER = ["", "", "before", "after", "difference", "interval", "won", "lost", "tied"]


def _cells(measure: str, result: PairedDifference) -> list[str]:
    return [
        number(measure, result.mean_a),
        number(measure, result.mean_b),
        number(measure, result.difference, signed=True),
        f"{number(measure, result.low, signed=True)} to {number(measure, result.high, signed=True)}",
        *map(str, (result.won, result.lost, result.tied)),
    ]


def _note(before: Side, after: Side) -> list[str]:
    """Say which recorded settings differ between two evaluations besides the policy."""
    a, b = before.record.subject, after.record.subject
    settings = [(name, a.setting(name), b.setting(name)) for name in {**a.settings, **b.settings}]
    sampled = a.settings.get("temperature") or b.settings.get("temperature")
    known = [("recipe", a.recipe, b.recipe), *settings, *([("seed", a.seed, b.seed)] if sampled else [])]
    differ = [f"{name} {x} ({before.letter}), {y} ({after.letter})" for name, x, y in known if x != y]
    return ["", f"note: settings differ: {'; '.join(differ)}"] if differ else []


def _verdict(measure: str, result: PairedDifference, first: str, second: str) -> str:
    difference, low, high = result.difference, result.low, result.high
    if result.is_shown and difference < 0:  # say how much better the first is
        first, second, difference, low, high = second, first, -difference, -high, -low
    by = "points of success" if measure == "success" else f"of {measure}"
    interval = f"{PERCENT} interval {number(measure, low)} to {number(measure, high)}"
    size = f"{number(measure, difference, signed=True)} {by}, {interval}"
    if result.is_shown:
        return f"{second} is better than {first}: {size}"
    few = f"; only {result.won + result.lost} rows differ, at least {FEWEST_DIFFERING} are needed"
    return f"no difference shown, {second} against {first}: {size}{few if result.too_few_differ else ''}"


def number(measure: str, value: float, *, signed: bool = False) -> str:
    """Format success in percent, anything else as a plain number."""
    value, digits = (100 * value, 1) if measure == "success" else (value, 3)
    rounded = round(value, digits) + 0.0  # avoids -0.0
    return f"{rounded:{'+' if signed else ''}.{digits}f}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns of text: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(row).rstrip() for row in cells]
