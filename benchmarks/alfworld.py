"""Compare the native ALFWorld engine with the official one, and measure its speed.

    python -m benchmarks.alfworld compare --data DIR --python PY --state FILE     # results/alfworld_engine.json
    python -m benchmarks.alfworld walkthroughs --data DIR                         # every walkthrough wins
    python -m benchmarks.alfworld speed --data DIR                                # results/alfworld_speed.json

DIR is a folder or an archive with the released games (`game.tw-pddl`). PY is a Python with the official engine
(`pip install textworld fast-downward-textworld`), which `alfworld_official.py` puts behind a pipe.

`compare` plays every game three times in both engines. The first play is random; the second follows the game's
walkthrough, looks around on the way, and continues at random after winning; the third provokes oddities that random
play rarely finds. After the start and after every command, the answer, the list of admissible commands and the won flag
must be equal. Random commands are drawn by verb, so that rare verbs are tried too; some are not admissible. Results are
appended to FILE game by game, so a stopped comparison can be continued. `--games N` takes the first N games of an order
that alternates between splits and task types.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

from agent_r1.recipes.alfworld import data
from agent_r1.recipes.alfworld.engine import BLADES, World
from agent_r1.recipes.alfworld.game import Game, read_game
from benchmarks.machine import RESULTS, machine

OFFICIAL = Path(__file__).with_name("alfworld_official.py")
RANDOM_STEPS, STEPS_AFTER_WIN = 30, 4
CHANCE_TO_LOOK, CHANCE_OF_NONSENSE = 0.4, 0.06
SPEED_GAMES, SPEED_STEPS = 200, 30
# Relative frequency of a verb; 4 for verbs not listed.
WEIGHTS = {"go": 5.0, "close": 2.0, "examine": 2.0, "look": 2.0, "inventory": 0.5, "help": 0.05}
NONSENSE = ("", "LOOK", "go to  desk 1", "go to nowhere 1", "put it down", "take", "open the door", "examine agent1 ")

Said = list[Any]  # [answer, admissible commands, won]
Play = list[str]  # commands


class Releases:
    """The released files, kept compressed because an archive can only be read sequentially."""

    def __init__(self, source: Path) -> None:
        found = data.source_in(source)
        if found is None:
            raise SystemExit(f"there are no games at {source}")
        self._content = {name: zlib.compress(content, 1) for name, content in data.released(found)}

    def read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(zlib.decompress(self._content[name]))
        return content

    def order(self) -> list[str]:
        """Alternate between the task types of every split; within one, order by the hash of the name."""
        kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(self._content, key=lambda name: sha256(name.encode()).hexdigest()):
            kinds[name.split("/")[0], data.task_type_of(name)].append(name)
        rounds = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
        return [name for one in rounds for name in one if name is not None]


def game_of(released: dict[str, Any], name: str) -> Game:
    return read_game(released["pddl_problem"], data.check_rules(released, name))


def random_command(world: World, rng: random.Random) -> str:
    if rng.random() < CHANCE_OF_NONSENSE:
        everything = [f"take {name} from {other}" for name in world.game.names[:5] for other in world.game.names[-5:]]
        return rng.choice([*NONSENSE, *everything, *world.game.routes])
    by_verb = defaultdict(list)
    for command in world.admissible():
        by_verb[command.split()[0]].append(command)
    verbs = list(by_verb)
    [verb] = rng.choices(verbs, [WEIGHTS.get(verb, 4.0) for verb in verbs])
    return rng.choice(by_verb[verb])


class Recorded:
    """One play of our engine: the commands and its answers."""

    def __init__(self, game: Game, rng: random.Random) -> None:
        self.world = World(game)
        self.commands: Play = []
        self.said: list[Said] = [[self.world.intro, self.world.admissible(), self.world.won]]
        self._game = game
        self._rng = rng

    def say(self, command: str) -> None:
        self.commands.append(command)
        self.said.append([self.world.step(command), self.world.admissible(), self.world.won])

    def at_random(self, steps: int) -> None:
        for _ in range(steps):
            self.say(random_command(self.world, self._rng))

    def follow(self, walkthrough: Sequence[str]) -> None:
        for command in walkthrough:
            if self._rng.random() < CHANCE_TO_LOOK:
                looks = [c for c in self.world.admissible() if c.split()[0] in ("look", "examine", "inventory")]
                self.say(self._rng.choice(looks))
            self.say(command)

    def provoke(self) -> None:
        """Try what random play rarely finds: the oddities in `engine.py`."""
        game, able = self._game, self._game.abilities
        places = [(thing, place) for place, things in game.contents.items() for thing in things]
        often = Counter(thing for thing, _ in places)
        movable = [(thing, place) for thing, place in places if thing in able["pickupable"]]
        neighbours = [
            (thing, place, other)
            for thing, place in movable
            for other in game.receptacles_at[game.location_of[place]]
            if other != place and self._fits(thing, other)
        ]
        if neighbours:
            thing, place, other = self._rng.choice(neighbours)
            self._carry(thing, place, other)
            self._carry(thing, other, place)
        if doubled := [(thing, place) for thing, place in movable if often[thing] > 1]:
            thing, place = self._rng.choice(doubled)
            self._carry(thing, place, next(at for one, at in places if one == thing and at != place))
            self._drop(thing)
        blades = [(thing, place) for thing, place in movable if game.types[thing] in BLADES]
        food = [(thing, place) for thing, place in movable if thing in able["sliceable"]]
        if blades and food:
            (blade, block), (meal, plate) = self._rng.choice(blades), self._rng.choice(food)
            self._carry(blade, block, plate)
            self.say(f"slice {game.names[meal]} with {game.names[blade]}")
            self._drop(blade)
            self._carry(meal, plate, plate)

    def _carry(self, thing: int, place: int, other: int) -> None:
        """Take an object from one receptacle, put it into another if possible, and look on the way."""
        names = self._game.names
        self._reach(place)
        self.say(f"take {names[thing]} from {names[place]}")
        for command in (f"examine {names[thing]}", "look"):
            self.say(command)
        self._reach(other)
        if self._fits(thing, other):
            self.say(f"move {names[thing]} to {names[other]}")
            self.say("look")
            self.say(f"examine {names[other]}")

    def _drop(self, thing: int) -> None:
        place = self._rng.choice([r for r in self._game.location_of if self._fits(thing, r)] or [0])
        self._reach(place)
        self.say(f"move {self._game.names[thing]} to {self._game.names[place]}")

    def _reach(self, place: int) -> None:
        name = self._game.names[place]
        for command in (f"go to {name}", f"open {name}"):
            if command in self.world.admissible():
                self.say(command)

    def _fits(self, thing: int, place: int) -> bool:
        return (self._game.types[place], self._game.types[thing]) in self._game.fits


def planned(game: Game, walkthrough: Sequence[str], rng: random.Random) -> list[Recorded]:
    free, followed, provoked = (Recorded(game, rng) for _ in range(3))
    free.at_random(RANDOM_STEPS)
    followed.follow(walkthrough)
    followed.at_random(STEPS_AFTER_WIN)
    provoked.provoke()
    return [free, followed, provoked]


class Official:
    """The official engine in a separate process."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(OFFICIAL)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def play(self, released: dict[str, Any], plays: list[Play]) -> list[list[Said]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"game": released, "plays": plays}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the official engine ended with status {self._process.wait()}; its message is above")
        told: list[list[Said]] = json.loads(line)
        return told

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(name: str, releases: Releases, official: Official, seed: int) -> dict[str, Any]:
    released = releases.read(name)
    rng = random.Random(f"{seed}:{name}")
    recorded = planned(game_of(released, name), released["walkthrough"], rng)
    plays, ours = [one.commands for one in recorded], [one.said for one in recorded]
    theirs = official.play(released, plays)
    verbs: Counter[str] = Counter()
    for play, said in zip(plays, theirs, strict=True):
        for command, (before, after) in zip(play, pairwise(said), strict=True):
            verbs[command.split()[0] if command.strip() in before[1] else "(refused)"] += 1
            verbs["(won)"] += after[2] and not before[2]
    return {
        "game": name,
        "seed": seed,
        "states": sum(map(len, ours)),
        "verbs": dict(verbs),
        "walkthrough_won": any(won for _, _, won in theirs[1]),
        "mismatches": list(differences(plays, ours, theirs)),
    }


