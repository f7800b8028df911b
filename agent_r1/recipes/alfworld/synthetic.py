"""Synthetic games for tests and the tiny preset: one small kitchen, objects in random places, all six kinds of task.

They are written as PDDL problems, like the released ones, and read by the same parser.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.alfworld.data import Entry, short_hash
from agent_r1.recipes.alfworld.engine import TREATMENTS, World
from agent_r1.recipes.alfworld.env import AlfWorld
from agent_r1.recipes.alfworld.expert import learn_priors
from agent_r1.recipes.alfworld.game import TASK_TYPES, Game, read_game
from agent_r1.recipes.alfworld.task import as_row, explored
from agent_r1.types import TaskRow

Fact = tuple[str, ...]

NUM_ROWS = {"train": 240, "test": 60}
RECEPTACLES = ("CounterTop", "Cabinet", "Desk", "Fridge", "Microwave", "SinkBasin")
OPENABLE = ("Cabinet", "Fridge", "Microwave")
THINGS = ("Apple", "Cup", "Mug")  # two of each
SENTENCES = {
    "pick_and_place_simple": "put some {thing} on {place}.",
    "pick_clean_then_place_in_recep": "put a clean {thing} in {place}.",
    "pick_heat_then_place_in_recep": "put a hot {thing} in {place}.",
    "pick_cool_then_place_in_recep": "put a cool {thing} in {place}.",
    "pick_two_obj_and_place": "put two {thing} in {place}.",
    "look_at_obj_in_light": "look at {thing} under the desklamp.",
}
SIGNATURES = {  # types of a fact's arguments; objects for predicates that are not listed
    "atLocation": ("agent", "location"),
    "receptacleType": ("receptacle", "rtype"),
    "receptacleAtLocation": ("receptacle", "location"),
    "openable": ("receptacle",),
    "canContain": ("rtype", "otype"),
    "inReceptacle": ("object", "receptacle"),
    "objectAtLocation": ("object", "location"),
    "objectType": ("object", "otype"),
}
_ALWAYS = {
    **dict.fromkeys(("SinkType", "SinkBasinType", "MicrowaveType", "FridgeType"), "rtype"),
    **dict.fromkeys(("KnifeType", "ButterKnifeType"), "otype"),
}
_PLACED = """(:goal (and (exists (?r - receptacle) (exists (?o - object) (and {before} (objectType ?o {thing}Type)
    (receptacleType ?r {place}Type) {after} ) ) ) ) )"""
_TREATED = {"clean": "isClean", "heat": "isHot", "cool": "isCool"}
GOALS = {
    "pick_and_place_simple": _PLACED.replace("{before}", "(inReceptacle ?o ?r)").replace("{after}", ""),
    **{
        f"pick_{verb}_then_place_in_recep": _PLACED.replace("{before}", f"({verb}able ?o)").replace(
            "{after}", f"({state} ?o) (inReceptacle ?o ?r)"
        )
        for verb, state in _TREATED.items()
    },
    "pick_two_obj_and_place": """(:goal (and (exists (?r - receptacle) (exists (?o1 - object) (and
        (objectType ?o1 {thing}Type) (receptacleType ?r {place}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and
        (not (= ?o1 ?o2)) (objectType ?o2 {thing}Type) (receptacleType ?r {place}Type) (inReceptacle ?o2 ?r)
        ) ) ) ) ) ) )""",
    "look_at_obj_in_light": """(:goal (and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and
        (objectType ?ot DeskLampType) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
        (inReceptacle ?ot ?r) ) ) (exists (?o - object ?a - agent) (and (objectType ?o {thing}Type) (holds ?a ?o)
        ) ) ) )""",
}


def write_problem(facts: Sequence[Fact], goal: str) -> str:
    """Write a PDDL problem, complete enough for the official engine to read."""
    types = dict(_ALWAYS)
    for predicate, *words in facts:
        types |= zip(words, SIGNATURES.get(predicate, ("object", "object")), strict=False)
    objects = " ".join(f"{word} - {kind}" for word, kind in types.items())
    init = " ".join(f"({' '.join(fact)})" for fact in facts)
    return f"(define (problem made) (:domain alfred) (:objects {objects}) (:init {init}) {goal})"


def kitchen(places: Mapping[str, str]) -> list[Fact]:
    """Return the facts of the room, with every object (Mug_bar_1) in its receptacle from `places`."""
    facts: list[Fact] = [("atLocation", "agent1", "loc_bar_0")]
    for number, kind in enumerate(RECEPTACLES, start=1):
        receptacle, location = receptacle_id(kind), f"loc_bar_{number}"
        facts += [("receptacleType", receptacle, f"{kind}Type"), ("receptacleAtLocation", receptacle, location)]
        facts += [("openable", receptacle)] * (kind in OPENABLE)
        facts += [("canContain", f"{kind}Type", f"{thing}Type") for thing in THINGS]
        for thing in (thing for thing, place in places.items() if place == kind):
            facts += [("inReceptacle", thing, receptacle), ("objectAtLocation", thing, location)]
    for thing in places:
        kind = thing.split("_")[0]
        able = ("toggleable",) if kind == "DeskLamp" else ("pickupable", "cleanable", "heatable", "coolable")
        facts += [("objectType", thing, f"{kind}Type"), *((one, thing) for one in able)]
    return facts


def receptacle_id(kind: str) -> str:
    return "Sink_bar_1_bar_SinkBasin" if kind == "SinkBasin" else f"{kind}_bar_1"


@cache
def synthetic_game(name: str) -> Game:
    """Return the game of a name SPLIT/TASK/NUMBER, which determines it."""
    return read_game(*_written(name))


def _written(name: str) -> tuple[str, str]:
    """Return the PDDL problem of a game and its task sentence."""
    rng, task_type = random.Random(name), name.split("/")[1]
    thing, goal_place = rng.choice(THINGS), rng.choice(("CounterTop", "Cabinet", "Desk"))
    places = {"DeskLamp_bar_1": "Desk"}
    for kind in THINGS:
        # The requested object does not start at its destination.
        elsewhere = [place for place in RECEPTACLES if kind != thing or place != goal_place]
        places |= {f"{kind}_bar_{number}": rng.choice(elsewhere) for number in (1, 2)}
    sentence = SENTENCES[task_type].format(thing=thing.lower(), place=goal_place.lower())
    goal = GOALS[task_type].format(thing=thing, place=goal_place)
    return write_problem(kitchen(places), goal), f"Your task is to: {sentence}"


def walkthrough(game: Game) -> list[str]:
    """Return the commands of a planner with full knowledge."""
    goal, planner = game.goal, _Planner(game)
    inside = game.contents.items()
    wanted = [(thing, place) for place, things in inside for thing in planner.of(goal.object_type, things)]
    for thing, place in wanted[: goal.count]:
        planner.go(place)
        planner.say(f"take {game.names[thing]} from {game.names[place]}")
        if goal.lamp_type:
            planner.light()
        else:
            planner.bring(thing)
    return planner.said


class _Planner:
    def __init__(self, game: Game) -> None:
        self.said: list[str] = []
        self._game = game
        self._world = World(game)

    def say(self, command: str) -> None:
        self._world.step(command)
        self.said.append(command)

    def of(self, kind: str, among: Iterable[int]) -> list[int]:
        return [thing for thing in among if self._game.types.get(thing) == kind]

    def go(self, receptacle: int) -> None:
        name = self._game.names[receptacle]
        for command in (f"go to {name}", f"open {name}"):
            if command in self._world.admissible():
                self.say(command)

    def light(self) -> None:
        inside = self._game.contents.items()
        [(lamp, place)] = [(lamp, at) for at, things in inside for lamp in self.of(self._game.goal.lamp_type, things)]
        self.go(place)
        self.say(f"use {self._game.names[lamp]}")

    def bring(self, thing: int) -> None:
        goal, names = self._game.goal, self._game.names
        verb = goal.ability.removesuffix("able")
        if verb:
            [place] = [place for kind in TREATMENTS[verb][1] for place in self.of(kind, self._game.location_of)]
            if f"go to {names[place]}" in self._world.admissible():
                self.say(f"go to {names[place]}")
            self.say(f"{verb} {names[thing]} with {names[place]}")
        [place] = self.of(goal.receptacle_type, self._game.location_of)
        self.go(place)
        self.say(f"move {names[thing]} to {names[place]}")


def entries(split: str) -> list[Entry]:
    if split not in NUM_ROWS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, NUM_ROWS)}")
    names = [f"{split}/{TASK_TYPES[number % len(TASK_TYPES)]}/{number}" for number in range(NUM_ROWS[split])]
    return [_entry(name) for name in names]


def _entry(name: str) -> Entry:
    (problem, task), said = _written(name), walkthrough(synthetic_game(name))
    return Entry(name=name, task=task, walkthrough=tuple(said), world=short_hash(problem.encode()))


def rows(split: str, count: int | None = None) -> list[TaskRow]:
    return [as_row(entry, file="") for entry in entries(split)[:count]]


def demos(count: int, seed: int) -> list[Demo]:
    return [(as_row(entry, file=""), list(entry.walkthrough)) for entry in _drawn(count, seed)]


def explorer_demos(count: int, seed: int) -> list[Demo]:
    priors = learn_priors(synthetic_game(entry.name) for entry in entries("train"))
    said = [(entry, explored(World(synthetic_game(entry.name)), priors)) for entry in _drawn(count, seed)]
    return [(as_row(entry, file=""), texts) for entry, texts in said if texts is not None]


def _drawn(count: int, seed: int) -> Sequence[Entry]:
    games = entries("train")
    return random.Random(f"demos:{seed}").sample(games, min(count, len(games)))


class SyntheticAlfWorld(AlfWorld):
    def game(self, row: TaskRow) -> Game:
        return synthetic_game(self._name)
