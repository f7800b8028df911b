"""`agent-r1 collect`: play training rows without training and keep the episodes, for `sft` to imitate the good ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

from rich.console import Console
from rich.text import Text

from agent_r1.build.collectors import train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.build.models.source import find_model
from agent_r1.build.task import Task
from agent_r1.cli.commands.sft import typed_words
from agent_r1.cli.commands.train import seeded_start
from agent_r1.cli.display import Display, clock, errors_summary, program
from agent_r1.cli.signals import interruptible
from agent_r1.config import RunConfig
from agent_r1.rollout.collect import check_failures
from agent_r1.runs.outcomes import Outcomes, row_outcomes
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.runs.statistics import standard_error
from agent_r1.seeds import stable_seed
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.train.evaluate import episode_metrics
from agent_r1.train.garbage import parts_frozen
from agent_r1.types import TaskRow, Trajectory

EPISODES_PER_FILE = 4096  # an interruption loses at most this many, and this many are in memory at once


def collect_config(config: RunConfig, *, model: str | None, rows: int | None, samples: int | None) -> RunConfig:
    """Apply the options of the command line; None keeps the recipe's value."""
    task, rollout, start, sft = config.task, config.rollout, config.model, config.sft
    if rows is not None:
        task = task.model_copy(update={"train_count": rows})
    if samples is not None:
        rollout = rollout.model_copy(update={"group_size": samples})
    if model is not None:  # sampled as it is, without a warm start
        start = start.model_copy(update={"path": find_model(model), "make": None})
        sft = sft.model_copy(update={"demos": None, "trajectories": None})
    return config.model_copy(update={"task": task, "rollout": rollout, "model": start, "sft": sft})


def run_collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, *, given: Sequence[str] = ()
) -> Outcomes:
    """`given`: see `run_sft`."""

    def kept() -> str:
        episodes = sum(int(record["episodes"]) for record in run.read_metrics("collect"))
        return f"{episodes} episodes are in {run}" if episodes else "no episodes were kept"

    with run.locked(), logging_to(run.log_file):
        work = task.run(_collect(config, task, rows, run, console, given))
        return interruptible(work, config, console, kept)


async def _collect(
    config: RunConfig, task: Task, rows: list[TaskRow], run: RunDir, console: Console, given: Sequence[str]
) -> Outcomes:
    began, outcomes, samples = time.monotonic(), Outcomes(), config.rollout.group_size
    size = max(1, EPISODES_PER_FILE // samples)
    start = await seeded_start(config, task, console)
    with Display(console, "collecting", total=len(rows) * samples) as display:
        model = load_model(config, start)
        run.write_tokens(token_texts(model.tokenizer))
        engine = build_engine(config, model)
        collector = train_collector(config, task, model.renderer, engine)
        finished = count(1)

        def on_episode(_: Trajectory) -> None:
            display.advance(done := next(finished))
            display.episodes(done, len(rows) * samples)

        try:
            with parts_frozen():
                for number, first in enumerate(range(0, len(rows), size)):
                    seed = stable_seed(config.seed, "collect", number)
                    played = await collector(rows[first : first + size], seed=seed, on_episode=on_episode)
                    groups = await task.scorer(played)
                    check_failures(groups, config.rollout.max_error_fraction)
                    metrics = episode_metrics(groups, success_reward=task.success_reward)
                    run.write_trajectories("train", number, groups)
                    run.append_metrics("collect", number, metrics | {"episodes": float(len(groups) * samples)})
                    by_row = {group.row.row_id: group.trajectories for group in groups}
                    outcomes |= row_outcomes(by_row, success_reward=task.success_reward)
                    summary = f"success {metrics['success']:.1%}{errors_summary(metrics)}"
                    display.update(len(outcomes) * samples, summary, value=metrics["success"])
        finally:
            await engine.close()
    # Start from the policy that was sampled: imitating its own responses changes it least.
    least = f" sft.min_reward={task.success_reward:g}" if task.success_reward != 1 else ""
    imitate = f"sft {typed_words(config, given)} sft.trajectories={run}{least} model.path={start}"
    _conclude(config, run, outcomes, console, imitate=imitate, seconds=time.monotonic() - began)
    return outcomes


def _conclude(
    config: RunConfig, run: RunDir, outcomes: Outcomes, console: Console, *, imitate: str, seconds: float
) -> None:
    success = [row["success"] for row in outcomes.values()]
    solved = sum(value > 0 for value in success)
    mean, error = sum(success) / len(success), standard_error(success)
    console.print(
        f"[bold]success {mean:.1%} +- {error:.1%} of {len(success)} rows x {config.rollout.group_size} episodes[/]; "
        f"{solved} rows were solved at least once; this took {clock(seconds)} min",
        highlight=False,
        soft_wrap=True,
    )
    if not solved:
        console.print("  nothing to imitate yet: try more --samples, another --model, or easier rows", highlight=False)
    console.print(Text(f"  look inside            {run}/trajectories/"), soft_wrap=True)
    if solved:
        console.print(Text(f"  imitate the good ones  {program()} {imitate}"), soft_wrap=True)
