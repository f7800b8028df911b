"""Compare context policies on one recipe: success and cost.

    python -m benchmarks.context alfworld/summary --policies append,window,summary --for window:context.turns=3
    python -m benchmarks.context alfworld/summary --draw         # picture and table into docs/context.md

Every run is `agent-r1 train RECIPE context.policy=NAME` with the same seeds; `append+strip` is `append` with
`context.reasoning=strip`. `--set` changes settings of all runs, `--for` of one. A warm start uses the policy
too, so that it learns from the prompts that RL will show; `--set model.path=... --set sft.demos=null` starts all runs
from one model instead. `--add` keeps the runs that the results file already has. Tokens are those of the last
evaluation (the same rows for all), seconds those of training steps. With more than one of `--workers`, runs share the
machine, so compare their times only with each other.
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
from agent_r1.runs.run_dir import RunDir
from agent_r1.track.plots import BLUE, GREEN, ORANGE, PURPLE, SKY, drawn
from benchmarks.machine import RESULTS
from benchmarks.over_seeds import HOW_SURE, at_equal_steps, by_name, has_rows, one_table
from benchmarks.recipes import (
    ROOT,
    Job,
    add,
    as_they_end,
    commands,
    facts_of,
    fill,
    gain_cell,
    keep,
    markdown,
    new_folder,
    own_overrides,
    parser_of,
    success_cell,
    where,
)

TITLES = ("policy", "seed", "before", "after", "gain (95 % interval)", "shown", "sampled", "computed", "summaries", "s")


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each run."""
    own = own_overrides(options.of, options.policies.split(","))
    jobs = [
        Job(
            name=name,
            seed=int(seed),
            words=("train", options.recipe, *context_of(name), *options.set, *own[name]),
        )
        for name in options.policies.split(",")
        for seed in options.seeds.split(",")
    ]
    for job in jobs:  # check all policies before the first run
        try:
            load_config(options.recipe, job.words[2:])
        except ConfigError as error:
            raise SystemExit(f"{job.name}: {error}") from error
    for runs in as_they_end(jobs, lambda job: play(job, folder), options.workers):
        yield {"workers": min(options.workers, len(jobs)), "runs": runs}


def context_of(name: str) -> list[str]:
    """The settings of a policy, and of the thinking that it shows: `window`, `append+strip`."""
    policy, _, reasoning = name.partition("+")
    return [f"context.policy={policy}", *([f"context.reasoning={reasoning}"] if reasoning else [])]


def play(job: Job, folder: Path) -> dict[str, Any]:
    result = job.play(folder)
    run = RunDir.open(folder / f"{job.name}-{job.seed}")
    evaluated, trained = run.read_metrics("eval")[-1], run.read_metrics("train")
    return result | {
        "shown_tokens": evaluated["episode/prompt_tokens"],  # per episode; each prompt counts in full
        "sampled_tokens": evaluated["episode/response_tokens"],  # per episode; trained tokens
        "summaries": evaluated.get("context/summaries", 0.0),
        "hidden_messages": evaluated.get("context/hidden_messages", 0.0),
        "computed_tokens": _mean(trained, "tokens_computed"),  # per training step, by the learner
        "steps_per_segment": _mean(trained, "steps_per_segment"),
        "collect_seconds": _mean(trained, "time/collect"),  # per training step
        "update_seconds": _mean(trained, "time/update"),
    }


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean over training steps that had a batch."""
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
    """Hardware, commit, rows and command, as one line."""
    first = results["runs"][0]
    rows = f"{first['held_out'][0]['rows']:.0f} held-out rows, panel `{first['panel']}`"
    return (
        f"{where(results)}, {rows}. Tokens shown and sampled: per episode; tokens computed, and seconds: per training "
        f"step. {commands(results)}"
    )


def over_seeds(results: Mapping[str, Any]) -> str:
    """Markdown: means over seeds, against the first policy; empty for one seed, or if rows were not stored."""
    runs = results["runs"]
    if not has_rows(runs) or max(map(len, by_name(runs).values())) < 2:
        return ""
    return f"{one_table(runs, 'success', *at_equal_steps(runs))}\n\n{HOW_SURE}"


def draw(results: Mapping[str, Any], picture: Path) -> None:
    runs = results["runs"][::-1]  # bars are drawn bottom-up
    several = len({run["seed"] for run in runs}) > 1
    names = [f"{run['name']} {run['seed']}" if several else run["name"] for run in runs]
    with drawn(picture, height=1.2 + 0.5 * len(runs)) as figure:
        success, tokens, seconds = figure.subplots(1, 3, sharey=True)
        above_all = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2, "columnspacing": 1.0}
        above_all |= {"handlelength": 1.2, "handletextpad": 0.4}
        for place, when, color, above in ((0, "before RL", SKY, 0.2), (-1, "after", BLUE, -0.2)):
            judged = [run["held_out"][place] for run in runs]
            success.barh(
                [index + above for index in range(len(runs))],
                [100 * each["success"] for each in judged],
                xerr=[100 * each["success_stderr"] for each in judged],
                height=0.38,
                color=color,
                label=when,
            )
        success.set_yticks(range(len(runs)), names)
        success.set(xlabel="held-out success, %", xlim=(0, 100))
        success.legend(**above_all)
        tokens.barh(names, [run["shown_tokens"] for run in runs], color=GREEN)
        tokens.set(xlabel="tokens shown per episode")
        collecting = [run["collect_seconds"] for run in runs]
        seconds.barh(names, collecting, color=ORANGE, label="collecting")
        seconds.barh(names, [run["update_seconds"] for run in runs], left=collecting, color=PURPLE, label="update")
        seconds.set(xlabel="seconds per step")
        seconds.legend(**above_all)
        for axes in (success, tokens, seconds):
            axes.grid(visible=False, axis="y")


def main(words: Sequence[str]) -> None:
    parser = parser_of("context", compared="policy")
    parser.add_argument("--policies", default="append,window,drop_results,notes,summary")
    parser.add_argument("--draw", action="store_true", help="measure nothing; picture, and table in the docs")
    parser.add_argument("--add", action="store_true", help="keep the runs that the results file has, and add these")
    options = parser.parse_args(words)
    name = options.recipe.replace("/", "-")
    out = options.out or RESULTS / f"context_{name}.json"
    if options.draw:
        results = json.loads(out.read_text(encoding="utf-8"))
        picture = ROOT / "docs" / f"{out.stem}.png"
        draw(results, picture)
        shown = f"![Success, tokens and seconds of each policy]({picture.name})"
        parts = [over_seeds(results), table(results), shown, setting(results)]
        fill(ROOT / "docs" / "context.md", out.name, "\n" + "\n\n".join(part for part in parts if part) + "\n")
        return
    facts = facts_of("context", words)
    earlier = json.loads(out.read_text(encoding="utf-8")) if options.add and out.exists() else None
    for results in measure(options, new_folder(options.runs, f"context-{Path(name).name}")):
        kept = facts | results if earlier is None else add(earlier, facts | results)
        keep(out, kept)
        print(f"{table(kept)}\n\n{setting(kept)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
