"""Parse one ALFWorld game from its PDDL problem: objects with their names, facts, and the goal.

The released files (`game.tw-pddl`) share one PDDL domain and one text grammar; they differ in the problem and in the
task sentence. `engine.py` implements the domain and the grammar; this module reads the problem.

Objects and receptacles ("things") are numbers: positions in the alphabetical order of the PDDL ids, in which the
official engine lists them. Locations are numbered separately.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agent_r1.errors import DataError

Facts = Mapping[str, Sequence[tuple[str, ...]]]  # predicate -> arguments of each fact, lower-cased as PDDL reads them

NAME_ENDS = "_bar_"  # mug_bar__minus_01_dot_28...: the part before it is the common name
STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "toggled"}
_Item = TypeVar("_Item", int, str)
_ATOM = re.compile(r"\(\s*([a-z_]+)((?:\s+[^\s()]+)+)\s*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An object of `object_type` in a receptacle of `receptacle_type` or, with `lamp_type`, held next to such a
    lamp."""

    object_type: str
    receptacle_type: str = ""
    lamp_type: str = ""
    ability: str = ""  # required property of the object ...
    state: str = ""  # ... and required state
    count: int = 1  # number of objects in one receptacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    task: str  # "Your task is to: ..."
    goal: Goal
    names: tuple[str, ...]  # names of things, by number
    types: Mapping[int, str]  # types of objects and receptacles: mugtype, sinkbasintype
    location_of: Mapping[int, int]  # locations of receptacles, in the order of their numbers
    receptacles_at: Mapping[int, tuple[int, ...]]  # receptacles by location
    abilities: Mapping[str, frozenset[int]]  # openable, pickupable, cleanable, ... -> things
    fits: frozenset[tuple[str, str]]  # (receptacle type, object type): may be put there
    nested: Mapping[int, tuple[int, ...]]  # contents of objects such as bowls; never changes
    routes: Mapping[str, int]  # "go to desk 1" -> receptacle
    start: int  # location
    contents: Mapping[int, tuple[int, ...]]  # contents of receptacles at the start
    lying: Mapping[int, frozenset[int]]  # objects by recorded location, at the start
    states: Mapping[int, frozenset[str]]  # states of objects at the start: a potato from the fridge is cool


def read_game(problem: str, task: str) -> Game:
    """Parse a PDDL problem. Raises `DataError` if it needs rules that the engine does not implement."""
    facts, goal = _read_facts(problem), _read_goal(problem)
    ids = sorted({word for arguments in facts.values() for fact in arguments for word in fact})
    things = [word for word in ids if NAME_ENDS in word and not word.startswith(f"loc{NAME_ENDS}")]
    number = {word: index for index, word in enumerate(things)}
    places = {word: index for index, word in enumerate(w for w in ids if w.startswith(f"loc{NAME_ENDS}"))}

    def of(predicate: str) -> list[list[int]]:
        """Return a predicate's facts as numbers of things and locations."""
        return [[number[w] if w in number else places[w] for w in fact] for fact in facts.get(predicate, ())]

    if len(of_agent := facts.get("atlocation", ())) != 1 or "holds" in facts or "opened" in facts:
        raise DataError(f"a game starts with one agent, empty hands and closed doors; this one with {of_agent[:3]}")
    names = _names(things)
    location_of = dict(sorted((receptacle, place) for receptacle, place in of("receptacleatlocation")))
    types = {number[thing]: kind for name in ("objecttype", "receptacletype") for thing, kind in facts.get(name, ())}
    return Game(
        task=task,
        goal=goal,
        names=names,
        types=types,
        location_of=location_of,
        receptacles_at=_grouped((place, receptacle) for receptacle, place in location_of.items()),
        abilities={name: frozenset(thing for (thing,) in of(name)) for name in ABILITIES},
        fits=frozenset((receptacle, thing) for receptacle, thing in facts.get("cancontain", ())),
        nested=_grouped((outer, inner) for inner, outer in of("inreceptacleobject")),
        routes={f"go to {names[receptacle]}": receptacle for receptacle in location_of},
        start=places[of_agent[0][1]],
        contents=_grouped((receptacle, thing) for thing, receptacle in of("inreceptacle")),
        lying={place: frozenset(group) for place, group in _grouped((p, t) for t, p in of("objectatlocation")).items()},
        states={
            thing: frozenset(group)
            for thing, group in _grouped((t, state) for fact, state in STATES.items() for (t,) in of(fact)).items()
        },
    )


