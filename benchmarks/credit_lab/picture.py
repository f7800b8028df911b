"""One figure: learning curves of selected algorithms per world, and two heat maps of gradient quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from agent_r1.track.plots import BLACK, BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, drawn

PICTURE = Path(__file__).parents[2] / "docs" / "credit_lab.png"
COLUMNS = 3  # of curves
SHOWN: dict[str, dict[str, Any]] = {
    "grpo": {"color": BLUE, "linestyle": "-"},
    "reinforce": {"color": BROWN, "linestyle": "--"},
    "gigpo": {"color": GREEN, "linestyle": "-."},
    "ppo": {"color": ORANGE, "linestyle": "-"},
    "steppo": {"color": PURPLE, "linestyle": "--"},
    "steppo oracle": {"color": SKY, "linestyle": "-."},
    "exact gradient": {"color": BLACK, "linestyle": ":"},
}


def draw(results: Mapping[str, Any], picture: Path) -> None:
    worlds = [world["name"] for world in results["worlds"]]
    rows = -(-len(worlds) // COLUMNS)
    with drawn(picture, height=2.2 * rows + 13) as figure:
        above, first, second = figure.subfigures(3, 1, height_ratios=(2.2 * rows + 1, 6, 6))
        panels = above.subplots(rows, COLUMNS, sharey=True)
        for panel in panels.flat[len(worlds) :]:
            panel.axis("off")
        for panel, world in zip(panels.flat, worlds, strict=False):
            _curves(panel, results, world)
        above.supxlabel("episodes", fontsize=11)
        above.supylabel("share of the possible gain", fontsize=11)
        handles = [Line2D([], [], label=name, **look) for name, look in SHOWN.items()]
        above.legend(handles=handles, loc="outside upper center", ncols=4)
        _heat(
            first.subplots(), results, "cosine", "cosine of the expected estimate with the exact gradient", (0.6, 1.0)
        )
        _heat(second.subplots(), results, "snr", "signal-to-noise of a batch", (0.0, 1.0))


def _curves(axes: Any, results: Mapping[str, Any], world: str) -> None:
    for row in results["learning"]:
        if row["world"] != world or row["variant"] not in SHOWN:
            continue
        curve, look = row["curve"], SHOWN[row["variant"]]
        low, high = zip(*((m - e, m + e) for m, e in zip(curve["mean"], curve["margin"], strict=True)), strict=True)
        axes.plot(curve["episodes"], curve["mean"], **look)
        if row["variant"] != "exact gradient":  # the exact gradient has no noise
            axes.fill_between(curve["episodes"], low, high, color=look["color"], alpha=0.12, linewidth=0)
    axes.set(title=world, ylim=(-0.1, 1.05))


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
                axes.text(x, y, f"{number:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    axes.set_xticks(range(len(places)), _labels(places), rotation=45, ha="right", fontsize=9)
    axes.set_yticks(range(len(variants)), variants, fontsize=9)
    axes.set_title(title)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _labels(places: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{world}, {policy}" for world, policy in places]
