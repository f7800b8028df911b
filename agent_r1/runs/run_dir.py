"""The run directory: the interface between programs.

    config.json                      the resolved description of the run
    metrics.jsonl                    one object per step (of training, of a warm start, of collecting) and evaluation
    trajectories/train_000012.jsonl.gz, eval_000010.jsonl.gz
    checkpoints/step_000010/         Hugging Face format plus trainer state
    reference/                       the policy before its first step, where a KL penalty or adapters need it
    evals/NAME.json                  evaluations made afterwards, row by row
    curve.png  run.log

Other programs and tests read these files, never log lines.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from agent_r1.config import RunConfig, parse_config, recipe_name
from agent_r1.data.files import read_json
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored, shown
from agent_r1.runs.records import Advantages, write_groups
from agent_r1.types import Group

if TYPE_CHECKING:
    from agent_r1.runs.metrics import Metrics

_CHECKPOINT = re.compile(r"step_(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found, before it is written."""

    metrics: Metrics
    groups: list[Group]
    panel: str  # hash of the rows; numbers on different panels cannot be compared


class RunDir:
    """A run directory. `str(run)` is its path as a user would type it."""

    def __init__(self, path: Path) -> None:
        self.path = anchored(path)
        self._lock: FileLock | None = None  # taken by `create`, held until the end of the first `locked`

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDir:
        """Create a run directory. One whose run produced nothing may be reused.

        The directory stays locked from here to the end of the first `locked`, so a run that has just begun is safe.
        """
        run, path = cls(path), anchored(path)
        taken = ConfigError(
            f"{run} already holds a run; choose another folder, or continue a training run with agent-r1 train "
            f"--resume {run}"
        )
        if _is_described(path) and not is_run(path):  # a model: nothing of ours belongs there
            raise taken
        path.mkdir(parents=True, exist_ok=True)
        held = run._acquire()
        try:
            if _is_described(path) and not (is_run(path) and run.is_bare()):  # another may have come first
                raise taken
            shutil.rmtree(run.reference, ignore_errors=True)  # of the start before
            run.update_config(config)
        except BaseException:
            held.release()
            raise
        run._lock = held
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        run = cls(path)
        if not (run.path / "config.json").is_file():
            lacks = "it has no config.json" if run.path.exists() else "there is no such folder"
            raise ConfigError(f"{path} is not a run directory: {lacks}")
        if "recipe" not in run._description():
            raise ConfigError(f"{path} is not a run directory: its config.json describes a model, not a run")
        return run

    @property
    def config(self) -> RunConfig:
        return parse_config(self._description())

    def update_config(self, config: RunConfig) -> None:
        """Describe the run anew, for example with more steps."""
        with write_atomically(self.path / "config.json") as part:
            part.write_text(config.model_dump_json(indent=2), encoding="utf-8")

    def is_bare(self) -> bool:
        """Nothing was measured, played or trained."""
        kept = ("checkpoints", "trajectories", "evals")
        return not self.read_metrics() and not any(any((self.path / name).glob("*")) for name in kept)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For the time of writing: two programs in one run directory would mix up their numbers."""
        held, self._lock = self._lock or self._acquire(), None
        try:
            yield
        finally:
            held.release()

    def _acquire(self) -> FileLock:
        held = FileLock(self.path / ".lock", thread_local=False)
        try:
            held.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(f"another process is writing to {self}; wait for it or stop it") from error
        return held

    def _description(self) -> dict[str, Any]:
        path = self.path / "config.json"
        try:
            tree = read_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        if not isinstance(tree, dict):
            return {}
        if isinstance(lora := tree.get("lora"), dict) and lora.get("dropout") == 0:
            del lora["dropout"]  # it could be set once, to nothing but this
        return tree

    def __str__(self) -> str:
        return shown(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    @property
    def evals(self) -> Path:
        return self.path / "evals"

    @property
    def log_file(self) -> Path:
        return self.path / "run.log"

    def append_metrics(self, kind: str, step: int, metrics: Mapping[str, float], *, panel: str | None = None) -> None:
        """`kind` is "train", "eval" (with the hash of its rows), "sft" or "collect". One write per line, so a kill
        leaves at most one torn line at the end."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        rows = {} if panel is None else {"panel": panel}
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **rows, **finite}
        line = json.dumps(record, allow_nan=False) + "\n"
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [record for line in lines if (record := _parse_line(line)) is not None]
        return [record for record in records if kind in (None, record["kind"])]

    def forget_after(self, step: int) -> None:
        """Drop metrics and trajectories of later steps, and an evaluation of this step whose episodes are missing. A
        resumed run repeats them."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        if not self.trajectories_file("eval", step).exists():
            kept = [record for record in kept if (record["kind"], record["step"]) != ("eval", step)]
        with write_atomically(self.path / "metrics.jsonl") as part:
            lines = [json.dumps(record, allow_nan=False) + "\n" for record in kept]
            part.write_text("".join(lines), encoding="utf-8")
        for path in (self.path / "trajectories").glob("*_*.jsonl.gz"):
            number = path.name.split(".")[0].rpartition("_")[2]
            if number.isdigit() and int(number) > step:
                path.unlink()

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the episodes first: once the metrics exist, the evaluation is complete and is not repeated."""
        self.write_trajectories("eval", step, evaluation.groups)
        self.append_metrics("eval", step, evaluation.metrics, panel=evaluation.panel)

    def trajectories_file(self, kind: str, step: int) -> Path:
        return self.path / "trajectories" / f"{kind}_{step:06d}.jsonl.gz"

    def write_trajectories(
        self, kind: str, step: int, groups: Iterable[Group], advantages: Advantages | None = None
    ) -> Path:
        path = self.trajectories_file(kind, step)
        write_groups(path, groups, advantages)
        return path


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every complete checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _CHECKPOINT.match(path.name))]
    return sorted(found)


def latest_checkpoint(folder: Path) -> tuple[int, Path]:
    found = list_checkpoints(folder)
    if not found:
        raise DataError(f"no checkpoint under {folder}: the run was stopped before its first save")
    return found[-1]


def is_run(folder: Path) -> bool:
    """Models have a config.json too, but only a run's says which recipe is played with which model."""
    try:
        described = read_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and {"recipe", "task", "model"} <= described.keys()


def _is_described(folder: Path) -> bool:
    return (folder / "config.json").exists()


def new_run_path(config: RunConfig, root: Path = Path("runs"), *, suffix: str = "") -> Path:
    """A folder that was made just now: of two programs that start in the same second, each gets its own."""
    stem = f"{recipe_name(config.recipe)}-{time.strftime('%Y%m%d-%H%M%S')}-seed{config.seed}"
    root = anchored(root)
    root.mkdir(parents=True, exist_ok=True)  # not below: where it cannot be, no other number helps
    number = 1
    while True:
        path = root / f"{stem}{f'-{number}' if number > 1 else ''}{suffix}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = read_json(line)
    except ValueError:
        return None  # the torn last line of a killed run; resuming makes that step again
    return record
