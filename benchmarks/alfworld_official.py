"""The official ALFWorld engine behind a pipe: games and commands in, answers out, one JSON document per line.

    python benchmarks/alfworld_official.py < plays.jsonl      # a Python with textworld and fast-downward-textworld

In:  {"game": the content of a game.tw-pddl, "plays": [[command, ...], ...]}; every play restarts the game.
Out: [[[answer, admissible commands, won], ...], ...]: for every play, after the start and after each command.

It imports nothing of this project, so it can run in a separate environment. Objects get the names of ALFWorld's
`AlfredDemangler`. Slow parts of TextWorld that cannot change an answer run only once: translating a problem, a second
translation that only the planner needs, parsing the same few grammar rules, and deep copies of constant data.
Everything that affects the answers is TextWorld's code.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import fast_downward  # type: ignore[import-not-found]
import textworld.envs.pddl.textgen as textgen  # type: ignore[import-not-found]
from textworld.core import EnvInfos  # type: ignore[import-not-found]
from textworld.envs.pddl import PddlEnv
from textworld.envs.pddl.pddl import pddl_logic  # type: ignore[import-not-found]
from textworld.logic import Rule  # type: ignore[import-not-found]


def spare_repeated_work() -> None:
    translate = functools.lru_cache(maxsize=1)(fast_downward.pddl2sas)

    def pddl2sas(domain: str, problem: str, *, verbose: bool = False, optimize: bool = False) -> Any:
        return (None, "") if optimize else translate(domain, problem)  # the optimized one is for the planner

    fast_downward.pddl2sas = pddl2sas
    textgen._parse_and_convert = _remembered(
        textgen._parse_and_convert, 4096
    )  # copied, because contexts are added to symbols
    pddl_logic._parse_and_convert = _remembered(pddl_logic._parse_and_convert, 64)  # large: whole grammars
    textgen.copy_context = _shallow  # contents of a context are never changed in place
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(Rule.parse_conjunctive_query)


def _remembered(parse: Callable[..., Any], most: int) -> Callable[..., Any]:
    known = functools.lru_cache(maxsize=most)(parse)

    def parsed(*args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(known(*args, **kwargs))

    return parsed


def _shallow(context: dict[str, Any]) -> dict[str, Any]:
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def demangled(ids: Iterable[str]) -> dict[str, str]:
    """ALFWorld's names: the type of an object and a number, counting down in the order of the ids."""
    ordered = sorted(ids)
    kinds = {word: word.split("_bar_", 1)[0] + ("basin" if "basin" in word else "") for word in ordered}
    left = Counter(kind for word, kind in kinds.items() if "_bar_" in word)
    names = {}
    for word in ordered:
        names[word] = f"{kinds[word]} {left[kinds[word]]}" if "_bar_" in word else f"{word} "
        left[kinds[word]] -= 1
    return names


def played(env: Any, game: dict[str, Any], plays: list[list[str]]) -> list[list[list[Any]]]:
    env.load(game)
    names = demangled(env._entity_infos)
    for info in env._entity_infos.values():
        info.name = names[info.id]
    told = []
    for commands in plays:
        state = env.reset()
        said = [[state.feedback, state["admissible_commands"], bool(state["won"])]]
        for command in commands:
            state, _, _ = env.step(command)
            said.append([state.feedback, state["admissible_commands"], bool(state["won"])])
        told.append(said)
    return told


def main() -> None:
    spare_repeated_work()
    env = PddlEnv(EnvInfos(won=True, admissible_commands=True))
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write(json.dumps(played(env, request["game"], request["plays"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
