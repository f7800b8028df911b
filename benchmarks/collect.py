"""Response tokens per second of `collect` and of turn-synchronous loops over `model.generate`, by tool latency.

    python -m benchmarks.collect               # writes results/collect.json and docs/collect.png

Three sides play the same rows of the quickstart with the same warm-started model, settings and tools:

    collect    our Collector on our LocalEngine: every episode continues when its own tool has answered
    carried    all episodes in lockstep, keys and values kept between turns
    afresh     all episodes in lockstep, whole prompts computed each turn

In the first setting all episodes start at once, so a batch ends with its slowest chain of calls on every side. In the
second ("refilled") more are played than run at once: `collect` starts one when another ends, and the loops play one
batch after another.

Tools wait before they answer; the delay is heavy-tailed, and the k-th call of a run waits equally long on every side.
Sides take turns within a repeat, rotating which goes first, so that a background load affects all of them; the reported
ratio is the median of the ratios within repeats. Only tokens sampled for active episodes count, not padding.

`collect` computes the common prefix of attempts at one row once. The tiny policy often gives the same response eight
times, so this helps more here than with longer, more varied responses. The third setting ("unshared") is the second
with one attempt per row, so that there is nothing to share.

Torch has one thread on every side (or `--threads`). The loops compute on the event loop's thread; the engine of
`collect` has a worker thread beside the one that renders, parses and calls tools, so it can keep a second core partly
busy. Therefore both wall time and CPU time (of all threads) are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from agent_r1.build.collectors import train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import Model, load_model
from agent_r1.build.task import build_task
from agent_r1.cli.commands.train import seeded_start
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.base import Sampling
from agent_r1.envs.base import AgentEnv, merge_env_kwargs
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.recipes.quickstart.task import calculate, lookup
from agent_r1.rollout.collect import Collector
from agent_r1.tools.base import FunctionTool, tool
from agent_r1.track.plots import COLORS, drawn
from agent_r1.types import TaskRow, Trajectory
from benchmarks.baseline import CarriedCache, FreshPrefill, Played, Responder, TurnLoop
from benchmarks.machine import RESULTS, machine

DOCS = Path(__file__).parents[1] / "docs"
SIDES = ("collect", "carried", "afresh")
TAIL = 1.0  # sigma of the log-normal delays: one call in a hundred takes over six times the mean

MakeEnv = Callable[[TaskRow], AgentEnv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed batch of one side."""

    side: str
    latency_ms: float
    repeat: int
    seconds: float
    cpu_seconds: float  # of all threads
    tokens: int  # sampled responses
    steps: int  # model calls
    episodes: int
    engine: dict[str, int] | None  # statistics of our engine

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_tokens_per_second(self) -> float:
        return self.tokens / self.cpu_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The rows, model and settings that all sides use."""

    rows: list[TaskRow]
    network: Any  # a transformers causal LM, for the loops; the engine has a copy
    engine: Any  # the local engine, whose statistics are reported
    collector: Collector
    at_once: int  # episodes

    async def play(self, side: str, make_env: MakeEnv, seed: int) -> list[Played]:
        return await {"collect": self._collect, "carried": self._carried, "afresh": self._afresh}[side](make_env, seed)

    def greedy(self) -> Contest:
        sampling = replace(self.collector.sampling, temperature=0.0)
        return replace(self, collector=replace(self.collector, sampling=sampling))

    async def _collect(self, make_env: MakeEnv, seed: int) -> list[Played]:
        collect = replace(self.collector, make_flow=lambda row: AgentEnvLoop(make_env), max_concurrent=self.at_once)
        groups = await collect(self.rows, seed=seed)
        return [_as_played(trajectory) for group in groups for trajectory in group.trajectories]

    async def _carried(self, make_env: MakeEnv, seed: int) -> list[Played]:
        return await self._in_lock_step(CarriedCache, make_env, seed)

    async def _afresh(self, make_env: MakeEnv, seed: int) -> list[Played]:
        return await self._in_lock_step(FreshPrefill, make_env, seed)

    async def _in_lock_step(
        self, responder: Callable[[Any, Sampling], Responder], make_env: MakeEnv, seed: int
    ) -> list[Played]:
        collector = self.collector
        loop = TurnLoop(
            make_responder=lambda: responder(self.network, collector.sampling),
            make_env=make_env,
            renderer=collector.renderer,
            sampling=collector.sampling,
            limits=collector.limits,
        )
        torch.manual_seed(seed)
        rows = [row for row in self.rows for _ in range(collector.group_size)]
        batches = [rows[start : start + self.at_once] for start in range(0, len(rows), self.at_once)]
        return [played for batch in batches for played in await loop(batch)]


def build_contest(config: RunConfig, model: Model, *, episodes: int, at_once: int) -> Contest:
    group_size = config.rollout.group_size
    if episodes % group_size:
        raise SystemExit(f"--episodes must be a multiple of the recipe's group size, {group_size}; got {episodes}")
    task = build_task(config)
    engine = build_engine(config, model)
    return Contest(
        rows=task.train_rows()[: episodes // group_size],
        network=model.network.eval(),
        engine=engine,
        collector=train_collector(config, task, model.renderer, engine),
        at_once=at_once,
    )


def one_attempt_each(contest: Contest, rows: Sequence[TaskRow]) -> Contest:
    """The same number of episodes without groups: one attempt per row."""
    episodes = len(contest.rows) * contest.collector.group_size
    if len(rows) < episodes:
        raise SystemExit(f"{episodes} episodes of one row each need as many rows; the recipe has {len(rows)}")
    return replace(contest, rows=list(rows[:episodes]), collector=replace(contest.collector, group_size=1))


def _as_played(trajectory: Trajectory) -> Played:
    return Played(
        prompts=[step.prompt_ids for step in trajectory.steps],
        responses=[step.response_ids for step in trajectory.steps],
        stop=trajectory.stop,
    )


def env_maker(latency_ms: float, seed: int) -> MakeEnv:
    """Environments with slowed-down quickstart tools."""
    tools: list[FunctionTool] = [lookup, calculate]
    if latency_ms:
        waits = delays(latency_ms / 1000, seed)
        tools = [slowed(each, waits) for each in tools]
    return lambda row: ToolEnv(**merge_env_kwargs({"tools": tools}, row))


def delays(mean: float, seed: int) -> Iterator[float]:
    """Log-normal delays in seconds with this mean."""
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.lognormal(math.log(mean) - TAIL**2 / 2, TAIL))


def slowed(fast: FunctionTool, waits: Iterator[float]) -> FunctionTool:
    """The same tool, which answers after the next of `waits`."""

    @functools.wraps(fast.function)
    async def slow(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(next(waits))
        return await fast.function(*args, **kwargs)

    return tool(slow)


async def check_agreement(contest: Contest) -> None:
    """With greedy sampling, all sides must play identical episodes; otherwise speeds are not comparable."""
    played = {side: await contest.greedy().play(side, env_maker(0, seed=0), seed=0) for side in SIDES}
    for side in SIDES[1:]:
        differ = sum(ours != theirs for ours, theirs in zip(played["collect"], played[side], strict=True))
        if differ:
            raise SystemExit(f"greedy, {differ} of {len(played[side])} episodes differ between collect and {side}")


async def time_batch(contest: Contest, side: str, latency_ms: float, repeat: int) -> Run:
    """All sides of a repeat get the same delays."""
    make_env = env_maker(latency_ms, seed=repeat)
    before = asdict(contest.engine.stats)
    began, cpu_began = time.perf_counter(), time.process_time()
    played = await contest.play(side, make_env, seed=repeat)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    after = asdict(contest.engine.stats)
    return Run(
        side=side,
        latency_ms=latency_ms,
        repeat=repeat,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        tokens=sum(episode.tokens for episode in played),
        steps=sum(len(episode.responses) for episode in played),
        episodes=len(played),
        engine={name: after[name] - before[name] for name in after} if side == "collect" else None,
    )


async def time_all(contest: Contest, latencies: Sequence[float], repeats: int) -> list[Run]:
    runs = []
    for latency_ms in latencies:
        for repeat in range(repeats):
            for side in order(repeat):
                runs.append(await time_batch(contest, side, latency_ms, repeat))
    return runs


def order(repeat: int) -> tuple[str, ...]:
    """The sides, rotating which goes first."""
    first = repeat % len(SIDES)
    return SIDES[first:] + SIDES[:first]


def summarise(runs: Sequence[Run], latency_ms: float) -> dict[str, Any]:
    """Medians over the repeats of one latency."""
    of_side = {side: [run for run in runs if (run.side, run.latency_ms) == (side, latency_ms)] for side in SIDES}
    by_wall = {side: [run.tokens_per_second for run in of_side[side]] for side in SIDES}
    by_cpu = {side: [run.cpu_tokens_per_second for run in of_side[side]] for side in SIDES}
    ours = of_side["collect"]
    engine = [run.engine for run in ours if run.engine is not None]
    return {
        "latency_ms": latency_ms,
        "repeats": len(ours),
        "tokens_per_second": {side: round(median(by_wall[side])) for side in SIDES},
        "collect_over": _ratios(by_wall),
        "cpu_tokens_per_second": {side: round(median(by_cpu[side])) for side in SIDES},
        "cpu_collect_over": _ratios(by_cpu),
        "steps_per_episode": {
            side: round(sum(run.steps for run in of_side[side]) / sum(run.episodes for run in of_side[side]), 2)
            for side in SIDES
        },
        "engine": {name: round(median(counts[name] for counts in engine)) for name in engine[0]},
    }


def _ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios of `collect` to the others within a repeat."""
    ours = speeds["collect"]
    return {side: round(median(a / b for a, b in zip(ours, speeds[side], strict=True)), 2) for side in SIDES[1:]}


