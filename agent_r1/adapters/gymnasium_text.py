"""Gymnasium's environments as text: render observations, and find the action that a response names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.errors import ConfigError

Render = Callable[[Any, Any, dict[str, Any]], str]  # env, observation, info -> text


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How an environment is put into words."""

    rules: str
    render: Render
    actions: tuple[str, ...]  # names of the actions 0, 1, ...


def frozen_lake(env: Any, observation: Any, info: dict[str, Any]) -> str:
    row, column = divmod(int(observation), env.unwrapped.ncol)
    rows = [[cell.decode() for cell in line] for line in env.unwrapped.desc]
    rows[row][column] = "P"
    return "\n".join("".join(line) for line in rows)


def taxi(env: Any, observation: Any, info: dict[str, Any]) -> str:
    row, column, passenger, destination = map(int, env.unwrapped.decode(int(observation)))
    names = "RGYB"
    waits = "in the taxi" if passenger == len(names) else f"at {names[passenger]}"
    city = [[cell.decode() for cell in line] for line in env.unwrapped.desc]
    city[row + 1][2 * column + 1] = "T"
    drawn = "\n".join("".join(line) for line in city)
    return (
        f"{drawn}\nThe taxi T is in row {row}, column {column}. The passenger is {waits} and wants to go to "
        f"{names[destination]}."
    )


def blackjack(env: Any, observation: Any, info: dict[str, Any]) -> str:
    total, dealer, ace = map(int, observation)
    return f"You have {total}{', with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."


def plain(env: Any, observation: Any, info: dict[str, Any]) -> str:
    return str(observation)


WORDS = {  # by name of the environment, without its version
    "FrozenLake": Words(
        rules="You are P on a frozen lake. Walk from S to G over frozen ground F without falling into a hole H.",
        render=frozen_lake,
        actions=("left", "down", "right", "up"),
    ),
    "Taxi": Words(
        rules="You drive a taxi. Pick the passenger up at R, G, Y or B and drop them off at their destination. | is a "
        "wall, : can be crossed. Row 0, column 0 is at the top left: R is at 0, 0, G at 0, 4, Y at 4, 0 and B at 4, 3.",
        render=taxi,
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "Blackjack": Words(
        rules="You play blackjack against a dealer. Get closer to 21 than the dealer, but not above.",
        render=blackjack,
        actions=("stick", "hit"),
    ),
}


def read_action(said: str, actions: Sequence[str]) -> int | None:
    """Return the action that a text names: alone on its last line, or as the only one in the text."""
    names = [name.lower() for name in actions]
    lines = [line for line in said.lower().splitlines() if line.strip()]
    last = lines[-1].strip(" \t.!\"'`*<>[]()") if lines else ""
    if last in names:
        return names.index(last)
    for text in (last, said.lower()):
        found = {index for index, name in enumerate(names) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)}
        if len(found) == 1:
            return found.pop()
    return None


def check_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Raise ConfigError unless there is one distinct name for each action."""
    if len(names) != count or len({str(name).lower() for name in names}) != count:
        raise ConfigError(f"env_kwargs.actions={list(names)} must be {count} different names, one per action")
    return tuple(map(str, names))
