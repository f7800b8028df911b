"""The task that `agent-r1 init` writes, trained as written: held-out success after the warm start and after RL.

    python -m benchmarks.init_task             # seeds 0, 1, 2; writes results/init_task.json

Every run starts with an empty cache, so its time includes creating and warm-starting the model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from agent_r1.cli.commands.init import write_task
from benchmarks.machine import RESULTS, machine
from benchmarks.quickstart import SEEDS, play
from benchmarks.recipes import keep


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "shop"
        write_task(task, Console(quiet=True))
        runs = [play(str(task), seed, Path(folder)) for seed in SEEDS]
    keep(RESULTS / "init_task.json", {"command": "python -m benchmarks.init_task", **machine(), "runs": runs})
    for run in runs:
        print(f"seed {run['seed']}: {run['before']:.1%} -> {run['after']:.1%} in {run['seconds']:.0f} s")


if __name__ == "__main__":
    main()
