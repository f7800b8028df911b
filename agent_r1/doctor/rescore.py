"""Score the stored episodes of a run with another reward, to see what would have changed. Needs no model.

Episodes come from the run's files, rows from its recorded settings. A row that is gone or has changed is an error, and
so is a run whose own reward no longer gives the recorded values: then the episodes lack something that rewards read, or
the code has changed, and another reward would be computed from the wrong facts.

This does not tell what the policy would have learned from the other reward: it would soon have played other episodes.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import isclose
from statistics import StatisticsError, correlation, fmean
from typing import Any, TypeVar

from agent_r1.build.task import Task, build_task
from agent_r1.config import RunConfig, parse_config
from agent_r1.data.files import dump_json
from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.rewards import differ_by_rounding
from agent_r1.resources import opened
from agent_r1.rollout.rewards.judge import LLMJudge
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.outcomes import is_success
from agent_r1.runs.reader import RunReader
from agent_r1.runs.trajectories import RecordFile
from agent_r1.text import first_names
from agent_r1.types import Group, TaskRow, Trajectory

PROBED, PROBED_STEPS = 64, 16  # episodes that the run's own reward is tried on, and the steps they are from
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The returns of one episode under two rewards; like metrics, they include process rewards."""

    step: int
    row_id: str
    trajectory_id: str
    before: float
    after: float
    succeeded: bool
    succeeds: bool
    failed: str = ""  # why the new reward could not score it

    @property
    def by(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The attempts at one row under two rewards: most algorithms learn from differences between attempts."""

    step: int
    row_id: str
    swapped: int  # pairs of attempts whose order is reversed
    pairs: int
    was_uniform: bool  # all attempts earned the same, so there was nothing to learn
    is_uniform: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    changes: list[Change]  # of the episodes that can be scored; those that failed while playing are left out
    unscored: int  # episodes that failed while playing: they have no outcome

    def by_step(self) -> dict[int, list[Change]]:
        steps: dict[int, list[Change]] = {}
        for change in self.changes:
            steps.setdefault(change.step, []).append(change)
        return steps

    @property
    def groups(self) -> list[GroupChange]:
        attempts: dict[tuple[int, str], list[Change]] = {}
        for change in self.changes:
            attempts.setdefault((change.step, change.row_id), []).append(change)
        return [_compare(step, row_id, group) for (step, row_id), group in attempts.items()]

    @property
    def correlation(self) -> float | None:
        """Pearson's, or None if one of the rewards is constant."""
        try:
            return correlation([each.before for each in self.changes], [each.after for each in self.changes])
        except StatisticsError:
            return None

    @property
    def failed(self) -> list[Change]:
        return [each for each in self.changes if each.failed]

    def largest(self, count: int) -> list[Change]:
        """The episodes that change most, the largest change first."""
        changed = [each for each in self.changes if not isclose(each.by, 0.0, abs_tol=1e-12)]
        return sorted(changed, key=lambda each: -abs(each.by))[:count]


def _compare(step: int, row_id: str, group: Sequence[Change]) -> GroupChange:
    pairs = list(combinations(group, 2))
    before, after = [each.before for each in group], [each.after for each in group]
    return GroupChange(
        step=step,
        row_id=row_id,
        swapped=sum((one.before - other.before) * (one.after - other.after) < 0 for one, other in pairs),
        pairs=len(pairs),
        was_uniform=differ_by_rounding(min(before), max(before)),
        is_uniform=differ_by_rounding(min(after), max(after)),
    )


def with_reward(config: RunConfig, name: str) -> RunConfig:
    """The config of a run with another reward: `module.function`, as in recipes, or `module:function`."""
    task = config.task.model_copy(update={"reward": name.replace(":", ".")})
    return config.model_copy(update={"task": task})


async def rescore(
    run: RunReader,
    config: RunConfig,
    *,
    step: int | None = None,
    allow_services: bool = False,
    trust_records: bool = False,  # do not try the run's own reward first
) -> Rescored:
    """`config` is that of the run `with_reward`."""
    files = _files(run, step)
    task = build_task(config)
    if not allow_services and (judge := find_judge(task.scorer.reward)) is not None:
        raise ConfigError(
            f"reward {config.task.reward!r} asks the model {judge.model!r} at {judge.base_url}, which costs time or "
            "money and may answer differently each time. Allow it with --allow-services"
        )
    rows = {row.row_id: row for row in task.train_rows()}
    async with opened(task.resources[: len(config.task.resources)]):  # tools are not called
        if not trust_records:
            await _check_records(run, [file for _, file in files], rows)
        changes, unscored = [], 0
        for number, file in files:
            groups = list(_groups(file, rows))
            scored = await task.scorer([_unscored(group) for group in groups])
            changes += [change for pair in zip(groups, scored, strict=True) for change in _changes(number, *pair, task)]
            unscored += sum(each.stop.is_failure for group in groups for each in group.trajectories)
    if not changes:
        raise DataError(f"{run}: every stored episode failed while it was played, so there is nothing to score")
    return Rescored(changes=changes, unscored=unscored)


def _files(run: RunReader, step: int | None) -> list[tuple[int, RecordFile]]:
    files = [(int(file.path.name.split(".")[0].rpartition("_")[2]), file) for file in run.files("train")]
    if not files:
        raise DataError(f"{run} has no stored training episodes (trajectories/train_*.jsonl)")
    if step is None:
        return files
    chosen = [(number, file) for number, file in files if number == step]
    if not chosen:
        kept = [number for number, _ in files]
        raise ConfigError(
            f"--step {step}: {run} has no episodes of it, but of {len(kept)} from {kept[0]} to {kept[-1]}"
        )
    return chosen


def _groups(file: RecordFile, rows: Mapping[str, TaskRow]) -> Iterator[Group]:
    """Yield the groups of a file, with the rows of the task as it is now. Raises DataError for a row that differs."""
    found: dict[str, list[Trajectory]] = {}
    for record, trajectory in zip(file, file.trajectories(), strict=True):
        row = rows.get(trajectory.row_id)
        if row is None:
            missing = dict.fromkeys(each["row_id"] for each in file if each["row_id"] not in rows)
            raise DataError(
                f"{file.path} has episodes of rows that the task no longer has: {first_names(list(missing))}. Restore "
                "the recipe's data as it was when the run was made"
            )
        if (kept := record.get("row")) is not None and (name := _differs(row, kept)) is not None:
            raise DataError(
                f"row {row.row_id!r} has another {name} now than when {file.path} was written: {kept[name]!r:.80}. "
                "Restore the recipe's data and code as they were"
            )
        found.setdefault(trajectory.row_id, []).append(trajectory)
    for row_id, trajectories in found.items():
        yield Group(row=rows[row_id], trajectories=trajectories)


def _differs(row: TaskRow, kept: Mapping[str, Any]) -> str | None:
    now = json.loads(dump_json({"prompt": row.prompt, "ground_truth": row.ground_truth}, default=str))
    return next((name for name, value in now.items() if name in kept and kept[name] != value), None)


def _unscored(group: Group) -> Group:
    """The group as the reward saw it, without an outcome."""
    episodes = [
        each if each.stop.is_failure else replace(each, outcome_reward=0.0, reward_components={})
        for each in group.trajectories
    ]
    return replace(group, trajectories=episodes)


def _changes(step: int, before: Group, after: Group, task: Task) -> Iterator[Change]:
    for one, other in zip(before.trajectories, after.trajectories, strict=True):
        if one.stop.is_failure:
            continue
        yield Change(
            step=step,
            row_id=one.row_id,
            trajectory_id=one.trajectory_id,
            before=one.total_reward,
            after=0.0 if other.stop.is_failure else other.total_reward,
            succeeded=is_success(one, task.success_reward),
            succeeds=is_success(other, task.success_reward),
            failed=str(other.failure) if other.stop.is_failure else "",
        )


async def _check_records(run: RunReader, files: Sequence[RecordFile], rows: Mapping[str, TaskRow]) -> None:
    """Raise DataError if the run's own reward gives other values than it recorded, in steps from first to last."""
    scorer = build_task(parse_config(run.settings)).scorer
    if find_judge(scorer.reward) is not None:
        return  # it may well differ
    differing, tried = [], 0
    for file in spread(files, PROBED_STEPS):
        enough = tried + PROBED // min(len(files), PROBED_STEPS)
        for group in _groups(file, rows):
            differing += await _differing(scorer, group)
            tried += len(group.trajectories)
            if tried >= enough:
                break
    if differing:
        name, recorded, now = differing[0]
        raise DataError(
            f"the reward that {run} was trained with gives other values now for {len(differing)} of {tried} stored "
            f"episodes (such as {name}: {recorded:g}, now {now:g}). The records lack something that it reads, or its "
            "code has changed, so another reward cannot be trusted either. If you know why, add --trust-records"
        )


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many items, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


async def _differing(scorer: Scorer, group: Group) -> list[tuple[str, float, float]]:
    [scored] = await scorer([_unscored(group)])
    pairs = zip(group.trajectories, scored.trajectories, strict=True)
    return [
        (one.trajectory_id, one.outcome_reward, other.outcome_reward)
        for one, other in pairs
        if not one.stop.is_failure and not isclose(one.outcome_reward, other.outcome_reward, abs_tol=1e-9)
    ]


def find_judge(reward: Any) -> LLMJudge | None:
    """Return a judge that a reward uses, if it can be found in its parts or by the names in its code."""
    seen: set[int] = set()
    waiting: list[Any] = [reward]
    while waiting:
        each = waiting.pop()
        if isinstance(each, LLMJudge):
            return each
        if id(each) not in seen:
            seen.add(id(each))
            waiting += _parts(each)
    return None


def _parts(value: Any) -> Iterable[Any]:
    """The objects that a function, or a container in one, refers to. Modules are not followed."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [*cells, *[each for each in named if not isinstance(each, types.ModuleType | type)]]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    return []


def mean_change(changes: Sequence[Change]) -> tuple[float, float, float, float]:
    """Mean reward before and after, then success before and after."""
    return (
        fmean(each.before for each in changes),
        fmean(each.after for each in changes),
        fmean(each.succeeded for each in changes),
        fmean(each.succeeds for each in changes),
    )
