"""Compare evaluations of the same panel: means, the difference with its interval, rows won and lost, a verdict.

An evaluation is one that a run made while it trained, found by its step, or a file that `agent-r1 eval` wrote. Reads
run directories only; the statistics are in `statistics.py`. Needs no torch, so it answers at once.
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
from agent_r1.runs.records import read_trajectories
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.statistics import FEWEST_DIFFERING, LEVEL, PairedDifference, paired_difference

PERCENT = f"{100 * LEVEL:.0f} %"
UNKNOWN = ("auto", NOT_RECORDED)  # of a number format, what a run leaves to the machine; of anything, what is not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the evaluations that are compared."""

    letter: str
    place: str  # as people would find it again
    record: EvalRecord

    def __str__(self) -> str:
        return f"{self.letter} ({self.place})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`after` against `before`, measure by measure."""

    before: Side
    after: Side
    differences: dict[str, PairedDifference]

    def verdict(self, measure: str) -> str:
        result, first, second = self.differences[measure], self.before.letter, self.after.letter
        if not result.is_shown:
            sure = _how_sure(measure, result.difference, result.low, result.high)
            few = f"; only {result.won + result.lost} rows differ, and it takes {FEWEST_DIFFERING}"
            return f"no difference shown, {second} against {first}: {sure}{few if result.too_few_differ else ''}"
        if result.difference > 0:
            sure = _how_sure(measure, result.difference, result.low, result.high)
            return f"{second} is better than {first}: {sure}"
        sure = _how_sure(measure, -result.difference, -result.high, -result.low)
        return f"{first} is better than {second}: {sure}"


def _how_sure(measure: str, difference: float, low: float, high: float) -> str:
    by = "points of success" if measure == "success" else f"of {measure}"
    return (
        f"{number(measure, difference, signed=True)} {by}, {PERCENT} interval "
        f"{number(measure, low)} to {number(measure, high)}"
    )


def find_sides(places: Sequence[Path], *, step: str | None, name: str | None) -> list[Side]:
    """`step` is first, last or a number, one for all runs or one for each, separated by commas; `name` means the file
    of that name among a run's evaluations. With neither, the last evaluation of a run is meant. One place with several
    steps is compared with itself."""
    steps = [word.strip() for word in (step or "last").split(",")]
    if len(places) == 1:
        places = [*places] * len(steps)
    if len(places) < 2:
        raise ConfigError(f"what is {places[0]} to be compared with? Name another, or two steps: --step first,last")
    if len(places) > len(ascii_uppercase):
        raise ConfigError(f"{len(places)} evaluations are more than the {len(ascii_uppercase)} that have letters")
    if step is not None and name is not None:
        raise ConfigError("--step is of evaluations made while training, --name of those made by eval: give one")
    if len(steps) not in (1, len(places)):
        raise ConfigError(f"--step {step}: give one step for all, or one for each of the {len(places)} compared")
    sides = []
    for index, place in enumerate(places):
        which = None if step is None and place.is_file() else steps[index % len(steps)]
        where, record = _find(place, which, name)
        sides.append(Side(letter=ascii_uppercase[index], place=where, record=record))
    return sides


def _find(place: Path, step: str | None, name: str | None) -> tuple[str, EvalRecord]:
    if place.is_file():
        if step is not None or name is not None:
            raise ConfigError(f"{place} is one evaluation: --step and --name choose among those of a run")
        return str(place), EvalRecord.load(place)
    run = RunDir.open(place)
    if name is not None:
        files = {path.stem: path for path in run.evals.glob("*.json")}
        if name not in files:
            raise ConfigError(f"{place} has no evaluation {name!r}.{did_you_mean(name, files)}")
        return str(files[name]), EvalRecord.load(files[name])
    assert step is not None
    return _during_training(run, step)


def _during_training(run: RunDir, which: str) -> tuple[str, EvalRecord]:
    evaluations = {record["step"]: record for record in run.read_metrics("eval")}
    if not evaluations:
        made = ", ".join(sorted(str(path) for path in run.evals.glob("*.json")))
        hint = f"Results of agent-r1 eval: {made}" if made else f"Evaluate it: agent-r1 eval {run}"
        raise ConfigError(f"{run} was never evaluated while it trained. {hint}")
    places = {"first": min(evaluations), "last": max(evaluations)}
    step = places.get(which, int(which) if which.isdecimal() else None)
    if step not in evaluations:
        raise ConfigError(
            f"--step {which}: {run} was evaluated at the steps {', '.join(map(str, evaluations))}; give one of "
            "them, first or last"
        )
    evaluated = evaluations[step]
    if "panel" not in evaluated:
        raise DataError(
            f"{run} was written by an older version that did not record its evaluation rows. Evaluate it again with "
            f"agent-r1 eval {run}, and compare the file"
        )
    config = run.config
    played = read_trajectories(run.path / "trajectories" / f"eval_{step:06d}.jsonl.gz")
    outcomes = row_outcomes(by_row(played), success_reward=config.task.success_reward)
    record = EvalRecord(
        subject=Subject.of(config, model=f"step {step}", panel=evaluated["panel"]),
        outcomes=outcomes,
        metrics={key: value for key, value in evaluated.items() if isinstance(value, float) and key != "time"},
        time=evaluated["time"],
    )
    return f"{run}, step {step}", record


