"""Remarks at the end of a training run: one line for each thing that the user should know and may want to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.cli.display import program
from agent_r1.errors import DataError
from agent_r1.places import shown
from agent_r1.rollout.collect import most_common_failure
from agent_r1.runs.metrics import failed_share
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.types import Trajectory

Record = Mapping[str, Any]  # the metrics of one step

LIMITS = ("turns", "keep", "max_tokens", "keep_turns")  # of context policies: shorter conversations are shown whole
MANY_SUMMARIES = 0.5  # summaries per action


def remarks(run: RunDir, trained: Sequence[Record], *, start: int, steps: int, total: int) -> list[str]:
    """`trained` has the metrics of all steps. This command began after step `start` and ended with step `steps` of
    `total`."""
    return [
        *_continue(run, start=start, steps=steps, total=total),
        *_failures(run, trained),
        *_refused_updates(trained),
        *_summaries(run, trained),
        *_unused_context(run, trained),
        *_nothing_learned(run, trained),
    ]


def _continue(run: RunDir, *, start: int, steps: int, total: int) -> list[str]:
    if steps < total:
        left = f"trainer.max_minutes was reached with {total - steps} steps left"
        return [f"continue    {program()} train --resume {run} ({left})"]
    if 0 < start == steps:
        return [f"continue    all {total} steps were done already; add trainer.steps=N for more"]
    return []


def _failures(run: RunDir, trained: Sequence[Record]) -> list[str]:
    attempts = run.settings["rollout"]["group_size"]
    played = {record["step"]: round(record["group/count"]) * attempts for record in trained}
    failed = {record["step"]: round(failed_share(record) * played[record["step"]]) for record in trained}
    if not any(failed.values()):
        return []
    what = f"{sum(failed.values())} of {sum(played.values())} training episodes"
    return [f"failed      {what}{_cause_in_worst_step(run, failed)}{_details(run)}"]


def _refused_updates(trained: Sequence[Record]) -> list[str]:
    refused = [record for record in trained if record.get("skipped_updates")]
    if not refused:
        return []
    count = round(sum(record["skipped_updates"] for record in refused))
    with_advantages = sum(record.get("nonfinite_advantages", 0.0) > 0 for record in refused)
    cause = f"advantages were not finite in {with_advantages} of them" if with_advantages else "try a lower learner.lr"
    what = f"{count} optimizer steps in {len(refused)} of {len(trained)} training steps, loss or gradient not finite"
    return [f"refused     {what}; {cause}"]


def eval_failures(episodes: Sequence[Trajectory], run: RunDir) -> str:
    """How many episodes of an evaluation failed, and why; empty if none did."""
    failed = [trajectory for trajectory in episodes if trajectory.stop.is_failure]
    if not failed:
        return ""
    return f"{len(failed)} of {len(episodes)} episodes, mostly: {_short_cause(failed)}{_details(run)}"


def _summaries(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """Remark on many summaries: they mean that prompts have too little room, not that episodes are long."""
    context, attempts = run.settings["context"], run.settings["rollout"]["group_size"]
    written, actions = (
        round(sum(record.get(name, 0.0) * record["group/count"] * attempts for record in trained))
        for name in ("context/summaries", "episode/steps")
    )
    if context["policy"] != "summary" or written == 0 or written < MANY_SUMMARIES * actions:
        return []
    return [f"summaries   {written:,} for {actions:,} actions: raise context.max_tokens={context['max_tokens']}"]


def _unused_context(run: RunDir, trained: Sequence[Record]) -> list[str]:
    """Remark on a context policy that left nothing out. A rewrite cannot be judged: it may add to what is shown."""
    context = run.settings["context"]
    strips = context.get("reasoning") == "strip"  # absent in older runs
    policy = "reasoning=strip" if strips and context["policy"] == "append" else context["policy"]
    acted = [record for record in trained if record.get("episode/steps", 0.0) > 0]
    if policy in ("append", "rewrite") or not acted:
        return []
    if any(record.get("context/hidden_messages") or record.get("context/summaries") for record in acted):
        return []
    limits = " and ".join(f"context.{name}={context[name]}" for name in LIMITS if name in context)
    why = f"no conversation was too long for {limits}" if limits else "no earlier reply held any thinking"
    if not any("context/summaries" in record for record in acted):
        why = f"{run.settings['task']['flow']} does not pass context=self.context to episode.act"
    return [f"context     {policy} left nothing out: {why}"]


def _nothing_learned(run: RunDir, trained: Sequence[Record]) -> list[str]:
    if not trained or not all(record["empty_update"] for record in trained):
        return []
    if all(failed_share(record) == 1 for record in trained):
        return []  # the remark on failures explains it
    always = all(record["success"] == 1 for record in trained)
    imitates = any(run.settings["sft"][source] is not None for source in ("demos", "trajectories"))
    demos = "more demonstrations (sft.count, sft.epochs)" if imitates else "demonstrations (sft.demos)"
    advice = "harder rows" if always else f"{demos}, easier rows, or a larger group (rollout.group_size)"
    return [f"learned     nothing: attempts at the same row never earned different rewards. Try {advice}"]


def _cause_in_worst_step(run: RunDir, failed: Mapping[int, int]) -> str:
    """Return the most common cause in the worst step whose episodes were kept."""
    kept = [step for step in failed if failed[step] and run.trajectories_file("train", step).exists()]
    if not kept:
        return ""
    worst = max(kept, key=failed.__getitem__)
    try:
        found = [t for t in read_trajectories(run.trajectories_file("train", worst)) if t.stop.is_failure]
    except DataError as error:  # the run itself is complete
        return f" ({error})"
    return f", in step {worst} mostly: {_short_cause(found)}" if found else ""


def _short_cause(failed: Iterable[Trajectory]) -> str:
    failure, _ = most_common_failure(failed)
    cause = " ".join(str(failure).split())
    return cause if len(cause) <= 200 else f"{cause[:140]} ... {cause[-50:]}"  # the place is at the end


def _details(run: RunDir) -> str:
    return f"; details in {shown(run.log_file)}" if has_text(run.log_file) else ""


def has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
