"""Tasks of the package reasoning-gym: `task: {rows: reasoning_gym, reward: reasoning_gym, flow: single_step, ...}`.

Its generators make the rows, its scorers the reward. Test questions are not trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import count as numbers
from typing import Any

from agent_r1.adapters.require import require
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.types import TaskRow, Trajectory

HOW = "Give your final answer between <answer> and </answer>."
TRAIN_ROWS, TEST_ROWS = 1000, 100  # used if the config does not say
CHUNK = 200  # questions per dataset; a dataset is exhausted if it repeats a whole chunk
SEEDS = 100_000  # seeds of questions per seed of rows: question i of a dataset with seed s has the seed s + i
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def rows(
    split: str,
    count: int | None = None,
    *,
    dataset: str,  # its name in reasoning-gym
    config: Mapping[str, Any] | None = None,  # settings of the dataset
    seed: int = 0,
    held_out: int = 200,  # questions for the other splits, which training leaves out
    how: str = HOW,  # appended to each question
) -> list[TaskRow]:
    """Return rows of the dataset. `count` of a split other than train is at most `held_out`."""
    settings = json.dumps(dict(config or {}), sort_keys=True)
    tests = _distinct(dataset, settings, seed, held_out, leave_out=set())
    if split == "train":
        leave_out = {entry["question"] for entry in tests}
        chosen = _distinct(dataset, settings, seed + 1, TRAIN_ROWS if count is None else count, leave_out=leave_out)
    else:
        wanted = TEST_ROWS if count is None else count
        if wanted > held_out:
            raise ConfigError(f"eval.rows={wanted} is more than task.rows_kwargs.held_out={held_out}: raise held_out")
        chosen = tests[:wanted]
    return [
        TaskRow(
            prompt=[{"role": "user", "content": f"{entry['question']}\n{how}" if how else entry["question"]}],
            row_id=f"{split}-{index}",
            reward_model={
                "ground_truth": entry["answer"],
                "dataset": dataset,
                "config": settings,
                # As JSON, which is what trajectories keep; tuples become lists, as scorers expect them anyway.
                "entry": entry,
            },
            data_source=f"reasoning_gym/{dataset}",
        )
        for index, entry in enumerate(chosen)
    ]


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """The dataset's own score of the text between `<answer>` tags, or of the whole text without them."""
    found = _ANSWER.findall(trajectory.final_text)
    answer = (found[-1] if found else trajectory.final_text).strip()
    scored = row.reward_model
    return float(_dataset(scored["dataset"], scored["config"], 0, 1).score_answer(answer, scored["entry"]))


@cache
def _dataset(name: str, settings: str, seed: int, size: int) -> Any:
    package = require("reasoning_gym", "agent-r1[reasoning-gym]")
    known = package.factory.DATASETS
    if name not in known:
        raise ConfigError(f"task.rows_kwargs.dataset: reasoning-gym has no {name!r}.{did_you_mean(name, known)}")
    try:
        return package.create_dataset(name, seed=seed, size=size, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.rows_kwargs.config={settings} is not accepted by {name!r}: {error}") from error


def _distinct(name: str, settings: str, seed: int, wanted: int, *, leave_out: set[str]) -> list[dict[str, Any]]:
    """Return questions that are not among `leave_out`; fewer if the dataset has no more to offer."""
    found: list[dict[str, Any]] = []
    seen = set(leave_out)
    for chunk in numbers():
        before = len(found)
        for entry in _dataset(name, settings, SEEDS * seed + CHUNK * chunk, CHUNK):
            if len(found) == wanted:
                return found
            if entry["question"] not in seen:
                seen.add(entry["question"])
                found.append(entry)
        if len(found) == before:  # a whole chunk of known ones
            return found
    raise AssertionError("unreachable")
