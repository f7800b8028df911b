"""The demonstrations of the recipe alfworld: how often and how fast the explorer solves games, and how many tokens
episodes have.

    python -m benchmarks.alfworld_demos explorer --data DIR
    python -m benchmarks.alfworld_demos tokens --data DIR --tokenizer MODEL [--episodes N]

DIR is a value for `data.path`, MODEL one for `model.path`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from agent_r1.build.models.source import as_directory, find_model
from agent_r1.build.recipe import recipe_path
from agent_r1.recipes.alfworld import data, task
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.env import shortened
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation

SPLITS = ("train", "valid_seen", "valid_unseen")
STEPS = (30, 50)
EPISODES, RANDOM_EPISODES = 400, 200
READABLE = 8192  # context of SmolLM2


def explorer(args: argparse.Namespace) -> None:
    file = data.games_file(args.data)
    priors = task.train_priors(file)
    for split in SPLITS:
        worlds = [world_of(file, entry) for entry in data.entries(split, file)]
        tried = [task.explored(world, priors, max_steps=max(STEPS)) for world in worlds]
        lengths = [len(said) for said in tried if said is not None]
        solved = "  ".join(f"in {limit}: {sum(n <= limit for n in lengths) / len(tried):.1%}" for limit in STEPS)
        print(f"{split:13} {len(tried):5} games  solved {solved}  median steps {median(lengths):g}")


def tokens(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    template = recipe_path("chatml_tools", recipe="alfworld").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(as_directory(find_model(args.tokenizer), print))
    renderer = Renderer(tokenizer, chat_template=template)
    file = data.games_file(args.data)
    games = {entry.name: entry for entry in data.entries("train", file)}
    for kind, demos in (("walkthroughs", task.demos), ("explorer", task.explorer_demos)):
        chosen = demos(args.episodes, 0, args.data)
        for hints in (False, True):
            talks = [played(world_of(file, games[row.row_id]), said, hints) for row, said in chosen]
            print(f"{kind}{', hints' if hints else ''}: {sizes(renderer, talks)}")
        said = [len(renderer.encode_response(text)) for _, texts in chosen for text in texts]
        print(f"{kind}, a command: mean {fmean(said):.0f}, most {max(said)}")
    worlds = {name: world_of(file, games[name]) for name in islice(games, RANDOM_EPISODES)}
    talks = [played(world, wandering(world, random.Random(name)), False) for name, world in worlds.items()]
    print(f"{STEPS[0]} random moves: {sizes(renderer, talks)}")


def world_of(file: Path, entry: data.Entry) -> World:
    return World(data.load_game(str(file), entry.name, entry.world))


def wandering(world: World, chance: random.Random) -> Iterator[str]:
    for _ in range(STEPS[0]):
        yield chance.choice([said for said in world.admissible() if said.startswith(("go", "open", "take"))])


def played(world: World, said: Sequence[str] | Iterator[str], hints: bool) -> list[Message]:
    def shown(answer: str) -> Message:
        hint = f"\nCommands: {', '.join(world.admissible())}" if hints else ""
        return {"role": "user", "content": f"{answer}{hint}"}

    talk = [shown(shortened(world.intro))]
    for command in said:
        answer = world.step(command)
        talk.append({"role": "assistant", "content": command})
        if world.won:
            break
        talk.append(shown(answer))
    return talk


def sizes(renderer: Renderer, talks: Sequence[list[Message]]) -> str:
    found = sorted(len(renderer.render(Observation(messages=talk), [])) for talk in talks)
    mean, nearly_all = fmean(found), found[int(0.99 * len(found))]
    too_long = sum(size > READABLE for size in found)
    return (
        f"{len(found)} episodes, tokens: mean {mean:.0f}, 99 % {nearly_all}, most {found[-1]}; "
        f"{too_long} have more than {READABLE:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in (("explorer", explorer), ("tokens", tokens)):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True)
        command.set_defaults(run=run)
        if run is tokens:
            command.add_argument("--tokenizer", required=True)
            command.add_argument("--episodes", type=int, default=EPISODES, help="of each kind of demonstration")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
