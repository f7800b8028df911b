"""The run directory: the interface between programs.

    config.json                      the resolved config of the run
    versions.json                    of agent-r1, Python and libraries: one object per start with other versions
    metrics.jsonl                    one object per step (of training, a warm start, collecting) and evaluation
    trajectories/train_000012.jsonl  one trajectory per line, with an index; also eval_000010.jsonl
    tokens.json                      the text of every token id
    checkpoints/step_000010/         Hugging Face format plus trainer state
    reference/                       the policy before its first step, if a KL penalty or adapters need it
    evals/NAME.json                  evaluations made later, row by row
    trackers.json                    the id of the run in each of its trackers
    curve.png  run.log  rank_1.log   logs: of the run, and of each further rank

Other programs and tests read these files with `reader.py`, never log lines. This module writes them.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

from filelock import FileLock, Timeout
from pydantic import BaseModel

from agent_r1 import __version__
from agent_r1.data.files import dump_json
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError
from agent_r1.places import anchored
from agent_r1.runs.reader import RunReader, is_run
from agent_r1.runs.trajectories import JSON_ERRORS, Numbers, write_groups
from agent_r1.types import Group

if TYPE_CHECKING:
    from agent_r1.runs.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, before it is written."""

    metrics: Metrics
    groups: list[Group]
    panel: str  # hash of the rows; numbers on different rows cannot be compared


class RunDir(RunReader):
    """A run directory open for writing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock: FileLock | None = None  # acquired by `create`, released by the first `locked()` block

    @classmethod
    def create(cls, path: Path, config: BaseModel) -> Self:
        """Create a run directory. One whose run produced nothing may be reused.

        It stays locked until the end of the first `locked`, so no other process takes over a run that just began.
        """
        run = cls(path)
        run._check_free()  # before a lock file is left in a model's directory
        _make_folder(run.path)
        held = run._acquire()
        try:
            run._check_free()  # another process may have been first
            shutil.rmtree(run.reference, ignore_errors=True)
            for name in ("tokens.json", "trackers.json", "versions.json"):
                (run.path / name).unlink(missing_ok=True)
            run.record_versions()
            run.update_config(config)
        except BaseException:
            held.release()
            raise
        run._lock = held
        return run

    def _check_free(self) -> None:
        if (self.path / "config.json").exists() and not (is_run(self.path) and self.is_bare()):
            raise ConfigError(
                f"{self} already holds a run or a model; choose another folder, or continue a training run with "
                f"agent-r1 train --resume {self}"
            )

    def is_bare(self) -> bool:
        """Whether nothing was measured, played or trained yet."""
        kept = ("checkpoints", "trajectories", "evals")
        return not self.read_metrics() and not any(any((self.path / name).glob("*")) for name in kept)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock while writing: two programs in one run directory would mix up their numbers."""
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

    def update_config(self, config: BaseModel) -> None:
        """Replace the config, for example with one that trains more steps."""
        with write_atomically(self.path / "config.json") as part:
            part.write_text(config.model_dump_json(indent=2), encoding="utf-8")

    def record_versions(self, **more: str) -> None:
        """Add the versions of the code in use, unless they are those of the last start, and `more` once it is known."""
        now, path = present_versions() | more, self.path / "versions.json"
        before = self.versions
        last = before[-1] if before else {}
        if not now.items() <= last.items():
            kept = before[:-1] if last.items() <= now.items() else before
            with write_atomically(path) as part:
                part.write_text(json.dumps([*kept, now], indent=2), encoding="utf-8")

    def write_tokens(self, texts: Sequence[str]) -> None:
        """Keep the text of every token id, so that readers need no tokenizer."""
        with write_atomically(self.path / "tokens.json") as part:
            part.write_text(dump_json(texts), encoding="utf-8", errors=JSON_ERRORS)

    def append_metrics(self, kind: str, step: int, metrics: Mapping[str, float], *, panel: str | None = None) -> None:
        """Append a record. `kind` is "train", "eval" (with the hash of its rows), "sft" or "collect". Each line is a
        single write, so a kill leaves at most one incomplete line at the end."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        rows = {} if panel is None else {"panel": panel}
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **rows, **finite}
        line = json.dumps(record, allow_nan=False) + "\n"
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def write_trajectories(
        self, kind: str, step: int, groups: Iterable[Group], numbers: Mapping[str, Numbers] | None = None
    ) -> Path:
        path = self.path / "trajectories" / f"{kind}_{step:06d}.jsonl"
        write_groups(path, groups, numbers)
        return path

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the episodes first: once the metrics exist, the evaluation is complete and is not repeated."""
        self.write_trajectories("eval", step, evaluation.groups)
        self.append_metrics("eval", step, evaluation.metrics, panel=evaluation.panel)

    def forget_after(self, step: int) -> None:
        """Drop metrics and trajectories of later steps, and an evaluation of this step whose episodes are missing. A
        resumed run repeats them."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        if not self.trajectories_file("eval", step).exists():
            kept = [record for record in kept if (record["kind"], record["step"]) != ("eval", step)]
        with write_atomically(self.path / "metrics.jsonl") as part:
            lines = [json.dumps(record, allow_nan=False) + "\n" for record in kept]
            part.write_text("".join(lines), encoding="utf-8")
        for path in (self.path / "trajectories").glob("*_*.jsonl*"):
            number = path.name.split(".")[0].rpartition("_")[2]
            if number.isdigit() and int(number) > step:
                path.unlink()


def present_versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"agent-r1": __version__, "python": platform.python_version(), **libraries}


def new_run_path(name: str, *, seed: int, suffix: str = "", root: Path = Path("runs")) -> Path:
    """Create and return a new folder; programs that start in the same second get different ones."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    root = anchored(root)
    _make_folder(root)  # outside the loop: if the root cannot be created, another number does not help
    for number in count(1):
        path = root / f"{stem}{f'-{number}' if number > 1 else ''}{suffix}"
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder {path}: {error.strerror}; choose another run directory") from error
