"""Read run directories, for viewers, comparisons, replays and tests. Needs no torch, no model, no config.

run = RunReader.open(Path("runs/quickstart-..."))
run.read_metrics("train")[-1]["success"]
file = run.files("eval")[-1]
len(file), file[99_999]["steps"][0]["response_ids"]
run.token_texts([151644, 872])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from agent_r1.data.files import plain_or_gzipped, read_json
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored, shown
from agent_r1.runs.outcomes import EvalRecord
from agent_r1.runs.trajectories import RecordFile, trajectory_files

_CHECKPOINT = re.compile(r"step_(\d+)$")


class RunReader:
    """A run directory, which may still be written to. `str(run)` is its path as a user would type it."""

    def __init__(self, path: Path) -> None:
        self.path = anchored(path)
        self.checkpoints, self.reference = self.path / "checkpoints", self.path / "reference"
        self.evals = self.path / "evals"
        self.log_file = self.path / "run.log"

    @classmethod
    def open(cls, path: Path) -> Self:
        run = cls(path)
        if not (run.path / "config.json").is_file():
            reason = "it has no config.json" if run.path.exists() else "there is no such folder"
            raise ConfigError(f"{path} is not a run directory: {reason}")
        if "recipe" not in run.settings:
            raise ConfigError(f"{path} is not a run directory: its config.json describes a model, not a run")
        return run

    def __str__(self) -> str:
        return shown(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved config of the run, as plain data."""
        path = self.path / "config.json"
        try:
            tree = read_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        return tree if isinstance(tree, dict) else {}

    @property
    def versions(self) -> list[dict[str, str]]:
        """What made the run: one entry per start with other versions. Empty for older runs."""
        path = self.path / "versions.json"
        found: list[dict[str, str]] = read_json(path.read_text(encoding="utf-8")) if path.exists() else []
        return found

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return all records of `metrics.jsonl`, or those of one kind: train, eval, sft or collect."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [record for line in lines if (record := _parse_line(line)) is not None]
        return [record for record in records if kind in (None, record["kind"])]

    def files(self, kind: str = "*") -> list[RecordFile]:
        """Return the files of trajectories in order of their steps, all or of one kind: train or eval."""
        folder = self.path / "trajectories"
        found = trajectory_files(folder, f"{kind}_*") if any(folder.glob(f"{kind}_*.jsonl*")) else []
        return [RecordFile(path) for path in found]

    def trajectories_file(self, kind: str, step: int) -> Path:
        """Return where the trajectories of a step are; older runs compressed them."""
        path = self.path / "trajectories" / f"{kind}_{step:06d}.jsonl"
        return plain_or_gzipped(path) or path

    def evaluations(self) -> dict[str, EvalRecord]:
        """Return the evaluations made by `agent-r1 eval`, by name."""
        return {path.stem: EvalRecord.load(path) for path in sorted(self.evals.glob("*.json"))}

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; see `agent_r1.tokens.vocabulary` for tokens that are parts of a character."""
        known = self._vocabulary
        return [known[token] if 0 <= token < len(known) else "" for token in ids]

    @cached_property
    def _vocabulary(self) -> list[str]:
        path = self.path / "tokens.json"
        if not path.is_file():
            raise DataError(f"{self} has no tokens.json, so the texts of its tokens are not known without its model")
        texts: list[str] = read_json(path.read_text(encoding="utf-8"))
        return texts


def is_run(folder: Path) -> bool:
    """Whether the folder is a run: a model's config.json does not name a recipe, a task and a model."""
    try:
        return {"recipe", "task", "model"} <= RunReader(folder).settings.keys()
    except (OSError, DataError):
        return False


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every complete checkpoint, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _CHECKPOINT.match(path.name))]
    return sorted(found)


def latest_checkpoint(folder: Path) -> tuple[int, Path]:
    found = list_checkpoints(folder)
    if not found:
        raise DataError(f"no checkpoint under {folder}: the run was stopped before its first save")
    return found[-1]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = read_json(line)
    except ValueError:
        return None  # the last line of a killed run, cut off; resuming repeats that step
    return record
