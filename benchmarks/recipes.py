"""Evaluate a recipe zero-shot, after its warm start, and after RL with several algorithms from that start.

    python -m benchmarks.recipes gsm8k_tool --algorithms grpo,rloo,ppo,steppo    # writes results/gsm8k_tool.json
    python -m benchmarks.recipes gsm8k_tool --draw                               # picture and tables into its README

Every run is a command (`agent-r1 sft`, `agent-r1 train`). `--set` changes settings of all runs, `--for
ppo:critic.lr=1e-4` of one. An algorithm can take part several times under different names: `--algorithms ppo,short=ppo
--for short:algorithm.settings.gamma=0.9`. Success is measured on the recipe's evaluation set, and at the end also on
those of `--splits`; the gain of RL is the paired difference between the last and the first evaluation of a run.
`--start RUN` uses an existing warm start. `--add` keeps the runs that the results file already has, so that seeds can
be measured on different days. With more than one of `--workers`, runs share the machine, so compare their times only
with each other. On a machine that has other work, `--cpu-seconds` counts processor time, and the comparison is at equal
steps only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent_r1.bench.machine import accelerator, pick_device
from agent_r1.config import RECIPES, parse_config
from agent_r1.runs.compare import compare, find_sides
from agent_r1.runs.outcomes import EvalRecord
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.statistics import PairedDifference
from agent_r1.track.plots import GRAY, LINES, drawn, series
from benchmarks.machine import RESULTS, machine
from benchmarks.over_seeds import seeds_table

ROOT = Path(__file__).parents[1]
DIAGNOSTICS = (
    "mismatch_kl",
    "mismatch_max",
    "clip_fraction",
    "approx_kl",
    "ratio_max",
    "explained_variance",
)  # per step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of `agent-r1`."""

    name: str
    seed: int
    words: tuple[str, ...]
    splits: tuple[str, ...] = ()  # evaluated at the end, besides the recipe's own
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the environment
    on_cpu: bool = False  # count processor time; for one job at a time

    def play(self, folder: Path) -> dict[str, Any]:
        run, seconds = self.run(folder)
        return self.judged(run.path, folder, seconds=seconds)

    def run(self, folder: Path) -> tuple[RunDir, float]:
        """The results and the duration in seconds."""
        path, clock = folder / f"{self.name}-{self.seed}", cpu_seconds if self.on_cpu else time.perf_counter
        began = clock()
        self._command(folder, *self.words, f"seed={self.seed}", "--run", str(path))
        return RunDir.open(path), round(clock() - began, 1)

    def judge(self, run: Path, folder: Path) -> dict[str, Any]:
        """Evaluate a run on the other splits."""
        for split in self.splits:
            self._command(folder, "eval", str(run), "--split", split, "--name", split)
        return {split: _split(run / "evals" / f"{split}.json") for split in self.splits}

    def judged(self, run: Path, folder: Path, seconds: float | None) -> dict[str, Any]:
        self.judge(run, folder)
        result = self._result(run) | {"seconds": seconds}
        first, last = result["held_out"][0], result["held_out"][-1]
        print(f"{self.name:22s} seed {self.seed}: {first['success']:6.1%} -> {last['success']:6.1%}", flush=True)
        return result

    def _command(self, folder: Path, *words: str) -> None:
        log = folder / f"{self.name}-{self.seed}.log"
        with log.open("a") as output:
            command = [sys.executable, "-m", "agent_r1.cli", *words]
            environment = {**os.environ, **self.environment}
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment)
        if ended.returncode:
            raise SystemExit(f"{self.name}, seed {self.seed} failed:\n{log.read_text()[-2000:]}")

    def _result(self, run: Path) -> dict[str, Any]:
        evaluated, training = (RunDir.open(run).read_metrics(kind) for kind in ("eval", "train"))
        comparison = compare(*find_sides([run], step="first,last", name=None))
        commit = machine()["commit"]
        return {
            "name": self.name,
            "seed": self.seed,
            "words": list(self.words),
            "panel": evaluated[0]["panel"],
            "commit": commit,
            "held_out": [
                _evaluation(record)
                | {"seconds": self._since(evaluated[0], record), "by_row": by_row(run, record["step"])}
                for record in evaluated
            ],
            "splits": {split: _split(run / "evals" / f"{split}.json") for split in self.splits},
            "gains": {measure: asdict(gain) for measure, gain in comparison.items()},
            "train_success": [round(record["success"], 4) for record in training],
            **{name: found for name in DIAGNOSTICS if (found := [r[name] for r in training if name in r])},
            "seconds_per_step": [round(r["time/collect"] + r["time/update"], 2) for r in training],
        }

    def _since(self, first: Mapping[str, Any], record: Mapping[str, Any]) -> float | None:
        """Seconds between evaluations; None if other work on the machine would count too."""
        return None if self.on_cpu else round(record["time"] - first["time"], 1)


