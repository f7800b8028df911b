"""Train again from the stored episodes of a run, without sampling.

A replay begins at a checkpoint of the run (or at its starting model, from step 1) and feeds the episodes of each step
to the same trainer, whose collecting is replaced by reading. On a CPU it ends at the same weights, bit for bit. Replays
that could not be exact are refused: a missing checkpoint or missing episodes, several ranks, asynchronous runs, runs on
verl, algorithms that compare with a greedy attempt, which is not stored, and another kind of device than the run's.
Other versions of libraries are only reported: they may or may not compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from agent_r1.build.collectors import eval_collector, train_collector
from agent_r1.build.learner import build_learner, rehearse
from agent_r1.build.models.device import device_name
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import Plan
from agent_r1.build.start import base_model, needs_reference, reference_model, starting_model
from agent_r1.build.trainer import trainer_settings
from agent_r1.config import RunConfig
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.reader import RunReader, list_checkpoints
from agent_r1.runs.run_dir import RunDir, present_versions
from agent_r1.runs.trajectories import RecordFile
from agent_r1.tokens.vocabulary import token_texts
from agent_r1.train.checkpoint import load_state
from agent_r1.train.loop import Schedule, train
from agent_r1.train.rng import seed_all
from agent_r1.train.trainer import Progress, Trainer
from agent_r1.types import Group, TaskRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The steps and files of a replay."""

    start: int  # the step after which it begins
    checkpoint: Path | None  # of that step; None: the starting model
    files: Mapping[int, RecordFile]  # the episodes of each step

    @property
    def last(self) -> int:
        return max(self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The weights of a checkpoint of both runs."""

    step: int
    largest_difference: float

    @property
    def is_equal(self) -> bool:
        return self.largest_difference == 0.0


@dataclass(kw_only=True)
class Replayer(Trainer):
    """A trainer that reads what another run played. It evaluates nothing: that would need the engine."""

    files: Mapping[int, RecordFile] = field(default_factory=dict)

    async def collect(self, step: int) -> list[Group]:
        rows = {row.row_id: row for row in self.train_rows}
        return list(_groups(self.files[step], rows))

    async def sync_weights(self, version: int) -> None:
        """Nothing samples."""

    async def evaluate(self, step: int) -> None:
        """Nothing samples."""


def plan_replay(run: RunReader, config: RunConfig, plan: Plan, *, first: int) -> Route:
    """Find the checkpoint and the episodes. Raises ConfigError or DataError if the run cannot be replayed exactly."""
    if config.backend != "local":
        raise ConfigError(f"{run} was trained with backend={config.backend}: only local runs can be replayed")
    if config.trainer.mode != "sync":
        raise ConfigError(
            f"{run} was trained with trainer.mode={config.trainer.mode}: which groups trained when is not kept"
        )
    if (run.path / "rank_1.log").exists():
        raise ConfigError(f"{run} was trained on several ranks, which share out sums differently from one")
    if plan.algorithm.needs_greedy:
        raise ConfigError(f"algorithm {plan.algorithm.name!r} compares with a greedy attempt, which is not stored")
    if first < 1:
        raise ConfigError(f"--from {first}: steps count from 1")
    saved = [(step, path) for step, path in list_checkpoints(run.checkpoints) if step < first]
    if not saved and first > 1:
        kept = ", ".join(str(step) for step, _ in list_checkpoints(run.checkpoints)) or "none"
        raise DataError(
            f"{run} has no checkpoint before step {first} (kept: {kept}). Replay from a later step or from step 1, or "
            "train with trainer.keep_checkpoints=100"
        )
    start, checkpoint = saved[-1] if saved else (0, None)
    if checkpoint is not None and needs_reference(config) and not run.reference.is_dir():
        raise DataError(f"{run.reference} is missing, which this run's KL penalty or adapters need: restore it")
    done = max((int(record["step"]) for record in run.read_metrics("train")), default=0)
    if done <= start:
        raise DataError(f"{run} has no step after checkpoint {start}: there is nothing to replay")
    files = {step: RecordFile(run.trajectories_file("train", step)) for step in range(start + 1, done + 1)}
    if missing := [step for step, file in files.items() if not file.path.exists()]:
        raise DataError(
            f"{run} has no episodes of step {missing[0]}: it was trained with trainer.dump_every="
            f"{config.trainer.dump_every}, or the file was removed"
        )
    return Route(start=start, checkpoint=checkpoint, files=files)


def compare_versions(run: RunReader, config: RunConfig) -> list[str]:
    """What has changed since the run, such as "torch 2.9 -> 2.10". Raises ConfigError for another kind of device."""
    if not run.versions:
        return [f"{run} does not say with which versions it was trained"]
    now = present_versions() | {"device": device_name(config)}
    then = run.versions[-1]
    if (then.get("device", now["device"]) == "cpu") != (now["device"] == "cpu"):
        raise ConfigError(
            f"{run} was trained on {then['device']}, and this would compute on {now['device']}, where sums and number "
            "formats differ: replay it on a machine of the same kind"
        )
    changed = [f"{name} {then[name]} -> {value}" for name, value in now.items() if then.get(name, value) != value]
    starts = [f"the run itself was continued with other versions {len(run.versions) - 1} times"]
    return changed + (starts if len(run.versions) > 1 else [])


async def replay(
    route: Route, source: RunReader, config: RunConfig, plan: Plan, into: RunDir, progress: Progress
) -> list[Comparison]:
    """Train into a new run directory, and compare its checkpoints with those of the run.

    Its metrics have no rollout times, and it evaluates nothing."""
    trainer = await build_replayer(route, source, config, plan, into, progress)
    into.write_tokens(token_texts(trainer.tokenizer))
    save_every = config.trainer.save_every
    schedule = Schedule(start=route.start, steps=route.last, eval_every=route.last, save_every=save_every)
    await train(trainer, schedule, trainer.crew)
    ours = dict(list_checkpoints(into.checkpoints))
    theirs = dict(list_checkpoints(source.checkpoints))
    return [compare_weights(step, theirs[step], ours[step]) for step in sorted(ours.keys() & theirs.keys())]


async def build_replayer(
    route: Route, source: RunReader, config: RunConfig, plan: Plan, into: RunDir, progress: Progress
) -> Replayer:
    seed_all(config.seed)
    if route.checkpoint is None:
        begin = await starting_model(
            config, plan.task, base_model(config), on_update=lambda *_: None, report=progress.note
        )
    else:  # adapters continue on the weights they were added to
        begin = route.checkpoint if config.lora is None else source.reference
    seed_all(config.seed)
    model = load_model(config, begin)
    folder = source.reference if source.reference.is_dir() else into.reference
    reference = reference_model(config, model, folder)
    engine = ScriptedEngine([])
    trainer = Replayer(
        run=into,
        learner=build_learner(config, model, plan.algorithm, reference),
        tokenizer=model.tokenizer,
        input_files=model.input_files,
        engine=engine,
        collector=train_collector(config, plan.task, model.renderer, engine),
        greedy_collector=None,
        eval_collector=eval_collector(config, plan.task, model.renderer, engine),
        scorer=plan.task.scorer,
        progress=progress,
        **trainer_settings(config, plan),
        files=route.files,
    )
    if route.checkpoint is not None:
        await trainer.restore(load_state(route.checkpoint, trainer.learner.ranks))
    progress.note(rehearse(config, trainer.learner))
    return trainer


def _groups(file: RecordFile, rows: Mapping[str, TaskRow]) -> Iterator[Group]:
    """The groups of a step in the order in which they were played."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in file.trajectories():
        found.setdefault(trajectory.row_id, []).append(trajectory)
    for row_id, trajectories in found.items():
        row = rows.get(row_id) or TaskRow(prompt=[], row_id=row_id)  # rewards are stored, so only the row's id matters
        yield Group(row=row, trajectories=trajectories)


def compare_weights(step: int, one: Path, other: Path) -> Comparison:
    """Compare two checkpoints, weight by weight."""
    first, second = _weights(one), _weights(other)
    if first.keys() != second.keys():
        raise DataError(f"{one} and {other} hold different weights: {sorted(first.keys() ^ second.keys())[:3]}")
    largest = 0.0
    for name, tensor in first.items():
        if not torch.equal(tensor, second[name]):
            difference = (tensor.double() - second[name].double()).abs().max().item()
            largest = max(largest, difference) if difference == difference else float("inf")  # NaN
    return Comparison(step=step, largest_difference=largest)


def _weights(checkpoint: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        weights |= load_file(path)
    return weights
