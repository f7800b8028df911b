"""The rules of the ALFWorld text game: effects of commands, answers, admissible commands, and winning.

`World` is the state of one play of a `Game`. For the released games its output equals the output of the official engine
(TextWorld on Fast Downward) word for word, oddities included; `python -m benchmarks.alfworld compare` proves it. The
oddities all follow from how the official engine reads the PDDL domain and the text grammar:

- `go to X` is refused if X is at the current position, even if the agent faces something else there.
- An object can be examined only while it is held.
- `look` before the first move shows nothing, although the intro lists everything.
- An object may be in two receptacles at once, as many files say. After it is taken from one, it is still in the other.
- "Next to" lists the objects recorded at that position that were taken from a receptacle there, once for every such
receptacle, even if they are in another one by now.
- The contents of a bowl or a mug never change.
- A lamp that has been used stays on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from agent_r1.recipes.alfworld.game import Game

NOTHING_HAPPENS = "Nothing happens."
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

# verb -> required property of the object, receptacle types, state gained, state lost
TREATMENTS = {
    "clean": ("cleanable", ("sinktype", "sinkbasintype"), "clean", ""),
    "heat": ("heatable", ("microwavetype",), "hot", "cool"),
    "cool": ("coolable", ("fridgetype",), "cool", "hot"),
}
BLADES = ("knifetype", "butterknifetype")
APPEARANCES = (  # the first entry whose states the object has
    ({"clean", "hot", "sliced"}, "hot and clean sliced"),
    ({"clean", "cool", "sliced"}, "cool and clean sliced"),
    ({"clean", "sliced"}, "clean sliced"),
    ({"hot", "sliced"}, "hot sliced"),
    ({"cool", "sliced"}, "cool sliced"),
    ({"clean", "hot"}, "hot and clean"),
    ({"clean", "cool"}, "cool and clean"),
    ({"hot"}, "hot"),
    ({"clean"}, "clean"),
    ({"cool"}, "cold"),
    ({"sliced"}, "sliced"),
)

Act = tuple[str, int, int]  # verb, object, second object; 0 if there is none


class World:
    """One play. Accepts commands as `admissible` spells them; any other is answered with `NOTHING_HAPPENS`."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self._here = game.start
        self._held: int | None = None
        self._opened: set[int] = set()
        self._contents = {receptacle: list(things) for receptacle, things in game.contents.items()}
        self._lying = {place: set(things) for place, things in game.lying.items()}
        self._taken: set[tuple[int, int]] = set()  # (object, receptacle): taken out and not put back
        self._states = {thing: set(states) for thing, states in game.states.items()}
        self._acts: dict[str, Act] | None = None  # admissible commands at this position; None: not computed yet
        self._progress: int | None = None  # what `_reached` returns, until something changes

    @property
    def intro(self) -> str:
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{self._survey(self.game.location_of)}\n\n{self.game.task}"

    def step(self, command: str) -> str:
        """Execute a command and return the answer."""
        command = command.strip()
        receptacle = self.game.routes.get(command)
        if receptacle is not None:
            act = ("go", receptacle, 0) if self.game.location_of[receptacle] != self._here else None
        else:
            act = self._acts_here().get(command)
        if act is None:
            return NOTHING_HAPPENS
        verb, thing, other = act
        if verb not in _PEACEFUL:
            self._acts = None
        if verb not in _HARMLESS:
            self._progress = None
        return _VERBS[verb](self, thing, other)

    def admissible(self) -> list[str]:
        """Return every command that currently has an effect, in alphabetical order."""
        here, location_of = self._here, self.game.location_of
        routes = [command for command, receptacle in self.game.routes.items() if location_of[receptacle] != here]
        return sorted([*routes, *self._acts_here()])

    @property
    def won(self) -> bool:
        goal, types = self.game.goal, self.game.types
        if goal.lamp_type:
            if self._held is None or types.get(self._held) != goal.object_type:
                return False
            near = (thing for receptacle in self._near() for thing in self._contents.get(receptacle, ()))
            return any(types.get(thing) == goal.lamp_type and self._is(thing, "toggled") for thing in near)
        return self._reached >= goal.count

    @property
    def inventory(self) -> str:
        return "You are not carrying anything." if self._held is None else f"You are carrying: {self._a(self._held)}."

    def scene(self) -> str:
        """Describe the position, what is visible there, what is held in which state, and how much of the goal is
        reached.

        The route to the scene and changes elsewhere are not part of it.
        """
        seen = [self._examine_receptacle(receptacle, 0) for receptacle in self._near()]
        held = []
        if self._held is not None:
            # Not the text of `examine`, which only lists the contents of a mug or a bowl.
            states = " and ".join(sorted(self._states.get(self._held, ())))
            held = [self.inventory, f"It is {states or 'untouched'}."]
        return " ".join([*(seen or ["In the middle of the room."]), *held, f"Reached: {self._reached}."])

    @property
    def _reached(self) -> int:
        if self._progress is None:
            self._progress = self._count_reached()
        return self._progress

    def _count_reached(self) -> int:
        """Return the largest number of wanted objects in one right receptacle, or the number of lamps that are on."""
        goal, types = self.game.goal, self.game.types
        if goal.lamp_type:
            return sum(types.get(thing) == goal.lamp_type and "toggled" in now for thing, now in self._states.items())
        right = [things for place, things in self._contents.items() if types.get(place) == goal.receptacle_type]
        return max((sum(map(self._is_wanted, things)) for things in right), default=0)

    # Answers

    def _survey(self, receptacles: Iterable[int]) -> str:
        return f"You are in the middle of a room. Looking quickly around you, you see {self._list(receptacles)}."

    def _look(self, _: int, __: int) -> str:
        near = self._near()
        if not near:
            return self._survey(())
        beside = [
            thing
            for thing in sorted(self._lying.get(self._here, ()))
            for receptacle in near
            if (thing, receptacle) in self._taken
        ]
        facing = _joined([self.game.names[receptacle] for receptacle in near])
        return f"You are facing the {facing}. Next to it, you see {self._list(beside)}."

    def _inventory(self, _: int, __: int) -> str:
        return self.inventory

    def _help(self, _: int, __: int) -> str:
        return HELP

    def _examine_receptacle(self, receptacle: int, _: int) -> str:
        name, inside = self.game.names[receptacle], self._list(self._contents.get(receptacle, ()))
        if receptacle not in self.game.abilities["openable"]:
            return f"On the {name}, you see {inside}."
        if receptacle in self._opened:
            return f"The {name} is open. In it, you see {inside}."
        return f"The {name} is closed."

    def _examine_object(self, thing: int, _: int) -> str:
        name, states = self.game.names[thing], self._states.get(thing, set[str]())
        if thing in self.game.abilities["isreceptacleobject"]:
            return f"This is a normal {name}. In it, you see {self._list(self.game.nested.get(thing, ()))}."
        if "toggled" in states and not states & {"clean", "hot", "cool"}:
            return f"This {name} is on."
        looks = next((looks for needed, looks in APPEARANCES if needed <= states), None)
        return f"There's nothing special about {name}." if looks is None else f"This is a {looks} {name}."

    # Actions

    def _go(self, receptacle: int, _: int) -> str:
        self._here = self.game.location_of[receptacle]
        return f"You arrive at {self.game.names[receptacle]}. {self._examine_receptacle(receptacle, 0)}"

    def _open(self, receptacle: int, _: int) -> str:
        self._opened.add(receptacle)
        return f"You open the {self.game.names[receptacle]}. {self._examine_receptacle(receptacle, 0)}"

    def _close(self, receptacle: int, _: int) -> str:
        self._opened.discard(receptacle)
        return f"You close the {self.game.names[receptacle]}."

    def _take(self, thing: int, receptacle: int) -> str:
        self._contents[receptacle].remove(thing)
        self._taken.add((thing, receptacle))
        # Only from here: an object that the file records at another position stays recorded there.
        self._lying.get(self._here, set()).discard(thing)
        self._held = thing
        return f"You pick up the {self.game.names[thing]} from the {self.game.names[receptacle]}."

    def _move(self, thing: int, receptacle: int) -> str:
        inside = self._contents.setdefault(receptacle, [])
        if thing not in inside:  # it may be there already (see the oddities)
            insort(inside, thing)
        self._taken.discard((thing, receptacle))
        self._lying.setdefault(self._here, set()).add(thing)
        self._held = None
        return f"You move the {self.game.names[thing]} to the {self.game.names[receptacle]}."

    def _use(self, thing: int, _: int) -> str:
        self._states.setdefault(thing, set()).add("toggled")
        return f"You turn on the {self.game.names[thing]}."

    def _slice(self, thing: int, blade: int) -> str:
        self._states.setdefault(thing, set()).add("sliced")
        return f"You sliced the {self.game.names[thing]} with the {self.game.names[blade]}."

    def _treat(self, verb: str, thing: int, receptacle: int) -> str:
        _, _, gained, lost = TREATMENTS[verb]
        states = self._states.setdefault(thing, set())
        states.add(gained)
        states.discard(lost)
        return f"You {verb} the {self.game.names[thing]} using the {self.game.names[receptacle]}."

    def _clean(self, thing: int, receptacle: int) -> str:
        return self._treat("clean", thing, receptacle)

    def _heat(self, thing: int, receptacle: int) -> str:
        return self._treat("heat", thing, receptacle)

    def _cool(self, thing: int, receptacle: int) -> str:
        return self._treat("cool", thing, receptacle)

    # Admissible commands

    def _acts_here(self) -> dict[str, Act]:
        """Return all commands except `go to`."""
        if self._acts is None:
            self._acts = acts = {"help": ("help", 0, 0), "inventory": ("inventory", 0, 0), "look": ("look", 0, 0)}
            for receptacle in self._near():
                self._add_acts_at(receptacle, acts)
            if self._held is not None:
                self._add_acts_with(self._held, acts)
        return self._acts

    def _add_acts_at(self, receptacle: int, acts: dict[str, Act]) -> None:
        names, abilities = self.game.names, self.game.abilities
        name, inside = names[receptacle], self._contents.get(receptacle, ())
        acts[f"examine {name}"] = ("examine receptacle", receptacle, 0)
        is_openable, is_open = receptacle in abilities["openable"], receptacle in self._opened
        if is_openable:
            verb = "close" if is_open else "open"
            acts[f"{verb} {name}"] = (verb, receptacle, 0)
        for thing in inside:
            if thing in abilities["toggleable"]:
                acts[f"use {names[thing]}"] = ("use", thing, 0)
        if is_openable and not is_open:
            return
        held = self._held
        if held is None:
            for thing in inside:
                if thing in abilities["pickupable"]:
                    acts[f"take {names[thing]} from {name}"] = ("take", thing, receptacle)
        elif (self.game.types.get(receptacle), self.game.types.get(held)) in self.game.fits:
            acts[f"move {names[held]} to {name}"] = ("move", held, receptacle)

    def _add_acts_with(self, held: int, acts: dict[str, Act]) -> None:
        names, types, abilities = self.game.names, self.game.types, self.game.abilities
        acts[f"examine {names[held]}"] = ("examine object", held, 0)
        for verb, (ability, places, _, _) in TREATMENTS.items():
            if held in abilities[ability]:
                for receptacle in self._near():
                    if types.get(receptacle) in places:
                        acts[f"{verb} {names[held]} with {names[receptacle]}"] = (verb, held, receptacle)
        if types.get(held) in BLADES:
            for thing in self._lying.get(self._here, ()):
                if thing in abilities["sliceable"]:
                    acts[f"slice {names[thing]} with {names[held]}"] = ("slice", thing, held)

    def _near(self) -> tuple[int, ...]:
        return self.game.receptacles_at.get(self._here, ())

    def _is(self, thing: int, state: str) -> bool:
        return state in self._states.get(thing, ())

    def _is_wanted(self, thing: int) -> bool:
        goal = self.game.goal
        return self.game.types.get(thing) == goal.object_type and (
            not goal.state or (thing in self.game.abilities[goal.ability] and self._is(thing, goal.state))
        )

    def _a(self, thing: int) -> str:
        return f"a {self.game.names[thing]}"

    def _list(self, things: Iterable[int]) -> str:
        return _joined([self._a(thing) for thing in things]) or "nothing"


_VERBS = {
    "look": World._look,
    "inventory": World._inventory,
    "help": World._help,
    "examine receptacle": World._examine_receptacle,
    "examine object": World._examine_object,
    "go": World._go,
    "open": World._open,
    "close": World._close,
    "take": World._take,
    "move": World._move,
    "use": World._use,
    "slice": World._slice,
    "clean": World._clean,
    "heat": World._heat,
    "cool": World._cool,
}
_PEACEFUL = ("look", "inventory", "help", "examine receptacle", "examine object")  # change nothing
_HARMLESS = (*_PEACEFUL, "go", "open", "close")  # change neither an object nor where it is


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f", and {words[-1]}" if words else ""