def cpu_seconds() -> float:
    """Processor time of all programs that this process has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_out(run: RunDir) -> list[tuple[int, float, float]]:
    """Step, success and standard error of a run's evaluations."""
    return [(record["step"], record["success"], record["success_stderr"]) for record in run.read_metrics("eval")]


def by_row(run: Path, step: int) -> dict[str, str]:
    """The outcome of each row at a step, by measure, in the order of row ids: as text, so that files stay readable."""
    [side, _] = find_sides([run], step=f"{step},{step}", name=None)
    return {each: " ".join(f"{value:.4g}" for value in side.record.column(each)) for each in side.record.measures}


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = ["step", "success", "success_stderr", "reward/mean"]
    kept += [f"episode/{each}" for each in ("steps", "tool_calls", "response_tokens")]
    parts = {key: value for key, value in record.items() if key.startswith(("reward_part/", "success/"))}
    stops = {key: value for key, value in record.items() if key.startswith("stop/") and value}
    return {key: record[key] for key in kept} | parts | stops | {"rows": record["group/count"]}


def _split(file: Path) -> dict[str, Any]:
    record = EvalRecord.load(file)
    return _evaluation({"step": None, **record.metrics}) | {"panel": record.subject.panel}


def own_overrides(items: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of `--for NAME:override`, by name."""
    own: dict[str, list[str]] = {name: [] for name in names}
    for item in items:
        name, colon, override = item.partition(":")
        if not colon or name not in own:
            raise SystemExit(f"--for {item!r} is not of the form NAME:override with one of {', '.join(names)}")
        own[name].append(override)
    return own


def algorithms_by_name(listed: str) -> dict[str, str]:
    """`ppo,short=ppo` -> {"ppo": "ppo", "short": "ppo"}: names of runs and their algorithms."""
    pairs = [item.partition("=") for item in listed.split(",")]
    return {name: algorithm or name for name, _, algorithm in pairs}


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each run."""
    recipe, common = options.recipe, tuple(options.set)
    algorithms = algorithms_by_name(options.algorithms)
    own = own_overrides(options.of, list(algorithms))
    seeds = [int(seed) for seed in options.seeds.split(",")]
    splits = tuple(split for split in options.splits.split(",") if split)
    kind: dict[str, Any] = {"splits": splits, "on_cpu": options.cpu_seconds}
    warm = Job(name="sft", seed=seeds[0], words=("sft", recipe, *common), **kind)
    begun = options.start or folder / f"sft-{seeds[0]}"
    start = warm.play(folder) if options.start is None else there_already(begun, folder, kind)
    begins = [item for item in common if not item.startswith("sft.")]  # concerns only the warm start
    trained = ("train", recipe, *begins, f"model.path={begun}", "sft.demos=null")
    jobs = [
        Job(name=name, seed=seed, words=(*trained, f"algorithm.name={algorithm}", *own[name]), **kind)
        for name, algorithm in algorithms.items()
        for seed in seeds
    ]
    for runs in as_they_end(jobs, lambda job: job.play(folder), options.workers):
        clock = "CPU s" if options.cpu_seconds else "s"
        yield {"workers": min(options.workers, len(jobs)), "clock": clock, "start": start, "runs": runs}


def add(earlier: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """The runs of both, on the same panel. A run that was repeated replaces the earlier one."""
    there, here = (each["runs"][0]["panel"] for each in (earlier, results))
    if there != here:
        raise SystemExit(f"--add: the runs there were evaluated on panel {there}, these on {here}")
    repeated = {(run["name"], run["seed"]) for run in results["runs"]}
    kept = [run for run in earlier["runs"] if (run["name"], run["seed"]) not in repeated]
    names = list(dict.fromkeys(run["name"] for run in [*earlier["runs"], *results["runs"]]))
    runs = sorted([*kept, *results["runs"]], key=lambda run: (names.index(run["name"]), run["seed"]))
    commands = [*earlier.get("earlier", []), earlier["command"]]
    return {**results, "runs": runs, "earlier": [each for each in commands if each != results["command"]]}


def there_already(run: Path, folder: Path, kind: Mapping[str, Any]) -> dict[str, Any]:
    """The result of an existing warm start, with its settings and the seconds between its evaluations."""
    if not (run / "metrics.jsonl").is_file():
        raise SystemExit(f"--start {run} is not a run of `agent-r1 sft`: it has no metrics.jsonl")
    config = parse_config(RunDir.open(run).settings)
    result = Job(name="sft", seed=config.seed, words=(), **kind).judged(run, folder, seconds=None)
    return result | {"settings": config.sft.model_dump(), "seconds": result["held_out"][-1]["seconds"]}


def as_they_end(
    jobs: Sequence[Job], play: Callable[[Job], dict[str, Any]], workers: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results so far, in the order of the jobs, after each job. Failures are raised at the end."""
    ended: dict[int, dict[str, Any]] = {}
    failed: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        playing = {pool.submit(play, job): index for index, job in enumerate(jobs)}
        try:
            for done in as_completed(playing):
                job, error = jobs[playing[done]], done.exception()
                if error is not None:  # the others continue
                    failed.append(str(error) if isinstance(error, SystemExit) else f"{job.name}, {job.seed}: {error!r}")
                    continue
                ended[playing[done]] = done.result()
                yield [ended[index] for index in sorted(ended)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # start no further jobs
            raise
    if failed:
        raise SystemExit("\n\n".join(failed))


def table(results: Mapping[str, Any], measures: Sequence[str], gain: str = "success") -> str:
    """Markdown. Each line is an evaluation on the whole evaluation set; `gain` is relative to the run's first one."""
    start, splits = results["start"], list(results["start"]["splits"])
    gained_in = "gain" if gain == "success" else f"gain in {gain}"
    titles = [
        "",
        "seed",
        "success",
        *(measure.replace("_", " ") for measure in measures),
        f"{gained_in} (95 % interval)",
    ]
    titles += [*(split.replace("_", " ") for split in splits), "RL steps", results.get("clock", "s")]
    rows = [["zero-shot", "", *_cells(start["held_out"][0], measures), "", *["" for _ in splits], "", ""]]
    for run in [start, *results["runs"]]:
        name, seed, gained = (
            ("warm start", "", "") if run is start else (f"`{run['name']}`", str(run["seed"]), gain_cell(run, gain))
        )
        others = [success_cell(run["splits"][split]) for split in splits]
        took = "" if run["seconds"] is None else f"{run['seconds']:.0f}"
        steps = "" if run is start else str(run["held_out"][-1]["step"])
        rows.append([name, seed, *_cells(run["held_out"][-1], measures), gained, *others, steps, took])
    return markdown([titles, *rows])


def kinds_table(results: Mapping[str, Any]) -> str:
    """Success by data source, after the warm start and after each run, as markdown; empty for a single source."""
    sides = {"warm start": results["start"], **{f"`{run['name']}` {run['seed']}": run for run in results["runs"]}}
    last = [side["held_out"][-1] for side in sides.values()]
    kinds = sorted(name for name in last[0] if name.startswith("success/"))
    lines = [[kind.rpartition("/")[2].replace("_", " "), *(f"{each[kind]:.1%}" for each in last)] for kind in kinds]
    return markdown([["", *sides], *lines]) if lines else ""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column holds names."""
    titles, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---", *["---:"] * (len(titles) - 1)], *rows])


def gain_cell(run: Mapping[str, Any], measure: str = "success") -> str:
    """The gain in percentage points."""
    gains = {name.removeprefix("reward_part/"): gain for name, gain in run["gains"].items()}
    gain = PairedDifference(**_known(gains, measure, "--gain"))
    if measure == "success":
        return f"{100 * gain.difference:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    return f"{gain.difference:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def _known(values: Mapping[str, Any], name: str, option: str) -> Any:
    if name not in values:
        raise SystemExit(f"{option} {name}: there is no such measure here, but {', '.join(sorted(values))}")
    return values[name]


def _cells(evaluation: Mapping[str, Any], measures: Sequence[str]) -> list[str]:
    names = {"reward/mean": "reward"}
    known = {names.get(name, name.removeprefix("reward_part/")): value for name, value in evaluation.items()}
    return [success_cell(evaluation), *(f"{_known(known, measure, '--measures'):.3f}" for measure in measures)]


def success_cell(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['success']:.1%} ± {evaluation['success_stderr']:.1%}"


HOW_SURE = (
    "The gain compares each run with its own evaluation before the first step. Those weights are the warm start's, but "
    "greedy sampling on a GPU is reproducible only up to rounding. Intervals cover the choice of rows, not the "
    "training seed."
)


def setting(results: Mapping[str, Any]) -> str:
    start = results["start"]["held_out"][0]
    rows = f"{start['rows']:.0f} rows, panel `{results['start']['panel']}`"
    return f"{where(results)}, {rows}, greedy: {commands(results)}"


def where(results: Mapping[str, Any]) -> str:
    """Hardware and commits."""
    shared = f", {results['workers']} runs at once" if results["workers"] > 1 else ""
    found = dict.fromkeys([results["commit"], *(run.get("commit", results["commit"]) for run in results["runs"])])
    return f"{results['accelerator']}{shared}, commit {', '.join(f'`{each}`' for each in found)}"


def commands(results: Mapping[str, Any]) -> str:
    """Those that measured, the first one first."""
    return " ; ".join(f"`{each}`" for each in [*results.get("earlier", []), results["command"]])


def draw(results: Mapping[str, Any], picture: Path, title: str) -> None:
    names, seeds = (list(dict.fromkeys(run[key] for run in results["runs"])) for key in ("name", "seed"))
    with drawn(picture) as figure:
        axes = figure.subplots()
        for run in results["runs"]:
            points = [(each["step"], 100 * each["success"], 100 * each["success_stderr"]) for each in run["held_out"]]
            steps, success, error = zip(*points, strict=True)
            look = series(names.index(run["name"])) | {"linestyle": LINES[seeds.index(run["seed"]) % len(LINES)]}
            axes.errorbar(steps, success, yerr=error, **look, label=run["name"] if run["seed"] == seeds[0] else None)
        zero = 100 * results["start"]["held_out"][0]["success"]
        axes.axhline(zero, color=GRAY, linestyle=":", label="zero-shot")
        axes.set(xlabel="RL step", ylabel="success on held-out rows, %", title=title, ylim=(0, None))
        if len(seeds) > 1:
            axes.set_title(f"{title} (one line style per seed)")
        axes.legend()


def parser_of(module: str, *, compared: str) -> argparse.ArgumentParser:
    """A parser with the options of all comparisons of runs."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("recipe")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="override of the recipe, for all runs")
    own = f"{compared.upper()}:override, for its runs"
    parser.add_argument("--for", dest="of", action="append", default=[], help=own)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are kept")
    parser.add_argument("--out", type=Path)
    return parser


def facts_of(module: str, words: Sequence[str]) -> dict[str, Any]:
    """The command, machine and settings of results."""
    command = " ".join([f"python -m benchmarks.{module}", *words])
    return {"command": command, "accelerator": accelerator(pick_device("auto")), **machine()}


def new_folder(runs: Path, name: str) -> Path:
    folder = runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    return folder


def keep(out: Path, results: Mapping[str, Any]) -> None:
    """Write atomically. Called after each run, so that an interrupted comparison keeps finished runs."""
    out.parent.mkdir(exist_ok=True, parents=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(out)


def marks(results: str) -> tuple[str, str]:
    """The marker lines around the results on a page."""
    return f"<!-- results: {results} -->", f"<!-- end of {results} -->"


def fill(page: Path, results: str, text: str) -> None:
    """Write between the marks of a README; the end mark is added if missing."""
    content, (begins, ends) = page.read_text(encoding="utf-8"), marks(results)
    head, begin, rest = content.partition(begins)
    if not begin:
        raise SystemExit(f"{page} has no line {begins}")
    tail = rest.partition(ends)[2] if ends in rest else rest
    page.write_text(f"{head}{begins}\n{text}\n{ends}{tail}", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    parser = parser_of("recipes", compared="algorithm")
    parser.add_argument("--algorithms", default="grpo")
    parser.add_argument("--splits", default="", help="other splits to be judged on at the end")
    parser.add_argument("--start", type=Path, help="a run of `agent-r1 sft` to begin from, instead of a new one")
    parser.add_argument("--measures", default="", help="what the table shows too: reward (its mean), or parts of it")
    gain = "the measure whose paired difference the table shows, and others whose means over seeds are shown"
    parser.add_argument("--gain", default="success", help=gain)
    parser.add_argument("--draw", action="store_true", help="measure nothing; picture, and table in the README")
    parser.add_argument("--add", action="store_true", help="keep the runs that the results file has, and add these")
    parser.add_argument("--cpu-seconds", action="store_true", help="count processor time, on a machine with other work")
    options = parser.parse_args(words)
    if options.cpu_seconds and options.workers > 1:
        raise SystemExit("--cpu-seconds: with several workers, processor time cannot be told apart")
    name = options.recipe.replace("/", "-")
    out = options.out or RESULTS / f"{name}.json"
    measures = [measure for measure in options.measures.split(",") if measure]
    gains = options.gain.split(",")
    if options.draw:
        results = json.loads(out.read_text(encoding="utf-8"))
        written, picture = table(results, measures, gains[0]), ROOT / "docs" / f"{out.stem}.png"
        print(written)
        draw(results, picture, options.recipe)
        shown = f"![Held-out success over RL steps](../../../docs/{picture.name})"
        page = RECIPES / options.recipe.partition("/")[0] / "README.md"
        parts = [seeds_table(results, gains), written, HOW_SURE, shown, kinds_table(results), setting(results)]
        fill(page, out.name, "\n" + "\n\n".join(part for part in parts if part) + "\n")
        return
    facts = facts_of("recipes", words)
    earlier = json.loads(out.read_text(encoding="utf-8")) if options.add and out.exists() else None
    for results in measure(options, new_folder(options.runs, name)):
        keep(out, facts | results if earlier is None else add(earlier, facts | results))
        print(table(results, measures, gains[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
