"""Run the vision quickstart as a new user does, for several seeds, and ask what its policy does without pictures.

    python -m benchmarks.vision_quickstart           # seeds 0, 1, 2; writes results/vision_quickstart.json and pictures
    python -m benchmarks.vision_quickstart --draw    # pictures only, from the stored results

Every run starts with an empty cache. The ablation has two parts: each trained policy is evaluated on the same held-out
rows with every picture black, and one more run of the preset `vision_quickstart/blank` is warm-started and trained on
black pictures too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1.recipes.vision_quickstart import task
from agent_r1.track.plots import drawn
from benchmarks import quickstart
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import ROOT, keep

SEEDS = (0, 1, 2)
RECIPE, BLANK_SPLIT = "vision_quickstart", f"{task.BLANK}test"
OUT = RESULTS / "vision_quickstart.json"
CURVES, SEEN = ROOT / "docs" / "vision_quickstart.png", ROOT / "docs" / "vision_quickstart-pictures.png"


def draw(results: dict[str, Any]) -> None:
    blind = results.get("trained_blank")  # the last run; an interrupted benchmark lacks it
    quickstart.draw(results["runs"], CURVES, [("seed 0, trained on black pictures", blind)] if blind else [])
    draw_pictures()


def draw_pictures() -> None:
    """What the policy sees of one held-out row: the board, and the two cards it has to look at."""
    [row] = task.rows("test", 1)
    board = task.Board(**row.env_kwargs["tools_kwargs"]["peek"]["board"])
    red, blue = (task.CELLS[cell] for cell in (board.red, board.blue))
    shown = {
        "the board, 48 x 48 pixels": board.picture(),
        f"peek {red}, 32 x 32 pixels": board.card(board.red),
        f"peek {blue}, 32 x 32 pixels": board.card(board.blue),
    }
    side = task.CELL_PIXELS
    middles = [side * index + side / 2 - 0.5 for index in range(task.SIDE)]
    with drawn(SEEN, height=3.4) as figure:
        axes = figure.subplots(1, 3, gridspec_kw={"width_ratios": (48, 32, 32)})
        for axis, (title, picture) in zip(axes, shown.items(), strict=True):
            axis.imshow(picture.pixels, interpolation="nearest")
            axis.set_title(title, fontsize=11)
            axis.set(xticks=[], yticks=[], anchor="N")
            axis.grid(visible=False)
        axes[0].set_xticks(middles, list("abc"))
        axes[0].set_yticks(middles, list("123"))
        axes[0].tick_params(length=0)


def measure(recipe: str, seeds: Sequence[int], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each run."""
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        runs.append(quickstart.play(recipe, seed, folder, (BLANK_SPLIT,)))
        print(quickstart.summary(runs[-1:]), runs[-1]["splits"], flush=True)
        yield {"runs": runs}
    (without := folder / "without").mkdir()
    yield {"runs": runs, "trained_blank": quickstart.play(f"{recipe}/blank", seeds[0], without)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vision_quickstart")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw the stored results")
    if not parser.parse_args().draw:
        facts = {"command": "python -m benchmarks.vision_quickstart", **machine()}
        with tempfile.TemporaryDirectory() as folder:
            for measured in measure(RECIPE, SEEDS, Path(folder)):
                keep(OUT, facts | measured)
    results = json.loads(OUT.read_text(encoding="utf-8"))
    draw(results)
    print(quickstart.summary(results["runs"]))


if __name__ == "__main__":
    main()
