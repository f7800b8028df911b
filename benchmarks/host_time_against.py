"""Host time per model call of this version and of another one, taking turns on the same machine.

    git worktree add ../before COMMIT
    python -m benchmarks.host_time_against ../before --data DATA

Runs `python -m benchmarks.host_time` in both folders, as often as `--rounds` says, and rotates which goes first. Every
run is a new process. A ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import RESULTS, machine

HERE = Path(__file__).parents[1]
SHOWN = ("cpu ms per call", "simulated seconds")
Rows = list[dict[str, Any]]  # of a run of `host_time`: one per recipe and repeat


def run(folder: Path, options: Sequence[str]) -> Rows:
    command = [sys.executable, "-m", "benchmarks.host_time", "--json", *options]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def summary(before: Sequence[Rows], now: Sequence[Rows]) -> dict[str, dict[str, Any]]:
    """The medians of both versions by recipe and figure, and the median ratio within rounds. Both have one list of
    rows per round."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["name"] for rows in now for row in rows):
        found[name] = {"calls": next(row["calls"] for rows in now for row in rows if row["name"] == name)}
        for figure in SHOWN:
            old, new = (
                [median(row[figure] for row in rows if row["name"] == name) for rows in side] for side in (before, now)
            )
            ratio = median(a / b for a, b in zip(old, new, strict=True))
            found[name][figure] = {
                "before": round(median(old), 4),
                "now": round(median(new), 4),
                "ratio": round(ratio, 3),
            }
    return found


def commit_of(folder: Path) -> str:
    asked = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder with the other version")
    parser.add_argument("--data", type=Path, required=True, help="as for benchmarks.host_time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="of each recipe in each run")
    parser.add_argument("--to", type=Path, default=RESULTS / "host_time.json")
    given = parser.parse_args()
    options = ["--data", str(given.data.resolve()), "--repeats", str(given.repeats)]
    sides: dict[Path, list[Rows]] = {given.before.resolve(): [], HERE: []}
    load = [os.getloadavg()[0]]
    for number in range(given.rounds):
        for folder in list(sides) if number % 2 == 0 else reversed(list(sides)):
            sides[folder].append(run(folder, options))
        load.append(os.getloadavg()[0])
    before, now = sides.values()
    result = {
        "command": f"python -m benchmarks.host_time_against BEFORE --data DATA --rounds {given.rounds}",
        **machine(),
        "commit_before": commit_of(given.before),
        "load": [round(each, 1) for each in load],
        "repeats": given.repeats,
        "recipes": summary(before, now),
        "rounds": {"before": before, "now": now},
    }
    print(json.dumps(result["recipes"], indent=1))
    given.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
