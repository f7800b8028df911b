"""The results as the tables of docs/credit-lab.md, between markers that name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from agent_r1.learn.rewards import ProcessScaling

PAGE = Path(__file__).parents[2] / "docs" / "credit-lab.md"
Results = Mapping[str, Any]


def tables(results: Results) -> dict[str, str]:
    return {
        "setting": _setting(results),
        "environments": _worlds(results),
        "area": _learning(results, "area"),
        "final": _learning(results, "final"),
        "cosine": _gradients(results, _cosine),
        "snr": _gradients(results, lambda row: f"{row['snr']:.2f}"),
        "process": _process(results),
    }


def fill_in(text: str, parts: Mapping[str, str]) -> str:
    """Put each part between its markers; a part without markers is an error."""
    for name, part in parts.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, ended, after = rest.partition("<!-- end -->")
        if not (found and ended):
            raise ValueError(f"the page needs <!-- {name} --> and <!-- end --> after it, on separate lines")
        text = f"{before}{found}{part}\n{ended}{after}"
    return text


def _setting(results: Results) -> str:
    plan = results["plan"]
    changed = f" with {results['changed_files']} changed files" if results["changed_files"] else ""
    return (
        f"`{results['command']}` at commit {results['commit'] or 'unknown'}{changed}; {results['cores']} cores "
        f"({results['processor']}), torch {results['torch']}, {results['seconds']:.0f} s. Curves: "
        f"seeds 0 to {plan['seeds'] - 1}, {plan['episodes']} episodes each; gradients: {plan['gradient_batches']} "
        f"batches of {results['episodes_per_batch']}."
    )


def _worlds(results: Results) -> str:
    rows = [
        [f"`{w['name']}`", w["summary"], str(w["horizon"]), f"{w['initial_return']:.2f}", f"{w['best_return']:.2f}"]
        for w in results["worlds"]
    ]
    return table(["environment", "what it is", "steps", "initial return", "best"], rows)


def _learning(results: Results, measure: str) -> str:
    def cell(row: Mapping[str, Any]) -> str:
        return _plus_minus(*row[measure])

    return _grid(results, results["learning"], cell)


def _gradients(results: Results, show: Callable[[Mapping[str, Any]], str]) -> str:
    """Two numbers per cell: at the initial policy, and at the half-trained one."""
    found = {(row["world"], row["variant"], row["policy"]): row for row in results["gradients"]}

    def cell(row: Mapping[str, Any]) -> str:
        later = found[row["world"], row["variant"], "half"]
        return f"{show(row)} / {show(later)}"

    return _grid(results, [row for row in results["gradients"] if row["policy"] == "initial"], cell)


def _cosine(row: Mapping[str, Any]) -> str:
    return "noise" if row["cosine"] is None else _plus_minus(row["cosine"], row["cosine_error"])


def _process(results: Results) -> str:
    scalings = get_args(ProcessScaling)
    rows = {(row["world"], row["variant"], row["process"]): row for row in results["process"]}
    pairs = list(dict.fromkeys((row["world"], row["variant"]) for row in results["process"]))
    body = [
        [f"`{world}`", variant, *(_plus_minus(*rows[world, variant, scaling]["final"]) for scaling in scalings)]
        for world, variant in pairs
    ]
    return table(["environment", "algorithm", *scalings], body)


def _grid(results: Results, rows: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> str:
    """Algorithms in rows, worlds in columns."""
    worlds = [world["name"] for world in results["worlds"]]
    cells = {(row["variant"], row["world"]): cell(row) for row in rows}
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    body = [[variant, *(cells.get((variant, world), "") for world in worlds)] for variant in variants]
    return table(["", *(f"`{world}`" for world in worlds)], body)


def _plus_minus(value: float, margin: float) -> str:
    return f"{value:.2f} ± {margin:.2f}"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
