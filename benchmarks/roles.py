"""Train the recipes of several roles, and say whether each role got better: its own share of the work, held out.

    python -m benchmarks.roles                         # both recipes, seed 0; writes results/roles.json
    python -m benchmarks.roles drafts_critic --seed 1  # one of them; the others in the file are kept
    python -m benchmarks.roles drafts_critic --run runs/drafts_critic  # a run that is there already

The runs start with an empty cache, so they make and warm-start their model. What a role did right is a part of the
reward: `right_plan` and `carried_out` of planner and worker, `offered` and `chosen` of drafter and critic. `offered`
says that a right and a wrong draft were there; `chosen`, divided by it, that the critic then took a right one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from agent_r1.runs.run_dir import RunDir
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, keep

RECIPES = ("planner_worker", "drafts_critic")
OUT = RESULTS / "roles.json"


def shares(record: dict[str, Any]) -> dict[str, float]:
    """Return the success of an evaluation and of each role in it, and its standard error over rows."""
    parts = {name.removeprefix("reward_part/"): value for name, value in record.items() if "reward_part/" in name}
    if "offered" in parts:
        roles = {"drafter": parts["offered"], "critic": parts["chosen"] / max(parts["offered"], 1e-9)}
    else:
        roles = {"planner": parts["right_plan"], "worker": parts["carried_out"]}
    return {"step": record["step"], "success": record["success"], "stderr": record["success_stderr"], **roles}


def train(recipe: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"AGENT_R1_CACHE": str(Path(folder) / "cache")}
        job = Job(name=recipe, seed=seed, words=("train", recipe), environment=environment)
        return result(job.run(Path(folder))[0])


def result(run: RunDir) -> dict[str, Any]:
    held_out = [shares(record) for record in run.read_metrics("eval")]
    return {"recipe": run.settings["recipe"], "seed": run.settings["seed"], **machine(), "held_out": held_out}


def table(run: dict[str, Any]) -> str:
    """Return a Markdown table of the held-out shares."""
    names = [name for name in run["held_out"][0] if name not in ("step", "stderr")]
    lines = [f"| step | {' | '.join(names)} |", f"|---:|{'---:|' * len(names)}"]
    for one in run["held_out"]:
        shown = [f"{one[name]:.1%}" + (f" +- {one['stderr']:.1%}" if name == "success" else "") for name in names]
        lines.append(f"| {one['step']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[*RECIPES, []], default=list(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="read this run of the recipe instead of training")
    args = parser.parse_args()
    for recipe in args.recipes:
        run = train(recipe, args.seed) if args.run is None else result(RunDir.open(args.run))
        if run["recipe"] != recipe:
            raise SystemExit(f"{args.run} is a run of {run['recipe']}, not of {recipe}")
        known = json.loads(OUT.read_text(encoding="utf-8"))["runs"] if OUT.is_file() else []
        others = [each for each in known if (each["recipe"], each["seed"]) != (recipe, run["seed"])]
        keep(OUT, {"command": "python -m benchmarks.roles", "runs": [*others, run]})
        print(f"{recipe}, seed {run['seed']}\n\n{table(run)}\n", flush=True)


if __name__ == "__main__":
    main()
