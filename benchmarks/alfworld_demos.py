"""What the two warm starts of the recipe alfworld are made of: how often and how fast the explorer solves a game, and
how many tokens episodes have.

    python -m benchmarks.alfworld_demos explorer --data DIR
    python -m benchmarks.alfworld_demos tokens --data DIR --tokenizer MODEL

DIR is what `data.path` takes; MODEL what `model.path` takes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from agent_r1.agent.rendering import Renderer
from agent_r1.recipes.alfworld import data, task
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.env import shortened
from agent_r1.run.model import find_model
from agent_r1.run.resolve import recipe_path
from agent_r1.types import Message, Observation

SPLITS = ("train", "valid_seen", "valid_unseen")
STEPS = (30, 50)
EPISODES, RANDOM_EPISODES = 400, 200


def explorer(args: argparse.Namespace) -> None:
    games, priors = str(data.games_file(args.data)), task.train_priors(args.data)
    for split in SPLITS:
        worlds = [World(data.load_game(games, entry.name)) for entry in data.entries(split, args.data)]
        tried = [task.explored(world, priors, max_steps=max(STEPS)) for world in worlds]
        lengths = [len(said) for said in tried if said is not None]
        solved = "  ".join(f"in {limit}: {sum(n <= limit for n in lengths) / len(tried):.1%}" for limit in STEPS)
        print(f"{split:13} {len(tried):5} games  solved {solved}  median steps {median(lengths):g}")


def tokens(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    template = recipe_path("chatml_tools", recipe="alfworld").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(find_model(args.tokenizer))
    renderer = Renderer(tokenizer, chat_template=template)
    games = str(data.games_file(args.data))
    for kind, demos in (("walkthroughs", task.demos), ("explorer", task.explorer_demos)):
        chosen = demos(EPISODES, 0, args.data)
        for hints in (False, True):
            talks = [played(World(data.load_game(games, row.row_id)), said, hints) for row, said in chosen]
            print(f"{kind}{', hints' if hints else ''}: {sizes(renderer, talks)}")
        said = [len(renderer.encode_response(text)) for _, texts in chosen for text in texts]
        print(f"{kind}, a command: mean {fmean(said):.0f}, most {max(said)}")
    entries = data.entries("train", args.data)[:RANDOM_EPISODES]
    worlds = {entry.name: World(data.load_game(games, entry.name)) for entry in entries}
    talks = [played(world, wandering(world, random.Random(name)), False) for name, world in worlds.items()]
    print(f"{STEPS[0]} random moves: {sizes(renderer, talks)}")


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
    return f"{len(found)} episodes, tokens: mean {mean:.0f}, 99 % {nearly_all}, most {found[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in (("explorer", explorer), ("tokens", tokens)):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True)
        command.set_defaults(run=run)
        if run is tokens:
            command.add_argument("--tokenizer", required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
