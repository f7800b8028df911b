"""One recipe with several context policies: what each is worth, and what it costs.

    python -m benchmarks.context alfworld/summary --policies append,window,summary --for window:context.turns=3

Every run is `agent-r1 train RECIPE context.policy=NAME` with the same seeds, with what `--set` changes for all of them
and `--for` for one. Where the recipe has a warm start, it is made with the policy too, so that it learns from the
prompts that RL will show; `--set model.path=... --set sft.demos=null` begins all of them from one model instead. Tokens
are of the last evaluation (the same rows for all), seconds of training steps. Runs share the machine when `--workers`
is more than one, so their times compare with each other only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.run.run_dir import RunDir
from benchmarks.machine import RESULTS
from benchmarks.recipes import (
    Job,
    as_they_end,
    facts_of,
    gain_cell,
    keep,
    markdown,
    new_folder,
    own_overrides,
    parser_of,
    success_cell,
)

TITLES = ("policy", "seed", "before", "after", "gain (95 % interval)", "shown", "sampled", "computed", "summaries", "s")


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What has been measured so far, again after each run."""
    own = own_overrides(options.of, options.policies.split(","))
    jobs = [
        Job(
            name=name,
            seed=int(seed),
            words=("train", options.recipe, f"context.policy={name}", *options.set, *own[name]),
        )
        for name in options.policies.split(",")
        for seed in options.seeds.split(",")
    ]
    for job in jobs:  # what is wrong with the last one is better known before the first
        try:
            load_config(options.recipe, job.words[2:])
        except ConfigError as error:
            raise SystemExit(f"{job.name}: {error}") from error
    for runs in as_they_end(jobs, lambda job: play(job, folder), options.workers):
        yield {"workers": min(options.workers, len(jobs)), "runs": runs}


def play(job: Job, folder: Path) -> dict[str, Any]:
    result = job.play(folder)
    run = RunDir.open(folder / f"{job.name}-{job.seed}")
    evaluated, trained = run.read_metrics("eval")[-1], run.read_metrics("train")
    return result | {
        "shown_tokens": evaluated["episode/prompt_tokens"],  # per episode, those of each prompt counted anew
        "sampled_tokens": evaluated["episode/response_tokens"],  # per episode; what training trains on
        "summaries": evaluated.get("context/summaries", 0.0),
        "hidden_messages": evaluated.get("context/hidden_messages", 0.0),
        "computed_tokens": _mean(trained, "tokens_computed"),  # per training step, by the learner
        "steps_per_segment": _mean(trained, "steps_per_segment"),
        "collect_seconds": _mean(trained, "time/collect"),  # per training step
        "update_seconds": _mean(trained, "time/update"),
    }


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Over the steps that had something to learn from."""
    return fmean([record[name] for record in records if name in record] or [0.0])


def table(results: Mapping[str, Any]) -> str:
    """Markdown, one line per run."""
    return markdown([TITLES, *map(_line, results["runs"])])


def _line(run: Mapping[str, Any]) -> list[str]:
    return [
        f"`{run['name']}`",
        str(run["seed"]),
        success_cell(run["held_out"][0]),
        success_cell(run["held_out"][-1]),
        gain_cell(run),
        *(f"{run[name]:,.0f}" for name in ("shown_tokens", "sampled_tokens", "computed_tokens")),
        f"{run['summaries']:.2f}",
        f"{run['collect_seconds'] + run['update_seconds']:.1f}",
    ]


def setting(results: Mapping[str, Any]) -> str:
    """What the numbers are of."""
    first = results["runs"][0]
    rows = f"{first['held_out'][0]['rows']:.0f} held-out rows, panel `{first['panel']}`"
    return (
        f"{results['accelerator']}, commit `{results['commit']}`, {rows}. Tokens shown and sampled: per episode; "
        f"tokens computed, and seconds: per training step. `{results['command']}`"
    )


def main(words: Sequence[str]) -> None:
    parser = parser_of("context", compared="policy")
    parser.add_argument("--policies", default="append,window,drop_results,notes,summary")
    parser.add_argument("--show", action="store_true", help="measure nothing; print the table of what was measured")
    options = parser.parse_args(words)
    name = options.recipe.replace("/", "-")
    out = options.out or RESULTS / f"context_{name}.json"
    if not options.show:
        facts = facts_of("context", words)
        for measured in measure(options, new_folder(options.runs, f"context-{Path(name).name}")):
            keep(out, facts | measured)
    results = json.loads(out.read_text(encoding="utf-8"))
    print(f"{table(results)}\n\n{setting(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