def differences(plays: list[Play], ours: list[list[Said]], theirs: list[list[Said]]) -> Iterator[dict[str, Any]]:
    """The first difference of each play; later ones may only be consequences."""
    for play, mine, official in zip(plays, ours, theirs, strict=True):
        for step, (one, other) in enumerate(zip(mine, official, strict=True)):
            if one != other:
                what = [n for n, a, b in zip(("answer", "admissible", "won"), one, other, strict=True) if a != b]
                yield {"after": play[:step], "what": what, "ours": one, "official": other}
                break


def compare(args: argparse.Namespace) -> None:
    releases = Releases(args.data)
    done = resumed(args.state, args.seed)
    wanted = releases.order()[: args.games]
    missing = [name for name in wanted if name not in done]
    print(f"{len(wanted):,} games, {len(wanted) - len(missing):,} of them compared before", flush=True)
    args.state.parent.mkdir(parents=True, exist_ok=True)
    began, writing = time.perf_counter(), Lock()
    with args.state.open("a", encoding="utf-8") as log, ThreadPoolExecutor(args.workers) as pool:
        pools = [missing[number :: args.workers] for number in range(args.workers)]

        def work(names: Sequence[str]) -> None:
            official = Official(args.python)
            for name in names:
                if args.minutes is not None and time.perf_counter() - began > 60 * args.minutes:
                    break
                line = json.dumps(compared(name, releases, official, args.seed)) + "\n"
                with writing:
                    log.write(line)
                    log.flush()
            official.close()

        list(pool.map(work, pools))
    done = resumed(args.state, args.seed)
    summary = summed([done[name] for name in wanted if name in done])
    print(json.dumps({key: value for key, value in summary.items() if key != "mismatches"}, indent=1))
    for mismatch in summary["mismatches"][:5]:
        print(json.dumps(mismatch)[:2000])
    write("alfworld_engine.json", {"games_wanted": len(wanted), "seed": args.seed, **summary})


