"""The style of every plot: of runs, and of the pictures in the docs. Also draws the curve of a run.

Pictures are shown about 800 pixels wide, so figures are 8 inches wide with text of about 10 points. The colours, close
to those of Okabe and Ito, suit colour-blind readers, and each series has a line style and a marker of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure  # not pyplot, which looks for a screen and imports every kind of plot

WIDTH = 8.0  # inches
DPI = 150  # sharp on screens with two pixels per point
BLUE, ORANGE, GREEN, PURPLE, BROWN, SKY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#56b4e9"
GRAY, BLACK = "#6e6e6e", "#000000"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, BROWN, SKY, BLACK)
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "errorbar.capsize": 3,
}


@contextmanager
def drawn(path: Path, height: float = 4.0) -> Iterator[Any]:
    """Yield an empty figure in the common style, and write it to `path` at the end."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=DPI)


def series(index: int) -> dict[str, Any]:
    """How the lines of one series look: keywords of `plot` and `errorbar`."""
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    return {"color": color, "marker": marker, "linestyle": LINES[index % len(LINES)]}


def plot_curve(records: Sequence[dict[str, Any]], path: Path, title: str, held_out_label: str) -> None:
    """Plot training and held-out success over steps; the label says how held-out rows were sampled."""
    trained = [(r["step"], r["success"]) for r in records if r["kind"] == "train"]
    held_out = [(r["step"], r["success"], r["success_stderr"]) for r in records if r["kind"] == "eval"]
    with drawn(path) as figure:
        axes = figure.subplots()
        if trained:
            axes.plot(*zip(*trained, strict=True), color=ORANGE, alpha=0.6, label="training episodes (sampled)")
        if held_out:
            steps, success, error = zip(*held_out, strict=True)
            axes.errorbar(steps, success, yerr=error, **series(0), label=held_out_label)
        axes.set(xlabel="optimizer step", ylabel="success", ylim=(0, 1.02), title=title)
        if trained or held_out:
            axes.legend(loc="lower right")
