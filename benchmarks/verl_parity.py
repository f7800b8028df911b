"""Compare training on verl with local training: the same ids, advantages, losses and gradient norms.

    python -m benchmarks.verl_parity run [CASE ...] --out FOLDER     # each case twice: backend=local, backend=verl
    python -m benchmarks.verl_parity table --out FOLDER              # writes the table of docs/verl.md

Cases that play alike share the processes of one session: the policy, its optimizer and the critic go back to their
first state between two cases, and each case has its own loss, learner and run directory. Needs the environment of verl
(docs/verl.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_r1.backends.verl.launch import session
from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import run_training, seeded_start
from agent_r1.cli.display import Display
from agent_r1.config import RunConfig, load_config
from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.runs.reader import RunReader
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.loop import Schedule, train

PAGE = Path(__file__).parents[1] / "docs" / "verl.md"
COMMON = ["trainer.steps=2", "trainer.eval_every=2", "eval.rows=50", "trainer.save_every=2"]
# A session has everything that one of its cases needs.
SESSION = ["algorithm.name=ppo", "algorithm.kl_coef=0.01"]
# How the cases of a session play. No demonstration has a summary, so that session starts from a run of another one.
WINDOW = ["context.policy=window", "context.turns=1"]
SUMMARY = [
    *("context.policy=summary", "context.max_tokens=40", "context.summary_tokens=16", "context.instruction=Sum up."),
    *("sft.demos=null", "model.path={grpo}"),
]
TWO = "learner.num_minibatches=2"
PLAYS: dict[str, list[str]] = {"": [], "window": WINDOW, "summary": SUMMARY}
CASES: dict[str, tuple[str, list[str]]] = {name: ("", [f"algorithm.name={name}"]) for name in ALGORITHMS}
CASES |= {
    "grpo, KL in the loss, 2 epochs": ("", ["algorithm.kl_coef=0.01", "learner.num_epochs=2"]),
    "grpo, KL in the reward": ("", ["algorithm.kl_coef=0.01", "algorithm.kl_in=reward"]),
    "grpo, correction, entropy": (
        "",
        ["correction.kind=truncate", "correction.level=step", "algorithm.entropy_coef=0.01"],
    ),
    "grpo, window, 2 mini-batches": ("window", [TWO]),
    "gigpo, window, 2 mini-batches": ("window", ["algorithm.name=gigpo", TWO]),
    "ppo, window, 2 mini-batches": ("window", ["algorithm.name=ppo", TWO]),
    "grpo, summary, 2 mini-batches": ("summary", [TWO]),
    "steppo, summary, 2 mini-batches": ("summary", ["algorithm.name=steppo", TWO]),
}
VERL = ["backend=verl", "verl.cpu=true"]
ID_FIELDS = ("prompt_ids", "response_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two runs are apart, over all training steps."""

    case: str
    trajectories: int
    identical: int  # trajectories with the same ids, in the same order
    advantage: float  # largest difference
    logprob: float
    loss: float
    grad_norm: float
    critic_grad_norm: float | None
    evaluations: bool  # the same successes
    local_step: float  # seconds per step
    verl_step: float

    @property
    def is_parity(self) -> bool:
        norms = [self.grad_norm, self.critic_grad_norm or 0.0]
        same = self.identical == self.trajectories and self.evaluations
        return same and self.advantage <= 1e-6 and max(self.loss, *norms) <= 1e-5


def difference(case: str, local: RunReader, other: RunReader) -> Difference:
    pairs = [
        (mine, theirs)
        for a, b in zip(local.files("train"), other.files("train"), strict=True)
        for mine, theirs in zip(a, b, strict=True)
    ]
    same = [pair for pair in pairs if _ids(pair[0]) == _ids(pair[1])]
    ours, theirs = local.read_metrics("train"), other.read_metrics("train")

    def apart(name: str) -> float:
        return max(abs(float(a[name]) - float(b[name])) for a, b in zip(ours, theirs, strict=True))

    evals = [[record["success"] for record in run.read_metrics("eval")] for run in (local, other)]
    has_critic = "critic_grad_norm" in ours[0]
    return Difference(
        case=case,
        trajectories=len(pairs),
        identical=len(same),
        advantage=max((_apart(a, b, "advantages") for a, b in same), default=0.0),
        logprob=max((_apart(a, b, "response_logprobs") for a, b in same), default=0.0),
        loss=apart("loss"),
        grad_norm=apart("grad_norm"),
        critic_grad_norm=apart("critic_grad_norm") if has_critic else None,
        evaluations=evals[0] == evals[1],
        local_step=_seconds(ours),
        verl_step=_seconds(theirs),
    )


def _ids(record: dict[str, Any]) -> list[Any]:
    return [record["trajectory_id"], *([step[name] for name in ID_FIELDS] for step in record["steps"])]