def show(summary: Sequence[dict[str, Any]], setting: str) -> None:
    print(setting)
    print(
        f"{'tool latency':>12} {'collect':>9} {'carried':>9} {'afresh':>9}   tokens/s      collect over carried, afresh"
    )
    for row in summary:
        for label, kind in ((f"{row['latency_ms']:g} ms", ""), ("by CPU time", "cpu_")):
            speed, over = row[f"{kind}tokens_per_second"], row[f"{kind}collect_over"]
            cells = " ".join(f"{speed[side]:>9}" for side in SIDES)
            print(f"{label:>12} {cells} {over['carried']:>26.2f}x {over['afresh']:>7.2f}x")
    engine, steps = summary[0]["engine"], summary[0]["steps_per_episode"]["collect"]
    print(
        f"collect: {steps} steps per episode; of the prompt tokens {engine['prefilled_tokens']} computed, "
        f"{engine['reused_tokens']} reused; {engine['decoded_tokens']} tokens sampled in {engine['steps']} engine "
        f"steps; {engine['shared_tokens']} tokens of either kind not run, because they ran for another attempt"
    )


def draw(summary: Sequence[dict[str, Any]], picture: Path) -> None:
    labels = {
        "collect": "collect (this project)",
        "carried": "turn by turn, KV cache carried",
        "afresh": "turn by turn, prompts computed anew",
    }
    with drawn(picture) as figure:
        axes = figure.subplots()
        for index, side in enumerate(SIDES):
            heights = [row["tokens_per_second"][side] for row in summary]
            places = [x + 0.27 * (index - 1) for x in range(len(summary))]
            bars = axes.bar(places, heights, width=0.25, color=COLORS[index], label=labels[side])
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=10)
        axes.set_xticks(range(len(summary)), [f"{row['latency_ms']:g} ms" for row in summary])
        axes.set(xlabel="mean latency of a tool call (log-normal)", ylabel="response tokens per second")
        axes.grid(visible=False, axis="x")
        axes.legend()


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect")
    parser.add_argument("--episodes", type=int, default=128, help="played at the same time")
    parser.add_argument("--refills", type=int, default=4, help="play this many times as many in the second setting")
    parser.add_argument("--group-size", type=int, help="attempts at one row, instead of the recipe's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latencies", default="0,50,500", help="mean milliseconds of a tool call, separated by commas")
    parser.add_argument("--refill-latencies", default="50", help="likewise, in the other settings")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, of every side")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw the stored results")
    parser.add_argument("--out", type=Path, help="folder for both files instead of benchmarks/results and docs")
    return parser.parse_args(words)


