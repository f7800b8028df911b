"""The explorer: an agent written by hand that sees what a policy sees, the texts alone, and looks for what it needs.

It goes from receptacle to receptacle, most promising first, opens what is closed, remembers what it saw where, and does
with the things what the task says. How promising a receptacle is it has learnt from training games (`learn_priors`):
how often a thing of this kind lies in a receptacle of that kind, and how many steps it takes to see inside. It knows no
game in particular. Its demonstrations show a policy how to search, which walkthroughs by a planner cannot.
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
Doing = Generator[str, None, T]  # commands; after each of them its answer is in `Explorer._answer`

_NAME = re.compile(r"a (\w+ \d+)")
_TASKS = (
    r"put (?P<count>two|a|some) (?:(?P<state>hot|cool|clean) )?(?P<object>\w+) (?:in|on) (?P<place>\w+)\.",
    r"(?P<state>heat|cool|clean) some (?P<object>\w+) and put it in (?P<place>\w+)\.",
    r"find (?P<count>two) (?P<object>\w+) and put them in (?P<place>\w+)\.",
    r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<lamp>\w+)\.",
)
TREATMENT_FOR = {"hot": "heat", "heat": "heat", "cool": "cool", "clean": "clean"}
APPLIANCES = {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}
UNSEEN = 1e-4  # how promising a kind of receptacle is in which a thing was never found: it is still looked into, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a task asks for, as its sentence says it."""

    kind: str  # of object
    place: str = ""  # kind of receptacle
    lamp: str = ""
    treatment: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    found: Mapping[str, Mapping[str, float]]  # object kind -> receptacle kind -> how many of it one such receptacle has
    closed: frozenset[str]  # kinds of receptacle that have to be opened

    def promise(self, kind: str, place: str) -> float:
        """Expected finds of a kind of thing per step, in a kind of receptacle."""
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
    """One episode. `act` takes the last answer, the intro first, and returns a command; None when it gives up."""

    def __init__(self, priors: Priors) -> None:
        self._priors = priors
        self._doing: Doing[None] | None = None
        self._answer = ""
        self._at = ""  # the receptacle that was gone to last
        self._receptacles: list[str] = []
        self._seen: dict[str, list[str]] = {}  # what was in the receptacles that were looked into
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
        # Where one of two things is already, the other one belongs too.
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
        """Take something of a kind, wherever it is but in receptacles of the kind `away_from`."""
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
        """Something of a kind and its receptacle, remembered or looked for; None when everything was looked into."""
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
            if self._answer == NOTHING_HAPPENS:  # it is where one stands already
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
        """The first receptacle of a kind; "" if there is none."""
        return next((place for place in self._receptacles if _kind(place) == kind), "")

    def _most(self, kind: str, place_kind: str) -> str:
        """The receptacle of a kind in which most of a kind were seen, the first of equals; "" if there is none."""
        places = [place for place in self._receptacles if _kind(place) == place_kind]
        return max(places, key=lambda at: sum(_kind(thing) == kind for thing in self._seen.get(at, ())), default="")


def _kind(name: str) -> str:
    return name.split()[0]


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, number = name.split()
    return kind, int(number)