def _apart(a: dict[str, Any], b: dict[str, Any], name: str) -> float:
    pairs = zip(a["steps"], b["steps"], strict=True)
    numbers = [abs(x - y) for s, t in pairs for x, y in zip(s.get(name, []), t.get(name, []), strict=True)]
    return max(numbers, default=0.0)


def _seconds(records: list[dict[str, Any]]) -> float:
    """Of the last step: the first one has to warm up."""
    return float(records[-1]["time/collect"] + records[-1]["time/update"])


def settings_of(play: str, words: list[str], folder: Path) -> RunConfig:
    first = folder / path_name("grpo", "local")
    return load_config("quickstart", [*COMMON, *(word.format(grpo=first) for word in PLAYS[play]), *words])


def path_name(case: str, backend: str) -> str:
    return f"{re.sub('[^a-z0-9+]+', '_', case.lower())}_{backend}"


def run_locally(cases: list[str], folder: Path) -> None:
    for case in cases:
        path = folder / path_name(case, "local")
        if not (path / "curve.png").exists():
            play, words = CASES[case]
            config = settings_of(play, words, folder)
            run_training(config, build_plan(config), RunDir.create(path, config), Console(quiet=True), resume=False)
            print(f"{case}: trained locally", flush=True)


def run_on_verl(play: str, cases: list[str], folder: Path) -> None:
    """Train all cases in one session."""
    config = settings_of(play, [*VERL, *SESSION], folder)
    run = RunDir.create(folder / f"session_{play or 'append'}", config)
    with session(config, run, print) as watch:
        work = _train_cases(config, run, watch, cases, folder)
        asyncio.run(watch.guard(work))


async def _train_cases(config: RunConfig, run: RunDir, watch: Any, cases: list[str], folder: Path) -> None:
    from agent_r1.backends.verl.assemble import make_trainer, start_processes  # imports verl

    began, console = time.monotonic(), Console(quiet=True)
    plan = build_plan(config)
    weights = await seeded_start(config, plan.task, console)
    processes = await start_processes(config, run=run, plan=plan, weights=weights, watch=watch)
    first = run.path / "start"
    processes.workers.save(first)
    print(f"{processes}, ready after {time.monotonic() - began:.0f} s", flush=True)
    for case in cases:
        began = time.monotonic()
        own = settings_of(*CASES[case], folder).model_copy(update={"backend": "verl", "verl": config.verl})
        mine = RunDir.create(folder / path_name(case, "verl"), own)
        processes.workers.load(first)
        await plan.task.run(_train_case(own, mine, processes, watch, console, make_trainer))
        (mine.path / "done").touch()
        print(f"{case}: trained on verl in {time.monotonic() - began:.0f} s", flush=True)


async def _train_case(config: RunConfig, run: RunDir, processes: Any, watch: Any, console: Any, make: Any) -> None:
    with Display(console, "training", total=2) as display:
        trainer = make(config, run=run, plan=build_plan(config), progress=display, processes=processes, watch=watch)
        await trainer.sync_weights(0)
        await trainer.evaluate(0)
        await train(trainer, Schedule(steps=2, eval_every=2, save_every=2), trainer.crew)


def compare_case(case: str, folder: Path) -> Difference:
    runs = [RunReader.open(folder / path_name(case, backend)) for backend in ("local", "verl")]
    found = difference(case, *runs)
    (folder / f"{path_name(case, 'result')}.json").write_text(json.dumps(asdict(found), indent=2))
    return found


def table(found: list[Difference]) -> str:
    lines = [
        "| case | same ids | advantages | log-probs | loss | gradient norm | critic's |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        critic = "" if each.critic_grad_norm is None else f"{each.critic_grad_norm:.1e}"
        lines.append(
            f"| {each.case} | {each.identical} of {each.trajectories} | {each.advantage:.1e} | {each.logprob:.1e} | "
            f"{each.loss:.1e} | {each.grad_norm:.1e} | {critic} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.action == "run":
        chosen = given.cases or list(CASES)
        run_locally(list(dict.fromkeys(["grpo", *chosen])), given.out)
        for play in PLAYS:
            left = [case for case in chosen if CASES[case][0] == play]
            left = [case for case in left if not (given.out / path_name(case, "verl") / "done").exists()]
            if left:
                run_on_verl(play, left, given.out)
        found = [compare_case(case, given.out) for case in chosen]
        for each in found:
            print("parity" if each.is_parity else "NO PARITY", each, flush=True)
        raise SystemExit(0 if all(each.is_parity for each in found) else 1)
    results = [json.loads(path.read_text()) for path in given.out.glob("*_result.json")]
    order = list(CASES)
    made = sorted((Difference(**each) for each in results), key=lambda each: order.index(each.case))
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- parity -->\n", "<!-- end of parity -->"
    before, _, rest = text.partition(begin)
    PAGE.write_text(f"{before}{begin}\n{table(made)}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
