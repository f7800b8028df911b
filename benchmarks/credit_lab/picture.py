"""One figure: learning curves of selected algorithms per world, and two heat maps of gradient quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

PICTURE = Path(__file__).parents[2] / "docs" / "credit_lab.png"
COLUMNS = 4  # of subplots, in two rows
SHOWN = {
    "grpo": "tab:blue",
    "reinforce": "tab:brown",
    "gigpo": "tab:green",
    "ppo": "tab:orange",
    "steppo": "tab:red",
    "steppo oracle": "tab:pink",
    "exact gradient": "black",
}


def draw(results: Mapping[str, Any], picture: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    worlds = [world["name"] for world in results["worlds"]]
    figure = plt.figure(figsize=(16, 15), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    panels = above.subplots(2, COLUMNS, sharey=True)
    for panel in panels.flat[len(worlds) :]:
        panel.axis("off")
    for panel, world in zip(panels.flat, worlds, strict=False):
        _curves(panel, results, world)
    handles = [plt.Line2D([], [], color=color, label=name) for name, color in SHOWN.items()]
    above.legend(handles=handles, loc="outside upper center", ncols=len(SHOWN), frameon=False)
    left, right = below.subplots(1, 2, sharey=True)
    _heat(left, results, "cosine", "cosine of the expected estimate with the exact gradient", (0.6, 1.0))
    _heat(right, results, "snr", "signal-to-noise of a batch", (0.0, 1.0))
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def _curves(axes: Any, results: Mapping[str, Any], world: str) -> None:
    for row in results["learning"]:
        if row["world"] != world or row["variant"] not in SHOWN:
            continue
        curve, color = row["curve"], SHOWN[row["variant"]]
        low, high = zip(*((m - e, m + e) for m, e in zip(curve["mean"], curve["margin"], strict=True)), strict=True)
        axes.plot(curve["episodes"], curve["mean"], color=color, linewidth=1.5)
        if row["variant"] != "exact gradient":  # the exact gradient has no noise
            axes.fill_between(curve["episodes"], low, high, color=color, alpha=0.12, linewidth=0)
    axes.set(title=world, xlabel="episodes", ylabel="share gained", ylim=(-0.1, 1.05))
    axes.grid(alpha=0.3)


def _heat(axes: Any, results: Mapping[str, Any], field: str, title: str, bounds: tuple[float, float]) -> None:
    """Algorithms in rows; worlds in columns, each at the initial and at the half-trained policy."""
    rows = {(row["variant"], row["world"], row["policy"]): row[field] for row in results["gradients"]}
    variants = list(dict.fromkeys(row["variant"] for row in results["gradients"]))
    places = [(world["name"], policy) for world in results["worlds"] for policy in ("initial", "half")]
    numbers = [[_number(rows.get((variant, *place))) for place in places] for variant in variants]
    axes.imshow(numbers, aspect="auto", cmap="viridis", vmin=bounds[0], vmax=bounds[1])
    for y, line in enumerate(numbers):
        for x, number in enumerate(line):
            if number == number:
                dark = number < sum(bounds) / 2
                axes.text(x, y, f"{number:.2f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    axes.set_xticks(range(len(places)), _labels(places), rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(variants)), variants, fontsize=8)
    axes.set_title(title)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _labels(places: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{world}, {policy}" for world, policy in places]
