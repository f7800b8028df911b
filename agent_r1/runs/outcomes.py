"""Evaluations as files: what was evaluated and how, on which rows, and the outcome of each row.

`agent-r1 eval` writes them, `agent-r1 compare` reads them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock

from agent_r1 import __version__
from agent_r1.data.files import dump_json, read_json
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.statistics import standard_error
from agent_r1.runs.trajectories import JSON_ERRORS, as_floats
from agent_r1.types import Trajectory

FORMAT = 1  # format of the files
NOT_RECORDED = "not recorded"
Outcomes = dict[str, dict[str, float]]  # row id -> measure -> mean over the attempts at that row

# The settings that an evaluation depends on, by section of the config.
_SETTINGS = {
    "eval": ("samples", "temperature", "top_p", "top_k"),
    "rollout": ("max_steps", "max_response_tokens", "max_context_tokens", "episode_seconds"),
    "task": ("success_reward", "reward", "reward_seconds", "flow", "env", "env_kwargs", "tools", "tool_kwargs"),
    "model": ("chat_template", "template_kwargs", "dtype"),
}
_ABSENT_IF_NONE = ("context", "workers", "roles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of an evaluation: everything that its numbers depend on, except code and data files."""

    model: str
    recipe: str
    split: str
    panel: str  # hash of the rows
    seed: int
    settings: Mapping[str, Any]  # settings of sampling, of an episode's limits and of the environment

    @classmethod
    def of(cls, run: Mapping[str, Any], *, model: str, panel: str, dtype: str | None = None) -> Subject:
        """`run` is the content of a `config.json`; `dtype` is the resolved number format, if `run` says auto."""
        settings = {
            name: run[section][name] for section, names in _SETTINGS.items() for name in names if name in run[section]
        }
        if dtype is not None:
            settings["dtype"] = dtype
        if (workers := run["task"].get("workers")) is not None:  # the limits matter, not the number of processes
            settings["workers"] = {name: value for name, value in workers.items() if name != "processes"}
        limits = {name: role.get("max_response_tokens") for name, role in run["rollout"].get("roles", {}).items()}
        if any(limits.values()):  # the temperatures of roles apply in training only
            settings["roles"] = {name: {"max_response_tokens": limit} for name, limit in limits.items() if limit}
        context = run.get("context", {"policy": "append"})
        # Defaults are left out, so that older records, which do not have them, compare equal.
        shown = {name: value for name, value in context.items() if name != "demo_summary"}
        if shown.get("reasoning") is None:
            shown.pop("reasoning", None)
        if shown != {"policy": "append"}:
            settings["context"] = shown
        return cls(
            model=model,
            recipe=run["recipe"],
            split=run["task"]["test_split"],
            panel=panel,
            seed=run["seed"],
            settings=settings,
        )

    def setting(self, name: str) -> Any:
        """Return a setting for people; older records lack some."""
        return self.settings.get(name, None if name in _ABSENT_IF_NONE else NOT_RECORDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """An evaluation: what was evaluated, its metrics, and the outcomes of every row."""

    subject: Subject
    time: float = field(default_factory=lambda: round(time.time(), 3))
    version: str = __version__  # version of the code
    metrics: dict[str, float]
    outcomes: Outcomes

    @property
    def measures(self) -> list[str]:
        """Return success, reward, and the named parts of the reward."""
        return list(next(iter(self.outcomes.values())))

    def column(self, measure: str) -> list[float]:
        """Return one number per row, in the order of row ids."""
        return [self.outcomes[row][measure] for row in sorted(self.outcomes)]

    def mean_and_error(self, measure: str) -> tuple[float, float]:
        values = self.column(measure)
        return fmean(values), standard_error(values)

    def save(self, path: Path) -> None:
        record = asdict(self)
        text = dump_json({"format": FORMAT, **record.pop("subject"), **record}, indent=1)
        with write_atomically(path) as part:
            part.write_text(text + "\n", encoding="utf-8", errors=JSON_ERRORS)

    @classmethod
    def load(cls, path: Path) -> EvalRecord:
        try:
            record = read_json(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ValueError(f"it has format {record['format']}, but this version reads {FORMAT}")
            if not record["outcomes"]:
                raise ValueError("it has no rows")
            subject = Subject(**{item.name: record[item.name] for item in fields(Subject)})
            rest = {item.name: record[item.name] for item in fields(cls) if item.name != "subject"}
            rest["metrics"] = as_floats(rest["metrics"])
            rest["outcomes"] = {row: as_floats(measured) for row, measured in rest["outcomes"].items()}
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is not an evaluation: {type(error).__name__}: {error}") from error
        return cls(subject=subject, **rest)


def is_success(trajectory: Trajectory, success_reward: float) -> bool:
    return not trajectory.stop.is_failure and trajectory.outcome_reward >= success_reward


def row_outcomes(attempts: Mapping[str, Sequence[Trajectory]], *, success_reward: float) -> Outcomes:
    """Return outcomes by row id. Failed episodes count as 0 in every measure, as does a part that a reward left out."""
    parts = sorted({part for row in attempts.values() for t in row for part in t.reward_components} - {"reward"})

    def outcome(episodes: Sequence[Trajectory]) -> dict[str, float]:
        played = [trajectory for trajectory in episodes if not trajectory.stop.is_failure]
        measured = {
            "success": [float(is_success(t, success_reward)) for t in played],
            "reward": [t.total_reward for t in played],
            **{f"reward_part/{part}": [t.reward_components.get(part, 0.0) for t in played] for part in parts},
        }
        return {name: fmean([*values, *[0.0] * (len(episodes) - len(played))]) for name, values in measured.items()}

    return {row_id: outcome(episodes) for row_id, episodes in attempts.items()}


def by_row(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    attempts: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        attempts.setdefault(trajectory.row_id, []).append(trajectory)
    return attempts


def eval_file(folder: Path, subject: Subject, *, name: str | None, stem: str) -> Path:
    """Return the file of an evaluation: `name`, or the first free name that starts with `stem`.

    Repeating an evaluation replaces its file; a different evaluation is never overwritten.
    """
    if name is not None and not re.fullmatch(r"[\w.\-]*\w[\w.\-]*", name):
        raise ConfigError(f"--name {name!r}: use letters, digits, '.', '-' and '_'")
    names = chain([stem], (f"{stem}-{number}" for number in count(2))) if name is None else [name]
    for path in (folder / f"{each}.json" for each in names):
        if not path.exists() or EvalRecord.load(path).subject == subject:
            return path
    raise ConfigError(f"{path} holds a different evaluation: choose another --name, or remove it")


def keep(record: EvalRecord, folder: Path, *, stem: str) -> Path:
    """Save the record under `stem`, or with a number appended if that was taken while the evaluation ran."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        path = eval_file(folder, record.subject, name=None, stem=stem)
        record.save(path)
    return path


def stem_of(model: str) -> str:
    """Return the last part of a path or hub id as a file name."""
    return re.sub(r"[^\w.\-]+", "-", Path(model).name).strip("-.") or "model"
