"""Algorithms over several training seeds: mean gain, and difference to the first algorithm, with intervals.

Reads the results of `benchmarks.recipes`. The runs of a comparison may have trained for the same number of steps or for
the same time, so there are two views: every run at the last step that all runs reached, and every run at the last
evaluation within the time that the shortest run took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.seed_statistics import MeanInterval, crossed_mean

Evaluation = Mapping[str, Any]
Choice = Callable[[Mapping[str, Any]], Evaluation]  # one of a run's evaluations
FIRST, LAST = 0, -1
ERRORS = ("mase",)  # measures that RL should make smaller


def at_equal_steps(runs: Sequence[Mapping[str, Any]]) -> tuple[str, Choice]:
    """What the view is called, and which evaluation of each run it takes."""
    common = set.intersection(*({each["step"] for each in run["held_out"]} for run in runs))
    step = max(common)
    return f"after {step} steps", lambda run: next(each for each in run["held_out"] if each["step"] == step)


def at_equal_time(runs: Sequence[Mapping[str, Any]]) -> tuple[str, Choice]:
    limit = min(run["held_out"][LAST]["seconds"] for run in runs)

    def choose(run: Mapping[str, Any]) -> Evaluation:
        in_time: list[Evaluation] = [each for each in run["held_out"] if each["seconds"] <= limit]
        return in_time[LAST]

    return f"after {limit / 60:.1f} minutes", choose


def has_rows(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the outcome of each row was stored; older results have means only."""
    return all("by_row" in each for run in runs for each in run["held_out"])


def outcomes(evaluation: Evaluation, measure: str) -> list[float]:
    named = {name.removeprefix("reward_part/"): column for name, column in evaluation["by_row"].items()}
    if measure not in named:
        raise SystemExit(f"there is no measure {measure!r} here, but {', '.join(sorted(named))}")
    return [float(word) for word in named[measure].split()]


def gain(runs: Sequence[Mapping[str, Any]], choose: Choice, measure: str) -> MeanInterval:
    """Of the runs of one algorithm, against their own first evaluations."""
    return crossed_mean(
        [_minus(outcomes(choose(run), measure), outcomes(run["held_out"][FIRST], measure)) for run in runs]
    )


def difference(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], choose: Choice, measure: str
) -> MeanInterval | None:
    """`runs` minus `others`, seed by seed and row by row; None if they have no seed in common."""
    by_seed = {run["seed"]: run for run in others}
    pairs = [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    if not pairs:
        return None
    return crossed_mean([_minus(outcomes(choose(a), measure), outcomes(choose(b), measure)) for a, b in pairs])


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [first - second for first, second in zip(a, b, strict=True)]


def views(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Choice]]:
    """Equal steps and equal time; only the first without times, for one algorithm, or if both take the same
    evaluations."""
    steps = at_equal_steps(runs)
    if len(by_name(runs)) == 1 or any(each["seconds"] is None for run in runs for each in run["held_out"]):
        return [steps]
    time = at_equal_time(runs)
    same = all(steps[1](run)["step"] == time[1](run)["step"] for run in runs)
    return [steps] if same else [steps, time]


def by_name(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    named: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        named.setdefault(run["name"], []).append(run)
    return named


def interval_cell(found: MeanInterval | None, measure: str) -> str:
    if found is None:
        return ""
    scale, digits = (100, 1) if measure == "success" else (1, 3)
    mean, low, high = (f"{scale * each:+.{digits}f}" for each in (found.mean, found.low, found.high))
    return f"{mean} ({low} to {high})"


def seeds_table(results: Mapping[str, Any], measures: Sequence[str] = ("success",)) -> str:
    """Markdown, one part per measure and view; empty if no algorithm has several seeds, or rows were not stored."""
    runs = results["runs"]
    if not has_rows(runs) or max(map(len, by_name(runs).values())) < 2:
        return ""
    parts = [one_table(runs, measure, title, choose) for measure in measures for title, choose in views(runs)]
    return "\n\n".join([*parts, HOW_SURE])


def one_table(runs: Sequence[Mapping[str, Any]], measure: str, title: str, choose: Choice) -> str:
    named = by_name(runs)
    first, *others = named
    titles = [title, "seeds", measure, "change (lower is better)" if measure in ERRORS else "gain"]
    titles += [f"against `{first}`"] if others else []
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for name, own in named.items():
        values = [value for run in own for value in outcomes(choose(run), measure)]
        mean = sum(values) / len(values)
        shown = f"{mean:.1%}" if measure == "success" else f"{mean:.3f}"
        cells = [f"`{name}`", str(len(own)), shown, interval_cell(gain(own, choose, measure), measure)]
        if others:
            against = None if name == first else difference(own, named[first], choose, measure)
            cells.append(interval_cell(against, measure))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


HOW_SURE = (
    "Means over training seeds. The intervals (95 %) cover the choice of seeds and the choice of evaluation rows; with "
    "few seeds they are wide. Differences are taken seed by seed and row by row."
)