def compare(before: Side, after: Side) -> Comparison:
    """Refuses what cannot be compared: other rows, or a row that is missing on one side."""
    a, b = before.record, after.record
    if a.subject.panel != b.subject.panel:
        raise ConfigError(
            f"{before} was evaluated on panel {a.subject.panel} ({len(a.outcomes)} rows of {a.subject.split!r}), "
            f"{after} on panel {b.subject.panel} ({len(b.outcomes)} rows of {b.subject.split!r}): different rows show "
            "no difference of policies. Evaluate both on the same: agent-r1 eval RUN --split NAME eval.rows=N"
        )
    if a.outcomes.keys() != b.outcomes.keys():
        raise DataError(f"of panel {a.subject.panel}, {before} and {after} do not have the same rows: one is damaged")
    if len(a.outcomes) < 2:
        raise ConfigError(f"panel {a.subject.panel} has a single row, which shows nothing: evaluate more (eval.rows)")
    common = [measure for measure in a.measures if measure in b.measures]
    return Comparison(
        before=before,
        after=after,
        differences={measure: paired_difference(a.column(measure), b.column(measure)) for measure in common},
    )


def notes(before: Side, after: Side) -> list[str]:
    """What else differs between two evaluations, besides the policy, or may differ."""
    a, b = before.record.subject, after.record.subject
    settings = [(name, a.setting(name), b.setting(name)) for name in {**a.settings, **b.settings}]
    sampled = a.settings.get("temperature") or b.settings.get("temperature")
    known = [("recipe", a.recipe, b.recipe), *settings, *([("seed", a.seed, b.seed)] if sampled else [])]
    differ, may_differ = list[str](), list[str]()
    for name, one, other in known:
        if one != other:
            said = differ if one not in UNKNOWN and other not in UNKNOWN else may_differ
            said.append(f"{name} {one} ({before.letter}), {other} ({after.letter})")
    found = {"not evaluated in the same way": differ, "perhaps not evaluated in the same way": may_differ}
    return [f"note: {what}: {'; '.join(settings)}" for what, settings in found.items() if settings]


def show_comparisons(sides: Sequence[Side], console: Console, *, measure: str) -> list[Comparison]:
    """Everybody against the first."""
    comparisons = [compare(sides[0], side) for side in sides[1:]]
    for comparison in comparisons:
        if measure not in comparison.differences:
            raise ConfigError(f"there is no measure {measure!r}.{did_you_mean(measure, comparison.differences)}")
    record = sides[0].record
    lines = [f"{side.letter}  {side.place}" for side in sides]
    lines += ["", f"panel {record.subject.panel}, {len(record.outcomes)} rows; {PERCENT} intervals, paired by row", ""]
    lines += _aligned([_HEADER, *(line for comparison in comparisons for line in _table(comparison))])
    for comparison in comparisons:
        if said := notes(comparison.before, comparison.after):
            lines += ["", *said]
    lines += ["", *(comparison.verdict(measure) for comparison in comparisons)]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return comparisons


_HEADER = ["", "", "before", "after", "difference", "interval", "won", "lost", "tied"]


def _table(comparison: Comparison) -> list[list[str]]:
    which = f"{comparison.before.letter} -> {comparison.after.letter}"
    return [
        [
            which,
            measure,
            number(measure, result.mean_a),
            number(measure, result.mean_b),
            number(measure, result.difference, signed=True),
            f"{number(measure, result.low, signed=True)} to {number(measure, result.high, signed=True)}",
            *map(str, (result.won, result.lost, result.tied)),
        ]
        for measure, result in comparison.differences.items()
    ]


def number(measure: str, value: float, *, signed: bool = False) -> str:
    """Success in percent, anything else as it is."""
    value, digits = (100 * value, 1) if measure == "success" else (value, 3)
    rounded = round(value, digits) + 0.0  # no minus before a zero
    return f"{rounded:{'+' if signed else ''}.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(row).rstrip() for row in cells]
