"""ALFWorld: household tasks in text. Rows, reward and demonstrations; see README.md. `engine.py` has the rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from agent_r1.data.rows import Demo
from agent_r1.errors import DataError
from agent_r1.recipes.alfworld.data import Entry, entries, games_file, load_game
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.expert import Explorer, Priors, learn_priors
from agent_r1.types import TaskRow, Trajectory

MAX_STEPS = 30  # limit of a demonstration, equal to the episode limit of the recipe
GAMES_FOR_PRIORS = 400

_Item = TypeVar("_Item")


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` games of train, valid_train, valid_seen or valid_unseen."""
    file = games_file(path)
    return [as_row(entry, str(file)) for entry in entries(split, file)[:count]]


def as_row(entry: Entry, file: str) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "user", "content": entry.task}],
        row_id=entry.name,
        reward_model={"style": "rule"},
        env_kwargs={"game": entry.name, "world": entry.world},
        data_source=f"alfworld/{entry.task_type}",
        extra_info={"games": file, "task_type": entry.task_type},
    )


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 if the task was done; also report the share of commands without effect."""
    answered = [step.info for step in trajectory.steps if "won" in step.info]  # a truncated episode did not finish
    return {
        "reward": float(bool(answered) and answered[-1]["won"]),
        "refused": sum(info["refused"] for info in answered) / max(1, len(answered)),
    }


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return at most `count` training games with their walkthroughs, written by a planner with full knowledge."""
    return _walked(games_file(path), count, seed)


def explorer_demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return at most `count` training games with the explorer's commands, for games that it solves in time."""
    return _searched(games_file(path), count, seed)


def both_demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return both kinds of demonstrations, half of each, from different games."""
    file = games_file(path)
    mixed = _searched(file, count - count // 2, seed)
    taken = {row.row_id for row, _ in mixed}
    mixed += [demo for demo in _walked(file, count + len(mixed), seed) if demo[0].row_id not in taken][: count // 2]
    return _shuffled(mixed, seed)


def _walked(file: Path, count: int, seed: int) -> list[Demo]:
    chosen = _shuffled(entries("train", file), seed)[:count]
    return [(as_row(entry, str(file)), list(entry.walkthrough)) for entry in chosen]


def _searched(file: Path, count: int, seed: int) -> list[Demo]:
    games, priors = _shuffled(entries("train", file), seed), train_priors(file)
    shown: list[Demo] = []
    for entry in games:
        if len(shown) == count:
            break
        said = explored(World(load_game(str(file), entry.name, entry.world)), priors)
        if said is not None:
            shown.append((as_row(entry, str(file)), said))
    if not shown:
        raise DataError(f"the explorer solves none of {len(games)} games within {MAX_STEPS} steps")
    return shown


def train_priors(file: Path) -> Priors:
    """Learn from some training games where objects are kept."""
    some = entries("train", file)[:GAMES_FOR_PRIORS]
    return learn_priors(load_game(str(file), entry.name, entry.world) for entry in some)


def explored(world: World, priors: Priors, max_steps: int = MAX_STEPS) -> list[str] | None:
    """Return the explorer's commands, or None if it needs more than `max_steps`."""
    explorer, answer, said = Explorer(priors), world.intro, list[str]()
    while not world.won:
        command = explorer.act(answer) if len(said) < max_steps else None
        if command is None:
            return None
        said.append(command)
        answer = world.step(command)
    return said


def _shuffled(items: Sequence[_Item], seed: int) -> list[_Item]:
    order = list(items)
    random.Random(f"demos:{seed}").shuffle(order)
    return order
