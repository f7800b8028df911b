"""Train the quickstart through agents of other frameworks, and compare with the native flow.

    bash .ci/agents                                # installs the frameworks into an environment of their own, once
    PYTHON -m benchmarks.foreign_agents            # that environment's PYTHON; writes results/foreign_agents.json

All runs begin with the same warm start and see the same rows with the same seeds. `--steps`, `--rows` and `--seeds`
make it shorter, and `--add` adds runs of other agents to the results. Besides the curves, the result has the share of
episodes of the first step whose prompts and responses are id for id those of the native flow. The others have a call
that cannot be read: the native flow explains to the model what is wrong with it, a framework takes it for the answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import RecordFile
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import Job, held_out, keep

RECIPE = Path(__file__).parent / "foreign"
NATIVE = ("quickstart", "sft.demos=null", "sft.trajectories=null")
AGENTS: dict[str, tuple[str, ...]] = {
    "native": NATIVE,
    "plain HTTP": ("quickstart/gateway", "sft.demos=null", "sft.trajectories=null"),
    "OpenAI Agents SDK": (str(RECIPE), "gateway.agent=frameworks.openai_agents"),
    "LangGraph": (str(RECIPE), "gateway.agent=frameworks.langgraph"),
    "Pydantic AI": (str(RECIPE), "gateway.agent=frameworks.pydantic_ai"),
}
PACKAGES = ("openai", "openai-agents", "langgraph", "langchain-openai", "pydantic-ai-slim")


def first_episodes(run: RunDir) -> list[list[tuple[list[int], list[int]]]]:
    """The ids of the prompts and responses of all episodes of the first step."""
    played = RecordFile(run.path / "trajectories" / "train_000001.jsonl").trajectories()
    return [[(step.prompt_ids, step.response_ids) for step in trajectory.steps] for trajectory in played]


def train(name: str, seed: int, start: Path, settings: list[str], folder: Path) -> tuple[dict[str, Any], RunDir]:
    words = ("train", *AGENTS[name], f"model.path={start}", *settings)
    run, seconds = Job(name=name.replace(" ", "-"), seed=seed, words=words).run(folder)
    records = list(run.read_metrics("train"))
    counted = [name for name in records[0] if name.startswith("gateway/")]
    result = {
        "agent": name,
        "seed": seed,
        "seconds": seconds,
        "held_out": held_out(run),
        "training": [(record["step"], round(record["success"], 4)) for record in records],
        "failed": [record["stop/error"] + record["stop/timeout"] for record in records],
        "collect_seconds": round(sum(record["time/collect"] for record in records), 1),
        "per_episode": {key: round(fmean(record[key] for record in records), 4) for key in counted},
    }
    print(f"{name:18s} seed {seed}: {result['held_out'][0][1]:.1%} -> {result['held_out'][-1][1]:.1%}", flush=True)
    return result, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16, help="rows per step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--agents", nargs="+", default=list(AGENTS), choices=list(AGENTS))
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--add", action="store_true", help="keep the runs that the results have")
    parser.add_argument("--start", type=Path, help="a warm start of the quickstart; by default, one is made")
    parser.add_argument("--out", type=Path, default=RESULTS / "foreign_agents.json")
    given = parser.parse_args()
    settings = [
        f"trainer.steps={given.steps}",
        f"rollout.rows_per_step={given.rows}",
        f"eval.rows={given.eval_rows}",
        f"trainer.eval_every={given.eval_every}",
        "trainer.save_every=1000",
    ]
    head = {"command": "python -m benchmarks.foreign_agents", "packages": versions(), **machine()}
    runs: list[dict[str, Any]] = json.loads(given.out.read_text())["runs"] if given.add else []
    with tempfile.TemporaryDirectory() as temporary:
        folder, start = Path(temporary), given.start
        if start is None:
            start = Job(name="start", seed=0, words=("sft", "quickstart")).run(folder)[0].path
        for seed in given.seeds:
            reference: list[Any] = []
            for name in given.agents:
                result, run = train(name, seed, start, settings, folder)
                episodes = first_episodes(run)
                reference = episodes if name == "native" else reference
                same = [ours == theirs for ours, theirs in zip(episodes, reference, strict=bool(reference))]
                shares = {"identical_to_native": fmean(same) if same else None, "commit": head["commit"]}
                runs.append(result | shares | {"settings": settings})
                keep(given.out, head | {"runs": runs})


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in PACKAGES}


if __name__ == "__main__":
    main()
