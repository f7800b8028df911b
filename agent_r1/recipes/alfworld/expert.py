"""The explorer: a hand-written agent that sees only the texts, as a policy does, and searches for what it needs.

It visits receptacles in order of promise, opens closed ones, remembers what it saw where, and does what the task asks.
How promising a receptacle is comes from training games (`learn_priors`): how often this kind of object lies in that
kind of receptacle, and how many steps it takes to look inside. It knows no particular game. Its demonstrations teach a
policy how to search, which a planner's walkthroughs cannot.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from agent_r1.errors import DataError
from agent_r1.recipes.alfworld.engine import NOTHING_HAPPENS
from agent_r1.recipes.alfworld.game import Game

T = TypeVar("T")
Doing = Generator[str, None, T]  # yields commands; the answer to each is then in `Explorer._answer`

_NAME = re.compile(r"a (\w+ \d+)")
_TASKS = (
    r"put (?P<count>two|a|some) (?:(?P<state>hot|cool|clean) )?(?P<object>\w+) (?:in|on) (?P<place>\w+)\.",
    r"(?P<state>heat|cool|clean) some (?P<object>\w+) and put it in (?P<place>\w+)\.",
    r"find (?P<count>two) (?P<object>\w+) and put them in (?P<place>\w+)\.",
    r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<lamp>\w+)\.",
)
TREATMENT_FOR = {"hot": "heat", "heat": "heat", "cool": "cool", "clean": "clean"}
APPLIANCES = {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}
UNSEEN = 1e-4  # promise of a receptacle kind in which the object was never found, so that it is searched last


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A task, parsed from its sentence."""

    kind: str  # kind of object
    place: str = ""  # kind of receptacle
    lamp: str = ""
    treatment: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    found: Mapping[
        str, Mapping[str, float]
    ]  # object kind -> receptacle kind -> expected number of objects in one such receptacle
    closed: frozenset[str]  # receptacle kinds that must be opened

    def promise(self, kind: str, place: str) -> float:
        """Return the expected finds per step of an object kind in a receptacle kind."""
        return max(UNSEEN, self.found.get(kind, {}).get(place, 0.0)) / (2 if place in self.closed else 1)


def learn_priors(games: Iterable[Game]) -> Priors:
    finds: dict[str, Counter[str]] = defaultdict(Counter)
    receptacles, closed = Counter[str](), set[str]()
    for game in games:
        for receptacle in game.location_of:
            place = game.names[receptacle].split()[0]
            receptacles[place] += 1
            if receptacle in game.abilities["openable"]:
                closed.add(place)
            for thing in game.contents.get(receptacle, ()):
                finds[game.names[thing].split()[0]][place] += 1
    found = {kind: {place: n / receptacles[place] for place, n in places.items()} for kind, places in finds.items()}
    return Priors(found=found, closed=frozenset(closed))


def read_wish(intro: str) -> Wish:
    _, mark, sentence = intro.partition("Your task is to: ")
    for pattern in _TASKS:
        if found := re.match(pattern, sentence):
            said = found.groupdict()
            return Wish(
                kind=said["object"],
                place=said.get("place") or "",
                lamp=said.get("lamp") or "",
                treatment=TREATMENT_FOR.get(said.get("state") or "", ""),
                count=2 if said.get("count") == "two" else 1,
            )
    raise DataError(f"the explorer does not understand the task: {(mark + sentence)[:200]!r}")


class Explorer:
    """One episode. `act` takes the last answer (the intro first) and returns a command, or None to give up."""

    def __init__(self, priors: Priors) -> None:
        self._priors = priors
        self._doing: Doing[None] | None = None
        self._answer = ""
        self._at = ""  # the receptacle visited last
        self._receptacles: list[str] = []
        self._seen: dict[str, list[str]] = {}  # contents of the searched receptacles
        self._closed: set[str] = set()

    def act(self, answer: str) -> str | None:
        self._answer = answer
        if self._doing is None:
            self._receptacles = sorted(_NAME.findall(answer.partition("Your task")[0]), key=_kind_and_number)
            wish = read_wish(answer)
            self._doing = self._light_up(wish) if wish.lamp else self._bring(wish)
        return next(self._doing, None)

    def _light_up(self, wish: Wish) -> Doing[None]:
        thing = yield from self._fetch(wish.kind, away_from="")
        if thing is None:
            return
        found = yield from self._find(wish.lamp, away_from="")
        if found is not None:
            lamp, place = found
            yield from self._go(place)
            yield f"use {lamp}"

    def _bring(self, wish: Wish) -> Doing[None]:
        # The second of two objects belongs where the first one already is.
        goal, brought = "", 0
        while brought < wish.count:
            thing = yield from self._fetch(wish.kind, away_from="" if wish.treatment else wish.place)
            if thing is None:
                return
            if wish.treatment:
                appliance = self._first(APPLIANCES[wish.treatment])
                if not appliance:
                    return
                yield from self._go(appliance, opening=False)
                yield f"{wish.treatment} {thing} with {appliance}"
            goal = goal or self._most(wish.kind, wish.place)
            if not goal:
                return
            yield from self._go(goal)
            yield f"move {thing} to {goal}"
            self._seen[goal].append(thing)
            brought = sum(_kind(other) == wish.kind for other in self._seen[goal]) if wish.count > 1 else wish.count

    def _fetch(self, kind: str, *, away_from: str) -> Doing[str | None]:
        """Take an object of a kind from anywhere except receptacles of the kind `away_from`."""
        while True:
            found = yield from self._find(kind, away_from=away_from)
            if found is None:
                return None
            thing, place = found
            yield from self._go(place)
            self._seen[place].remove(thing)
            yield f"take {thing} from {place}"
            if self._answer != NOTHING_HAPPENS:
                return thing

    def _find(self, kind: str, *, away_from: str) -> Doing[tuple[str, str] | None]:
        """Find an object of a kind and its receptacle, from memory or by searching; None if everything was searched."""
        while True:
            for place, things in self._seen.items():
                for thing in things:
                    if _kind(thing) == kind and _kind(place) != away_from:
                        return thing, place
            left = [place for place in self._receptacles if place not in self._seen]
            if not left:
                return None
            yield from self._go(max(left, key=lambda place: self._priors.promise(kind, _kind(place))))

    def _go(self, place: str, *, opening: bool = True) -> Doing[None]:
        if self._at != place:
            yield f"go to {place}"
            if self._answer == NOTHING_HAPPENS:  # already there
                yield f"examine {place}"
            self._at = place
            if self._answer.endswith(f"The {place} is closed."):
                self._closed.add(place)
        if opening and place in self._closed:
            yield f"open {place}"
            self._closed.remove(place)
        if opening and place not in self._seen:
            self._seen[place] = _NAME.findall(self._answer.rpartition("you see ")[2])

    def _first(self, kind: str) -> str:
        """Return the first receptacle of a kind, or ""."""
        return next((place for place in self._receptacles if _kind(place) == kind), "")

    def _most(self, kind: str, place_kind: str) -> str:
        """Return the receptacle of a kind in which most objects of a kind were seen (the first on ties), or ""."""
        places = [place for place in self._receptacles if _kind(place) == place_kind]
        return max(places, key=lambda at: sum(_kind(thing) == kind for thing in self._seen.get(at, ())), default="")


def _kind(name: str) -> str:
    return name.split()[0]


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, number = name.split()
    return kind, int(number)