ABILITIES = (
    "openable", "pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "isreceptacleobject",
)  # fmt: skip
_PLACE = r"\(:goal \(and \(exists \(\?r - receptacle\) \(exists "
_GOALS = {
    "pick_and_place_simple": re.compile(
        _PLACE + r"\(\?o - object\) \(and \(inreceptacle \?o \?r\) "
        r"\(objecttype \?o (?P<object>\w+)\) \(receptacletype \?r (?P<receptacle>\w+)\) \) \) \) \) \)"
    ),
    **{
        f"pick_{verb}_then_place_in_recep": re.compile(
            _PLACE + rf"\(\?o - object\) \(and \((?P<ability>{verb}able) \?o\) \(objecttype \?o (?P<object>\w+)\) "
            rf"\(receptacletype \?r (?P<receptacle>\w+)\) \((?P<state>{state}) \?o\) \(inreceptacle \?o \?r\) "
            r"\) \) \) \) \)"
        )
        for verb, state in (("clean", "isclean"), ("heat", "ishot"), ("cool", "iscool"))
    },
    "pick_two_obj_and_place": re.compile(
        _PLACE + r"\(\?o1 - object\) \(and \(objecttype \?o1 (?P<object>\w+)\) "
        r"\(receptacletype \?r (?P<receptacle>\w+)\) \(inreceptacle \?o1 \?r\) \(exists \(\?o2 - object\) \(and "
        r"\(not \(= \?o1 \?o2\)\) \(objecttype \?o2 (?P=object)\) \(receptacletype \?r (?P=receptacle)\) "
        r"\(inreceptacle \?o2 \?r\) \) \) \) \) \) \) \)"
    ),
    "look_at_obj_in_light": re.compile(
        r"\(:goal \(and \(exists \(\?ot - object \?r - receptacle \?a - agent \?l - location\) \(and "
        r"\(objecttype \?ot (?P<lamp>\w+)\) \(toggleable \?ot\) \(istoggled \?ot\) \(receptacleatlocation \?r \?l\) "
        r"\(atlocation \?a \?l\) \(inreceptacle \?ot \?r\) \) \) \(exists \(\?o - object \?a - agent\) \(and "
        r"\(objecttype \?o (?P<object>\w+)\) \(holds \?a \?o\) \) \) \) \)"
    ),
}
TASK_TYPES = tuple(_GOALS)


def _read_goal(problem: str) -> Goal:
    _, mark, rest = " ".join(problem.lower().split()).partition("(:goal ")
    for task_type, pattern in _GOALS.items():
        if found := pattern.match(mark + rest):
            parts = found.groupdict(default="")
            return Goal(
                object_type=parts["object"],
                receptacle_type=parts.get("receptacle", ""),
                lamp_type=parts.get("lamp", ""),
                ability=parts.get("ability", ""),
                state=STATES[parts["state"]] if "state" in parts else "",
                count=2 if task_type == "pick_two_obj_and_place" else 1,
            )
    raise DataError(f"the goal is not one of the six kinds: {(mark + rest)[:300]!r}")


def _read_facts(problem: str) -> Facts:
    lowered = problem.lower()
    begin, end = lowered.find("(:init"), lowered.find("(:goal")
    if begin < 0 or end < begin:
        raise DataError(f"not a PDDL problem with :init and :goal: {problem[:80]!r}")
    facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for predicate, arguments in _ATOM.findall(lowered, begin, end):
        facts[predicate].append(tuple(arguments.split()))
    return facts


def _names(things: Sequence[str]) -> tuple[str, ...]:
    """Return display names. Numbers count down from the highest, in the order of the ids."""
    # A sink's basin is a separate receptacle next to the sink.
    kinds = [word.split(NAME_ENDS)[0] + ("basin" if "basin" in word else "") for word in things]
    left, names = Counter(kinds), []
    for kind in kinds:
        names.append(f"{kind} {left[kind]}")
        left[kind] -= 1
    return tuple(names)


def _grouped(pairs: Iterable[tuple[int, _Item]]) -> dict[int, tuple[_Item, ...]]:
    """Remove duplicates, keeping the order."""
    groups: dict[int, set[_Item]] = defaultdict(set)
    for key, item in pairs:
        groups[key].add(item)
    return {key: tuple(sorted(group)) for key, group in groups.items()}
