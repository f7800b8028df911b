"""The recipe `alfworld`: the explorer, which sees only text, understands tasks and gives up when stuck."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.errors import DataError
from agent_r1.recipes.alfworld import synthetic
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.expert import Explorer, Priors, Wish, learn_priors, read_wish
from agent_r1.recipes.alfworld.game import read_game

GOLDEN = json.loads(Path(__file__).with_name("alfworld_golden.json").read_text(encoding="utf-8"))[0]
NOTHING_KNOWN = Priors(found={}, closed=frozenset())


@pytest.mark.parametrize(
    ("sentence", "wish"),
    [
        ("put some mug on desk.", Wish(kind="mug", place="desk")),
        ("put a mug in desk.", Wish(kind="mug", place="desk")),
        ("put two cd in safe.", Wish(kind="cd", place="safe", count=2)),
        ("find two cd and put them in safe.", Wish(kind="cd", place="safe", count=2)),
        ("put a hot mug in desk.", Wish(kind="mug", place="desk", treatment="heat")),
        ("cool some mug and put it in desk.", Wish(kind="mug", place="desk", treatment="cool")),
        ("clean some mug and put it in desk.", Wish(kind="mug", place="desk", treatment="clean")),
        ("look at cd under the desklamp.", Wish(kind="cd", lamp="desklamp")),
        ("examine the cd with the desklamp.", Wish(kind="cd", lamp="desklamp")),
    ],
)
def test_the_explorer_understands_every_kind_of_task(sentence: str, wish: Wish) -> None:
    assert read_wish(f"You see a desk 1.\n\nYour task is to: {sentence}") == wish


def test_the_explorer_solves_synthetic_games_from_text_alone() -> None:
    demos = synthetic.explorer_demos(240, seed=0)
    assert len(demos) == 240
    for row, texts in demos[:6]:
        world = World(synthetic.synthetic_game(row.row_id))
        for command in texts:
            world.step(command)
        assert world.won
    with pytest.raises(DataError, match="does not understand"):
        read_wish("Your task is to: dance.")


def test_the_explorer_follows_its_priors_and_finally_gives_up() -> None:
    priors = learn_priors([read_game(GOLDEN["problem"], GOLDEN["task"])])
    intro = "You see a desk 1, a drawer 2, a drawer 1, and a shelf 1.\n\nYour task is to: put a {} in shelf."
    assert Explorer(priors).act(intro.format("bowl")) == "go to desk 1"
    assert Explorer(priors).act(intro.format("butterknife")) == "go to drawer 1"
    explorer = Explorer(priors)
    said = [explorer.act(intro.format("unicorn"))]
    while (command := explorer.act(f"On the {said[-1]}, you see nothing.")) is not None:
        said.append(command)
    assert sorted(map(str, said)) == ["go to desk 1", "go to drawer 1", "go to drawer 2", "go to shelf 1"]


def test_closed_receptacles_count_half() -> None:
    found = {"mug": {"cabinet": 0.6, "desk": 0.4}}
    intro = "You see a cabinet 1, and a desk 1.\n\nYour task is to: put a mug in shelf."
    for closed, first in ((frozenset[str](), "go to cabinet 1"), (frozenset({"cabinet"}), "go to desk 1")):
        assert Explorer(Priors(found=found, closed=closed)).act(intro) == first  # 0.6 / 2 < 0.4 < 0.6


@pytest.mark.parametrize(
    ("seen", "inside", "sentence", "said"),
    [
        ("nothing", "", "put a mug in shelf.", []),
        ("nothing", "", "look at mug under the desklamp.", []),
        ("a desk 1", "a mug 1", "put a hot mug in desk.", ["go to desk 1", "take mug 1 from desk 1"]),  # no microwave
        ("a desk 1", "a mug 1", "put a mug in shelf.", ["go to desk 1", "take mug 1 from desk 1"]),  # no shelf
        ("a desk 1", "a mug 1", "look at mug under the desklamp.", ["go to desk 1", "take mug 1 from desk 1"]),
        ("a desk 1", "a desklamp 1", "look at mug under the desklamp.", ["go to desk 1"]),  # no mug to light
    ],
)
def test_the_explorer_gives_up_in_a_room_that_lacks_what_it_needs(
    seen: str, inside: str, sentence: str, said: list[str]
) -> None:
    explorer = Explorer(NOTHING_KNOWN)
    command = explorer.act(f"You see {seen}.\n\nYour task is to: {sentence}")
    for expected in said:
        assert command == expected
        command = explorer.act(f"You arrive at desk 1. On the desk 1, you see {inside}.")
    assert command is None
