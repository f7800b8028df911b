"""What a training run has to say for itself at its end, beside what became of it: one line each, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from agent_r1.cli.display import program
from agent_r1.config import SummaryContext
from agent_r1.errors import DataError
from agent_r1.places import shown
from agent_r1.rollout.collect import most_common_failure
from agent_r1.runs.metrics import failed_share
from agent_r1.runs.records import read_trajectories
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Trajectory

Record = Mapping[str, Any]  # the metrics of a step

# What a conversation has to outgrow before a policy leaves something out.
_OUTGROWN = {
    "window": ("turns",),
    "drop_results": ("keep",),
    "notes": ("turns",),
    "summary": ("max_tokens", "keep_turns"),
}
MANY_SUMMARIES = 0.5  # for each action: prompts are then short of room, not long


def remarks(run: RunDir, trained: Sequence[Record], *, start: int, steps: int, total: int) -> list[str]:
    """`trained`: of all steps there are. `start`, `steps`: the step this command began after, and the last one it made;
    `total`: the last one of the run."""
    return [
        *_going_on(run, total, start=start, steps=steps),
        *_failures(run, trained),
        *_refused_updates(trained),
        *_summaries(run, trained),
        *_everything_shown(run, trained),
        *_nothing_learned(run, trained),
    ]


def _going_on(run: RunDir, total: int, *, start: int, steps: int) -> list[str]:
    """The line on how to continue, where there is something to say: the time ran out, or nothing was left to do."""
    if steps < total:
        why = f"trainer.max_minutes ran out, steps left: {total - steps}"
        return [f"go on       {program()} train --resume {run} ({why})"]
    return [f"go on       already at step {start} of {total}; trainer.steps=N goes on"] if 0 < start == steps else []


def _failures(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """The line on failed training episodes, if there are any."""
    attempts = run.config.rollout.group_size
    played = {record["step"]: round(record["group/count"]) * attempts for record in trained}
    failed = {record["step"]: round(failed_share(record) * played[record["step"]]) for record in trained}
    if not any(failed.values()):
        return []
    what = f"{sum(failed.values())} of {sum(played.values())} training episodes"
    return [f"failed      {what}{_cause_in_worst_step(run, failed)}{_details(run)}"]


def _refused_updates(trained: Sequence[Record]) -> list[str]:
    """The line about refused optimizer steps, if there are any."""
    refused = [record for record in trained if record.get("skipped_updates")]
    if not refused:
        return []
    count = round(sum(record["skipped_updates"] for record in refused))
    with_advantages = sum(record.get("nonfinite_advantages", 0.0) > 0 for record in refused)
    cause = f"advantages were not finite in {with_advantages} of them" if with_advantages else "look for a lower lr"
    what = f"{count} optimizer steps in {len(refused)} of {len(trained)} training steps, loss or gradient not finite"
    return [f"refused     {what}; {cause}"]


def eval_failures(episodes: Sequence[Trajectory], run: RunDir) -> str:
    """How many episodes of an evaluation failed, and why; empty if none did."""
    failed = [trajectory for trajectory in episodes if trajectory.stop.is_failure]
    if not failed:
        return ""
    return f"{len(failed)} of {len(episodes)} episodes, mostly: {_short_cause(failed)}{_details(run)}"


def _summaries(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """The line on summaries, if the policy did little else than write them."""
    context = run.config.context
    if not isinstance(context, SummaryContext):
        return []
    attempts = run.config.rollout.group_size
    written, actions = (
        round(sum(record.get(name, 0.0) * record["group/count"] * attempts for record in trained))
        for name in ("context/summaries", "episode/steps")
    )
    if written == 0 or written < MANY_SUMMARIES * actions:
        return []
    what = f"{written:,} for {actions:,} actions: context.max_tokens={context.max_tokens} leaves little room"
    return [f"summaries   {what}{_prompts_after_summaries(run, trained)}. Raise context.max_tokens"]


def _everything_shown(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """The line on a context policy that might as well not have been there. Of a rewrite, which may add to what is
    shown, that cannot be told."""
    context = run.config.context
    acted = [record for record in trained if record.get("episode/steps", 0.0) > 0]
    if context.policy == "append" or not acted:
        return []
    measured = [record for record in acted if "context/summaries" in record]
    if not measured:
        why = f"{run.config.task.flow} says uses_context = True, and does not pass context=self.context to episode.act"
        return [f"context     {context.policy} was not used: {why}"]
    hidden = any(record.get("context/hidden_messages", 1.0) or record["context/summaries"] for record in measured)
    if hidden or context.policy == "rewrite":
        return []
    settings = " and ".join(f"context.{name}={getattr(context, name)}" for name in _OUTGROWN[context.policy])
    return [
        f"context     {context.policy} showed everything, as append does: no conversation was too long for {settings}"
    ]


def _prompts_after_summaries(run: RunDir, trained: Sequence[Record]) -> str:
    """In the last step whose episodes are kept."""
    files = [run.trajectories_file("train", record["step"]) for record in trained]
    kept = [file for file in files if file.exists()]
    if not kept:
        return ""
    try:
        episodes = [trajectory.steps for trajectory in read_trajectories(kept[-1])]
    except DataError as error:  # no reason to end a run that is done
        return f" ({error})"
    after = [len(step.prompt_ids) for steps in episodes for last, step in pairwise(steps) if last.is_summary]
    return f", as prompts right after one have {median(after):,.0f} tokens (median)" if after else ""


def _nothing_learned(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """The line on why, if no step changed a weight."""
    if not trained or not all(record["empty_update"] for record in trained):
        return []
    if all(failed_share(record) == 1 for record in trained):
        return []  # what has been said of failures says it all
    always = all(record["success"] == 1 for record in trained)
    imitates = run.config.sft.demos is not None or run.config.sft.trajectories is not None
    demos = "more demonstrations (sft.count, sft.epochs)" if imitates else "demonstrations (sft.demos)"
    advice = "harder rows" if always else f"{demos}, easier rows, or a larger group (rollout.group_size)"
    return [f"learned     nothing: attempts at the same row never earned different rewards. What helps: {advice}"]


def _cause_in_worst_step(run: RunDir, failed: Mapping[int, int]) -> str:
    """Of one step, whose episodes are soon read: those of a whole run are not. Not every step's need be kept."""
    files = {step: run.trajectories_file("train", step) for step in failed if failed[step]}
    kept = [step for step, file in files.items() if file.exists()]
    if not kept:
        return ""
    worst = max(kept, key=failed.__getitem__)
    try:
        cause = _short_cause(t for t in read_trajectories(files[worst]) if t.stop.is_failure)
    except DataError as error:  # no reason to end a run that is done
        return f" ({error})"
    return f", in step {worst} mostly: {cause}"


def _short_cause(failed: Iterable[Trajectory]) -> str:
    failure, _ = most_common_failure(failed)
    cause = " ".join(str(failure).split())
    return cause if len(cause) <= 200 else f"{cause[:140]} ... {cause[-50:]}"  # the place is at the end


def _details(run: RunDir) -> str:
    return f"; details in {shown(run.log_file)}" if has_text(run.log_file) else ""


def has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