def resumed(path: Path, seed: int) -> dict[str, dict[str, Any]]:
    """The last record of each game in a state file; an incomplete last line is removed."""
    if not path.is_file():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    records = [json.loads(line) for line in whole.splitlines()]
    others = {record.get("seed", 0) for record in records} - {seed}  # records without a seed are of seed 0
    if others:
        raise SystemExit(f"{path} is of seed {min(others)}, not {seed}: give another --state, or --seed {min(others)}")
    return {record["game"]: record for record in records}


def summed(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    verbs: Counter[str] = sum((Counter(record["verbs"]) for record in records), Counter())
    return {
        "games": len(records),
        "games_by_split": dict(sorted(Counter(record["game"].split("/")[0] for record in records).items())),
        "games_by_task": dict(sorted(Counter(data.task_type_of(record["game"]) for record in records).items())),
        "states": sum(record["states"] for record in records),
        "commands_by_verb": dict(sorted(verbs.items())),
        "walkthroughs_won_in_both": sum(record["walkthrough_won"] for record in records),
        "games_with_mismatches": sum(bool(record["mismatches"]) for record in records),
        "mismatches": [{"game": r["game"], **found} for r in records for found in r["mismatches"]],
    }


def walkthroughs(args: argparse.Namespace) -> None:
    releases = Releases(args.data)
    lost = []
    for name in releases.order()[: args.games]:
        released = releases.read(name)
        world, won = World(game_of(released, name)), list[bool]()
        for command in released["walkthrough"]:
            refused = command not in world.admissible()
            world.step(command)
            won.append(world.won and not refused)
        if won.index(True) + 1 != len(won) if any(won) else True:
            lost.append(name)
    print(f"{len(releases.order()[: args.games]):,} walkthroughs, {len(lost)} of which do not win with their last step")
    for name in lost[:10]:
        print(f"  {name}")


def speed(args: argparse.Namespace) -> None:
    """CPU seconds of one core. A step gives an answer, the won flag and the list of admissible commands."""
    file = data.games_file(str(args.data))
    entries = data.entries("train", file)[:SPEED_GAMES]
    took: dict[str, float] = defaultdict(float)
    for entry in entries:
        began = time.process_time()
        game = data.load_game(str(file), entry.name, entry.world)
        took["load"] += time.process_time() - began
        began = time.process_time()
        _ = World(game).intro
        took["reset"] += time.process_time() - began
        commands = _any_commands(game, entry.name)
        world, began = World(game), time.process_time()
        for command in commands:
            world.step(command)
            _ = world.won, world.admissible()
        took["step"] += time.process_time() - began
    result = {
        "games": len(entries),
        "steps": len(entries) * SPEED_STEPS,
        "load_and_parse_ms": round(1e3 * took["load"] / len(entries), 3),
        "reset_ms": round(1e3 * took["reset"] / len(entries), 3),
        "steps_per_second": round(len(entries) * SPEED_STEPS / took["step"]),
    }
    print(json.dumps(result, indent=1))
    write("alfworld_speed.json", result)


def _any_commands(game: Game, name: str) -> list[str]:
    world, rng, commands = World(game), random.Random(name), list[str]()
    for _ in range(SPEED_STEPS):
        commands.append(random_command(world, rng))
        world.step(commands[-1])
    return commands


def write(name: str, result: dict[str, Any]) -> None:
    text = json.dumps({"machine": machine(), **result}, indent=1, ensure_ascii=False)
    (RESULTS / name).write_text(text + "\n", encoding="utf-8")


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("compare", compare), ("walkthroughs", walkthroughs), ("speed", speed)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--data", type=Path, required=True, help="folder or archive of released games")
        command.add_argument("--games", type=int, help="the first so many; by default all")
        if name == "compare":
            command.add_argument("--python", required=True, help="a Python with textworld")
            command.add_argument("--state", type=Path, required=True, help="JSON lines, one per game that was compared")
            command.add_argument("--workers", type=int, default=1)
            command.add_argument("--minutes", type=float, help="stop after so many")
            command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(None if words is None else list(words))
    args.function(args)


if __name__ == "__main__":
    main()