async def main(words: Sequence[str]) -> None:
    options = arguments(words)
    if options.draw:
        draw(json.loads((RESULTS / "collect.json").read_text(encoding="utf-8"))["summary"], DOCS / "collect.png")
        return
    torch.set_num_threads(options.threads)
    group_size = [f"rollout.group_size={options.group_size}"] if options.group_size else []
    config = load_config("quickstart", [f"engine.threads={options.threads}", *group_size])
    task = build_task(config)
    model = load_model(config, await seeded_start(config, task, Console()))
    at_once, total = options.episodes, options.episodes * options.refills
    refilled = build_contest(config, model, episodes=total, at_once=at_once)
    contest = replace(refilled, rows=refilled.rows[: at_once // config.rollout.group_size])
    unshared = one_attempt_each(refilled, task.train_rows())
    for each in (refilled, unshared):
        await check_agreement(each)  # also warms up every side
    latencies, refill_latencies = _numbers(options.latencies), _numbers(options.refill_latencies)
    runs = await time_all(contest, latencies, options.repeats)
    refilled_runs = await time_all(refilled, refill_latencies, options.repeats)
    unshared_runs = await time_all(unshared, refill_latencies, options.repeats)
    await contest.engine.close()

    summary = [summarise(runs, latency_ms) for latency_ms in latencies]
    refilled_summary = [summarise(refilled_runs, latency_ms) for latency_ms in refill_latencies]
    unshared_summary = [summarise(unshared_runs, latency_ms) for latency_ms in refill_latencies]
    results, docs = (options.out, options.out) if options.out else (RESULTS, DOCS)
    results.mkdir(parents=True, exist_ok=True)
    result = {
        "command": " ".join(["python -m benchmarks.collect", *words]),
        **machine(),
        "threads": options.threads,
        "group_size": config.rollout.group_size,
        "delays": f"log-normal, sigma {TAIL:g}, of the mean given as latency_ms",
        "greedy_episodes_equal": True,  # or nothing would have been measured
        "episodes": at_once,
        "summary": summary,
        "refilled": {"episodes": total, "at_once": at_once, "summary": refilled_summary},
        "unshared": {"episodes": total, "at_once": at_once, "group_size": 1, "summary": unshared_summary},
        "runs": [_recorded(run) for run in runs],
        "refilled_runs": [_recorded(run) for run in refilled_runs],
        "unshared_runs": [_recorded(run) for run in unshared_runs],
    }
    (results / "collect.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(summary, docs / "collect.png")
    show(summary, f"{at_once} episodes, all at once")
    show(refilled_summary, f"{total} episodes, {at_once} at once")
    show(unshared_summary, f"{total} episodes of a row each, {at_once} at once: nothing to share")


def _numbers(words: str) -> list[float]:
    return [float(word) for word in words.split(",")]


def _recorded(run: Run) -> dict[str, Any]:
    speeds = {"tokens_per_second": run.tokens_per_second, "cpu_tokens_per_second": run.cpu_tokens_per_second}
    return asdict(run) | speeds


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
